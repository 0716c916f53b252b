"""`bitroll dump --stage-hash` from the trainer's side: its lines, from the Megatron-Core forward. `diff` of both names the first op that differs.

    python -m bitroll.dump --model DIR [--adapter DIR] --in texts.jsonl

texts.jsonl is what the engine reads: {"prompt": [ids], "uid"?, "temperature"?} a line; the engine's side of it is
`bitroll dump --stage-hash --model DIR --adapter a=DIR --adapter-override a --in texts.jsonl`."""
import json
import os
import sys

import torch

from . import abi, lora, mcore, ops, peft, program
from .stage_hash import StageHash
from .tensors import Checkpoint


def read_texts(path):
    """(name, ids, temperature) a line."""
    texts = []
    program.check_regular(path)
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file):
            if line.strip():
                text = json.loads(line)
                if len(text["prompt"]) < 2:
                    raise ValueError(f"{path}: line {number + 1}: {len(text['prompt'])} token ids: expected two or more, the first predicts nothing")
                texts.append((f"{text.get('uid', number)}#0", text["prompt"], float(text.get("temperature", 1))))
    if not texts:
        raise ValueError(f"{path}: no text in it")
    return texts


def adapter_settings(folder):
    """rank, alpha and rslora of a PEFT folder."""
    if not folder:
        return {"rank": 0}
    with open(os.path.join(folder, "adapter_config.json"), encoding="utf-8") as file:
        config = json.load(file)
    return {"rank": config["r"], "alpha": float(config["lora_alpha"]), "rslora": bool(config.get("use_rslora"))}


def open_model(args, n_row, library):
    config, adapter = library.config(args.model), adapter_settings(args.adapter)
    table = ops.Ops(config, n_row, n_row, rank_max=adapter["rank"], n_slot=1, backend=args.backend, n_thread=args.threads, library=library)
    mcore.initialize(table.backend)
    checkpoint = Checkpoint(args.model)
    model = mcore.BitrollModel(lora.Settings(table, **adapter), config, checkpoint)
    if args.adapter:
        peft.load(model, args.adapter, checkpoint.prefix)
        lora.publish(model)
    return model


def stage_lines(model, name, ids, temperature):
    """Of one text: each row predicts the token behind it."""
    device, traces = model.ops.device, []

    def trace(rows):
        traces.append(StageHash(rows, [name]))
        return traces[0]
    token = torch.tensor(ids, dtype=torch.int32, device=device)
    with torch.no_grad():
        model.log_probs(token[:-1], mcore.pack([len(ids) - 1]), token[1:], torch.full((len(ids) - 1,), temperature, device=device), trace=trace)
    return traces[0].lines()


def arguments(argv):
    parser = program.Parser(prog="python -m bitroll.dump", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--adapter", metavar="DIR", help="PEFT folder; every text runs with it [none]")
    parser.add_argument("--in", required=True, dest="texts", metavar="texts.jsonl")
    parser.add_argument("--backend", default="oracle", choices=("oracle", "cuda"))
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="of the oracle [all cores]")
    return parser.parse_args(argv)


def dump(args):
    texts = read_texts(args.texts)
    model = open_model(args, max(len(ids) for _, ids, _ in texts), abi.Library())
    for name, ids, temperature in texts:
        program.say("".join(line + "\n" for line in stage_lines(model, name, ids, temperature)), end="")


def main(argv=None):
    return program.status_of("dump", lambda: dump(arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
