"""`bitroll dump --stage-hash` from the trainer's side: its lines, from the Megatron-Core forward. `diff` of both names the first op that differs.

    python -m bitroll.dump --model DIR [--adapter DIR | --adapter NAME=DIR ..] --in texts.jsonl

texts.jsonl is what the engine reads: {"prompt": [ids], "uid"?, "adapter"?, "temperature"?} a line; the engine's side of it is
`bitroll dump --stage-hash --model DIR --adapter NAME=DIR .. --in texts.jsonl`, where every text runs with the adapter that its line names. Of
`--adapter DIR`, with which every text runs, it is `--adapter a=DIR --adapter-override a`."""
import collections
import json
import os
import sys

import torch

from . import abi, lora, mcore, ops, peft, program
from .stage_hash import StageHash
from .tensors import Checkpoint, read_json

Text = collections.namedtuple("Text", "name ids temperature adapter")  # adapter: None of the base
BASE = "base"  # what a line calls it


def read_texts(path, n_vocab):
    program.check_regular(path)
    with open(path, "rb") as file:
        lines = file.read()
    try:
        lines = lines.decode().split("\n")
    except UnicodeDecodeError:
        raise ValueError(f'{path}: not text: expected a {{"prompt": [ids]}} a line; a rollout (.h5) is for `bitroll dump` alone') from None
    texts = [text_of(line, f"{path}: line {number}", number - 1, n_vocab) for number, line in enumerate(lines, 1) if line.strip()]
    if not texts:
        raise ValueError(f"{path}: no text in it")
    name, count = collections.Counter(text.name for text in texts).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{path}: {name}: {count} texts: expected a uid of each; one without has its line's number, from 0")
    return texts


def text_of(line, where, number, n_vocab):
    try:
        text = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    ids = text.get("prompt") if isinstance(text, dict) else None
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < n_vocab for i in ids):
        raise ValueError(f'{where}: expected {{"prompt": [ids]}}, token ids 0 to {n_vocab - 1}')
    if len(ids) < 2:
        raise ValueError(f"{where}: {len(ids)} token ids: expected two or more, the first predicts nothing")
    text = {"uid": str(number), "temperature": 1, "adapter": BASE} | {key: value for key, value in text.items() if value is not None}
    uid, temperature, adapter = (text[key] for key in ("uid", "temperature", "adapter"))
    if type(temperature) not in (int, float) or not isinstance(adapter, str) or not isinstance(uid, str):
        raise ValueError(f"{where}: uid {uid!r:.80}, temperature {temperature!r:.80}, adapter {adapter!r:.80}: expected text, a number and a name")
    return Text(f"{uid}#0", ids, float(temperature), None if adapter == BASE else adapter)


def folders_of(texts, given, path):
    """The adapter's folder of each text, or None. given: what --adapter said, each DIR or NAME=DIR."""
    for one in given:
        name, equals, folder = one.partition("=")
        if not name or (equals and (not folder or name == BASE)):
            raise ValueError(f"--adapter {one}: expected DIR or NAME=DIR, and a name other than {BASE}")
        adapter_settings(folder or one)  # of those, too, that no text names
    every = [one for one in given if "=" not in one]
    if every and given[1:]:
        raise ValueError(f"--adapter {every[0]}: every text runs with it: expected no other, or NAME=DIR of each")
    if every:
        return every * len(texts)
    known = dict([(None, None), *(one.split("=", 1) for one in given)])
    if len(known) <= len(given):
        raise ValueError(f"--adapter {' '.join(given)}: expected each name once")
    lacking = [text for text in texts if text.adapter not in known]
    if lacking:
        raise ValueError(f"{path}: {lacking[0].name}: adapter '{lacking[0].adapter}': expected --adapter {lacking[0].adapter}=DIR, or one DIR for "
                         "every text")
    return [known[text.adapter] for text in texts]


def adapter_settings(folder):
    """rank, alpha and rslora of a PEFT folder."""
    if not folder:
        return {"rank": 0}
    path = os.path.join(folder, "adapter_config.json")
    config = read_json(path)
    if type(config.get("r")) is not int or type(config.get("lora_alpha")) not in (int, float):
        raise ValueError(f"{path}: r {config.get('r')!r:.80}, lora_alpha {config.get('lora_alpha')!r:.80}: expected two numbers")
    return {"rank": config["r"], "alpha": float(config["lora_alpha"]), "rslora": bool(config.get("use_rslora"))}


class Held:
    """The model, with one adapter at a time: another one takes its place, or that of the whole model where rank or alpha are others."""

    def __init__(self, args, config, n_row, library):
        self.args, self.config, self.n_row, self.library = args, config, n_row, library
        self.checkpoint, self.model, self.settings, self.folder = Checkpoint(args.model), None, None, None

    def open(self, settings):
        if self.model:
            self.model.ops.close()
        table = ops.Ops(self.config, self.n_row, self.n_row, rank_max=settings["rank"], n_slot=1, backend=self.args.backend,
                        n_thread=self.args.threads, library=self.library)
        mcore.initialize(table.backend)
        self.settings, self.model = settings, mcore.BitrollModel(lora.Settings(table, **settings), self.config, self.checkpoint)

    def of(self, folder):
        """(model, slot of its rows) for a text with the adapter of that folder, or of the base."""
        if not self.model or folder not in (None, self.folder):
            settings = adapter_settings(folder)
            if settings != self.settings:
                self.open(settings)
            if folder:
                peft.load(self.model, folder, self.checkpoint.prefix)
                lora.publish(self.model)
            self.folder = folder
        return self.model, 0 if folder else -1


def stage_lines(model, slot, text):
    """Of one text: each row predicts the token behind it."""
    device, traces = model.ops.device, []

    def trace(rows):
        traces.append(StageHash(rows, [text.name]))
        return traces[0]
    token = torch.tensor(text.ids, dtype=torch.int32, device=device)
    temperature = torch.full((len(token) - 1,), text.temperature, device=device)
    with torch.no_grad():
        model.log_probs(token[:-1], mcore.pack([len(token) - 1]), token[1:], temperature, slot, trace)
    return traces[0].lines()


def arguments(argv):
    parser = program.Parser(prog="python -m bitroll.dump", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--adapter", action="append", default=[], metavar="[NAME=]DIR",
                        help="PEFT folder: of the texts that name it; without NAME= of every text; may be given again with other names [none]")
    parser.add_argument("--in", required=True, dest="texts", metavar="texts.jsonl")
    parser.add_argument("--backend", default="oracle", choices=("oracle", "cuda"))
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="of the oracle [all cores]")
    return parser.parse_args(argv)


def dump(args):
    library = abi.Library()
    config = library.config(args.model)
    texts = read_texts(args.texts, config.n_vocab)
    held = Held(args, config, max(len(text.ids) for text in texts), library)
    for text, folder in zip(texts, folders_of(texts, args.adapter, args.texts)):
        program.say("".join(line + "\n" for line in stage_lines(*held.of(folder), text)), end="")


def main(argv=None):
    return program.status_of("dump", lambda: dump(arguments(argv)))


if __name__ == "__main__":
    status = main()
    mcore.shut_down(status)
    sys.exit(status)
