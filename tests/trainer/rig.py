"""What the trainer's tests share: checkpoints made by `bitroll init`, a model on the oracle, and the engine's own word on the same rows.
BITROLL_BACKEND=cuda runs the model on the GPU, still against the engine's oracle."""
import atexit
import os
import random
import shutil
import subprocess
import sys
import tempfile

TREE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(TREE, "trainer_bridge"))

import torch

from bitroll import abi, lora, ops, peft
from bitroll.tensors import Checkpoint
from bitroll.model import Model

BACKEND = os.environ.get("BITROLL_BACKEND", "oracle")
DEVICE = "cpu" if BACKEND == "oracle" else "cuda"
BITROLL = os.environ.get("BITROLL", os.path.join(TREE, "build", "bitroll"))
LIBRARY = abi.Library()
PLACE = tempfile.mkdtemp(prefix="bitroll-trainer-")
atexit.register(shutil.rmtree, PLACE, ignore_errors=True)
RANK, ALPHA = 32, 64.0


def environment():
    """Of a Python that loads the package: the tree's folder stands before the caller's own on PYTHONPATH, where megatron-core may lie."""
    theirs = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.path.join(TREE, "trainer_bridge") + (os.pathsep + theirs if theirs else "")}


def bitroll(*arguments):
    done = subprocess.run([BITROLL, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def checkpoint(preset, seed=1):
    """(folder, folder of an adapter on every map)."""
    folder = os.path.join(PLACE, f"{preset}-{seed}")
    if not os.path.exists(folder):
        bitroll("init", "--preset", preset, "--seed", str(seed), "--out", folder, "--lora-rank", str(RANK), "--lora-out", folder + "-lora",
                "--lora-seed", "3")
    return folder, folder + "-lora"


class Rig:
    """One model with its ops. adapter: folder to load, or None for a model without adapters."""

    def __init__(self, preset, adapter=True, model=Model, gradients=False, n_thread=0, **kw):
        self.folder, self.adapter_folder = checkpoint(preset)
        self.config = LIBRARY.config(self.folder)
        self.ops = ops.Ops(self.config, 1024, 1024, rank_max=RANK if adapter else 0, n_slot=1, backend=BACKEND, gradients=gradients,
                           n_thread=n_thread, library=LIBRARY)
        self.settings = lora.Settings(self.ops, RANK, ALPHA) if adapter else lora.Settings(self.ops)
        self.checkpoint = Checkpoint(self.folder)
        self.model = model(self.settings, self.config, self.checkpoint, **kw)
        if adapter:
            peft.load(self.model, self.adapter_folder, self.checkpoint.prefix)
            lora.publish(self.model)

    def close(self):
        self.ops.close()


def sequences(config, lengths, seed=5):
    """Token ids of so many sequences."""
    rng = random.Random(seed)
    return [[rng.randrange(3, config.n_vocab) for _ in range(n)] for n in lengths]


def rows_of(texts):
    """(lengths, inputs, targets) of packed sequences: each row predicts the token behind it."""
    def flat(lists):
        return torch.tensor([t for one in lists for t in one], dtype=torch.int32).to(DEVICE)
    return [len(t) - 1 for t in texts], flat([t[:-1] for t in texts]), flat([t[1:] for t in texts])


def engine_lines(folder, texts, adapter=None):
    """`dump --stage-hash` of the engine."""
    path = os.path.join(PLACE, "rows.jsonl")
    with open(path, "w", encoding="ascii") as file:
        for i, text in enumerate(texts):
            file.write('{"uid": "s%d", "prompt": %s}\n' % (i, text))
    extra = ["--adapter", f"a={adapter}", "--adapter-override", "a"] if adapter else []
    return [line for line in bitroll("dump", "--stage-hash", "--model", folder, "--backend", "oracle", "--in", path, *extra).splitlines()
            if len(line.split()) == 5 and "#" in line.split()[0]]


def ones(n, value=1.0):
    return torch.full((n,), value, device=DEVICE)


def bits(tensor):
    return tensor.detach().contiguous().view(torch.int32).cpu()
