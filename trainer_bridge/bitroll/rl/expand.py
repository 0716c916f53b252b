"""A checkpoint whose routed experts are bf16 in place of MXFP4: every code times its scale is a bf16 number, so the model is the same, to the
bit. What a merged adapter needs, which has no place in four bits.

    python -m bitroll.rl.expand --model DIR --out DIR"""
import argparse
import json
import os

import torch

from ..float64 import decode_fp4
from ..tensors import Checkpoint, write_safetensors

PACKED, SCALE = ".weight_packed", ".weight_scale"


def tensors_of(checkpoint):
    """(name, tensor) with experts in bf16."""
    for name, tensor in sorted(checkpoint.tensors.items()):
        if name.endswith(PACKED):
            stem = name[: -len(PACKED)]
            value = decode_fp4(tensor, checkpoint.tensors[stem + SCALE])
            wide = value.to(torch.bfloat16)
            if not torch.equal(wide.to(torch.float64), value):
                raise ValueError(f"{checkpoint.dir}: {name}: a value that bf16 does not hold")
            yield stem + ".weight", wide
        elif not name.endswith(SCALE):
            yield name, tensor


def expand(model_dir, out):
    """Writes the folder `out`."""
    with open(os.path.join(model_dir, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    for part in (config, config.get("text_config", {})):
        part.pop("quantization_config", None)
    os.makedirs(out, exist_ok=True)
    write_safetensors(os.path.join(out, "model.safetensors"), list(tensors_of(Checkpoint(model_dir))))
    with open(os.path.join(out, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)
        file.write("\n")


def main():
    p = argparse.ArgumentParser(prog="python -m bitroll.rl.expand", description="writes a checkpoint with its MXFP4 experts in bf16")
    p.add_argument("--model", required=True)
    p.add_argument("--out", required=True)
    args = p.parse_args()
    expand(args.model, args.out)


if __name__ == "__main__":
    main()
