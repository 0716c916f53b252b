"""A checkpoint whose routed experts are bf16 in place of MXFP4: every code times its scale is a bf16 number, so the model is the same, to the
bit. What a merged adapter needs, which has no place in four bits.

    python -m bitroll.rl.expand --model DIR --out DIR"""
import json
import os
import sys

import torch

from .. import program
from ..float64 import decode_fp4
from ..tensors import Checkpoint, read_json, write_safetensors

PACKED, SCALE = ".weight_packed", ".weight_scale"


def tensors_of(checkpoint):
    """(name, tensor) with experts in bf16."""
    for name, tensor in sorted(checkpoint.tensors.items()):
        if name.endswith(PACKED):
            stem = name[: -len(PACKED)]
            scale = checkpoint.tensors.get(stem + SCALE)
            if scale is None or scale.shape != (*tensor.shape[:-1], tensor.shape[-1] // 16):
                raise ValueError(f"{checkpoint.dir}: {name}: expected a tensor {stem + SCALE} with a byte for 16 of its own")
            value = decode_fp4(tensor, scale)
            wide = value.to(torch.bfloat16)
            if not torch.equal(wide.to(torch.float64), value):
                raise ValueError(f"{checkpoint.dir}: {name}: a value that bf16 does not hold")
            yield stem + ".weight", wide
        elif not name.endswith(SCALE):
            yield name, tensor


def expand(model_dir, out):
    """Writes the folder `out`."""
    config = read_json(os.path.join(model_dir, "config.json"))
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part.pop("quantization_config", None)
    checkpoint = Checkpoint(model_dir)
    os.makedirs(out, exist_ok=True)
    write_safetensors(os.path.join(out, "model.safetensors"), list(tensors_of(checkpoint)))
    with program.written(os.path.join(out, "config.json"), encoding="utf-8") as file:
        json.dump(config, file, indent=2)
        file.write("\n")


def arguments(argv):
    p = program.Parser(prog="python -m bitroll.rl.expand", description="writes a checkpoint with its MXFP4 experts in bf16")
    p.add_argument("--model", required=True)
    p.add_argument("--out", required=True)
    return p.parse_args(argv)


def run(args):
    expand(args.model, args.out)


def main(argv=None):
    return program.status_of("expand", lambda: run(arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
