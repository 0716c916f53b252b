"""The base of the arithmetic runs as it is kept: a preset's random checkpoint by its seed, and over it the tensors that training changed.

    python -m bitroll.rl.base_model [--from DIR] --out DIR      builds the checkpoint folder and checks its digest"""
import glob
import json
import os
import subprocess
import sys

from .. import abi, program
from ..tensors import read_json, read_safetensors, write_safetensors

COMMITTED = os.path.join(abi.TREE, "experiments", "rl100", "base")


def bitroll(*arguments):
    """The last line of a verb's --json."""
    command = abi.command(*arguments, "--json")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise abi.Error(0, said[-1].removeprefix("bitroll: ") if said else f"{command[0]} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def init(preset, seed, out):
    """A random checkpoint in files; its weights' digest."""
    return bitroll("init", "--preset", preset, "--seed", str(seed), "--out", out)["weights_digest"]


def overlay(folder, tensors):
    """Other values for some tensors of a checkpoint in files, of the same shape and type; its shards are written anew."""
    left = dict(tensors)
    for shard in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
        held = read_safetensors(shard)
        changed = [name for name in held if name in left]
        for name in changed:
            new, old = left.pop(name), held[name]
            if new.shape != old.shape or new.dtype != old.dtype:
                raise ValueError(f"{name}: {new.dtype} {tuple(new.shape)}: the checkpoint has {old.dtype} {tuple(old.shape)}")
            held[name] = new
        if changed:
            write_safetensors(shard, list(held.items()))
    if left:
        raise KeyError(f"{folder}: there is no tensor {min(left)}")


def build(kept, out):
    """The folder `out` of what is kept in the folder `kept`; its weights' digest, which is the one kept with them."""
    path = os.path.join(kept, "recipe.json")
    recipe = read_json(path)
    for key, kind in (("preset", str), ("seed", int), ("weights_digest", str)):
        if not isinstance(recipe.get(key), kind):
            raise ValueError(f"{path}: {key} is {recipe.get(key)!r:.80}: expected {'a number' if kind is int else 'a text'}")
    init(recipe["preset"], recipe["seed"], out)
    overlay(out, read_safetensors(os.path.join(kept, "overlay.safetensors")))
    digest = bitroll("digest", out)["weights_digest"]
    if digest != recipe["weights_digest"]:
        raise ValueError(f"{out}: weights {digest}, expected {recipe['weights_digest']}")
    return digest


def arguments(argv):
    parser = program.Parser(prog="python -m bitroll.rl.base_model", description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="kept", default=COMMITTED, help="folder of recipe.json and overlay.safetensors")
    parser.add_argument("--out", required=True)
    return parser.parse_args(argv)


def run(options):
    program.say(f"{build(options.kept, options.out)} {options.out}")


def main(argv=None):
    return program.status_of("base_model", lambda: run(arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
