"""The settings of a training run: one YAML file, every key known, of its type and in its range. Folders and transports are arguments of the
command and not of the run: the same file means the same run on every machine."""
import copy
import re
import types

import yaml

from .. import refusals


class Invalid(ValueError):
    """The settings cannot be used; one sentence that names the key."""


class Number:
    def __init__(self, kind, default, low, high):
        self.kind, self.default, self.low, self.high = kind, default, low, high

    def check(self, key, value):
        is_number = isinstance(value, (int, self.kind)) and not isinstance(value, bool)
        if not is_number or not self.low <= value <= self.high:
            name = "an integer" if self.kind is int else "a number"
            raise Invalid(f"{key}: expected {name} of {self.low} to {self.high}, found {value!r}")
        return self.kind(value)


class Choice:
    def __init__(self, default, *choices):
        self.default, self.choices = default, choices

    def check(self, key, value):
        if value not in self.choices or isinstance(value, bool):
            raise Invalid(f"{key}: expected one of {', '.join(map(str, self.choices))}, found {value!r}")
        return value


class Range:
    """Two numbers, the first not above the second."""

    def __init__(self, default, of):
        self.default, self.of = default, of

    def check(self, key, value):
        if not isinstance(value, list) or len(value) != 2:
            raise Invalid(f"{key}: expected two numbers, found {value!r}")
        low, high = (self.of.check(key, v) for v in value)
        if low > high:
            raise Invalid(f"{key}: the first is above the second: {value!r}")
        return [low, high]


class Peft:
    """Of the adapters, in PEFT's own names: r, lora_alpha, and what a PEFT config may say beside them, as far as it is not refused."""
    default = {"r": 32, "lora_alpha": 64.0}
    unread = {**dict.fromkeys(("dim", "rank"), "the rank is r"), "alpha": "alpha is lora_alpha",
              **dict.fromkeys(("target_modules", "exclude_modules", "layers_pattern"), "every map of the model has an adapter"),
              "inference_mode": "adapters are trained"}

    def check(self, key, value):
        if not isinstance(value, dict):
            raise Invalid(f"{key}: expected a mapping, found {value!r}")
        found = {**self.default, **value}
        found["r"] = Number(int, 32, 1, 256).check(key + ".r", found["r"])
        found["lora_alpha"] = Number(float, 64.0, 2.0**-20, 2.0**20).check(key + ".lora_alpha", found["lora_alpha"])
        for name in found:
            if name in self.unread and found[name]:
                raise Invalid(f"{key}.{name}: expected it left out, {self.unread[name]}")
        refusals.adapter(found)
        return found


KEYS = {
    "arm": Choice("E", "E", "M1", "M2", "M3"),
    "seed": Number(int, 1, 0, 2**31 - 1),
    "steps": Number(int, 20, 1, 1_000_000),
    "backend": Choice("oracle", "oracle", "cuda"),
    "threads": Number(int, 0, 0, 1024),  # of the oracle, 0: all cores
    "task": Choice("arithmetic", "arithmetic", "lower_half"),
    "lora": Peft(),
    "parallel": {name: Number(int, 1, 1, 1024) for name in refusals.PARALLEL},
    "batch": {
        "prompts": Number(int, 12, 1, 4096),
        "samples": Number(int, 4, 2, 1024),
        "prompt_tokens": Range([8, 600], Number(int, 0, 1, 65536)),  # of the task lower_half
        "turns": Number(int, 1, 1, 2),
        "max_tok": Number(int, 256, 8, 1 << 20),  # longest text, prompt included
    },
    "sampling": {
        "temperature": Number(float, 1.0, 2.0**-10, 2.0**10),
        "top_p": Number(float, 1.0, 2.0**-20, 1.0),
        "top_k": Number(int, 0, 0, 1 << 20),
        "max_new": Number(int, 6, 1, 65536),
    },
    "objective": {
        "clip": Range([0.8, 1.28], Number(float, 1.0, 0.0, 100.0)),
        "mini_batches": Number(int, 1, 1, 16),
    },
    "optimizer": {
        "lr": Number(float, 1e-3, 0.0, 10.0),
        "betas": Range([0.9, 0.95], Number(float, 0.9, 0.0, 1.0)),
        "warmup_steps": Number(int, 5, 0, 1_000_000),
        "clip_norm": Number(float, 1.0, 0.0, 1e9),
    },
    "micro_tokens": Range([300, 1100], Number(int, 300, 1, 1 << 20)),
    "heldout": {"every": Number(int, 10, 1, 1_000_000), "prompts": Number(int, 64, 0, 512)},
    "checkpoint_every": Number(int, 1, 1, 1_000_000),
    "engine": {  # of one in this process: a bitroll-worker has options of its own
        "max_seqs": Number(int, 64, 1, 4096),
        "chunk_tokens": Number(int, 256, 1, 65536),
    },
}
# Steps say when a run ends, not what a step is: one that goes on for longer is the same run. How the engine cuts its work moves no bit, and of
# a worker the trainer does not know it.
NOT_CHAINED = ("steps", "engine")


def section(path, keys, found):
    """A dict of all `keys`."""
    if not isinstance(found, dict):
        raise Invalid(f"{path.rstrip('.') or 'the settings'}: expected a mapping, found {found!r}")
    for key in found:
        if key not in keys:
            raise Invalid(f"{path}{key}: no such key, expected one of {', '.join(keys)}")
    made = {}
    for key, rule in keys.items():
        if isinstance(rule, dict):
            made[key] = section(f"{path}{key}.", rule, found.get(key, {}))
        elif key in found:
            made[key] = rule.check(path + key, found[key])
        else:
            made[key] = copy.deepcopy(rule.default)
    return made


def spaces(value, rules):
    """A section's dict with its keys as attributes; lora stays PEFT's dict."""
    inner = {k: spaces(v, rules[k]) if isinstance(rules[k], dict) else v for k, v in value.items()}
    return types.SimpleNamespace(**inner)


class Settings:
    """Keys as attributes, sections in sections. text: the settings that are chained into the ledger, as YAML."""

    def __init__(self, found):
        self.values = section("", KEYS, found)
        for key, value in vars(spaces(self.values, KEYS)).items():
            setattr(self, key, value)
        refusals.parallel(self.values["parallel"])
        if self.objective.mini_batches > self.batch.prompts:
            raise Invalid(f"objective.mini_batches: expected at most batch.prompts ({self.batch.prompts}), found {self.objective.mini_batches}")
        if self.sampling.max_new >= self.batch.max_tok:
            raise Invalid(f"sampling.max_new: expected less than batch.max_tok ({self.batch.max_tok}), found {self.sampling.max_new}")

    @property
    def text(self):
        return yaml.safe_dump({k: v for k, v in self.values.items() if k not in NOT_CHAINED}, sort_keys=True)

    @property
    def echo(self):
        return yaml.safe_dump(self.values, sort_keys=True)


# What is no YAML, no text, too long a number or too deep, and what the library itself trips over: `!!int ''`, `!!timestamp x`, `!!bool x`.
NO_YAML = (yaml.YAMLError, ValueError, RecursionError, IndexError, AttributeError, KeyError)


def flat(values, path=""):
    """{path of a key: value} of settings in sections."""
    found = {}
    for key, value in values.items():
        found.update(flat(value, f"{path}{key}.") if isinstance(value, dict) else {path + str(key): value})
    return found


def differing(path, settings):
    """Of the settings that a run was begun with, echoed at path: what is chained and is another now, each "key was A, is B". What is no
    echo any more says nothing: the ledger knows their digest."""
    try:
        with open(path, encoding="utf-8") as file:
            echo = yaml.load(file, Loader)
        if not isinstance(echo, dict):
            return []
        was, now = (flat({k: v for k, v in values.items() if k not in NOT_CHAINED}) for values in (echo, settings.values))
    except (OSError, *NO_YAML):
        return []
    return [f"{key} was {was.get(key, 'not there')}, is {now.get(key, 'not there')}" for key in sorted(was.keys() | now.keys())
            if was.get(key) != now.get(key)]


class Loader(yaml.SafeLoader):
    """YAML of which nothing is dropped in silence, with 1e-3 a number as it is everywhere else."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(keys) != len(set(keys)):
            raise yaml.YAMLError(f"a key stands twice in the mapping that begins in line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789"))


def load(path, **overrides):
    """overrides: keys of the top level that the command line gives; None: not given."""
    try:
        with open(path, encoding="utf-8") as file:
            found = yaml.load(file, Loader)
    except NO_YAML as error:
        raise Invalid(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
    found = {} if found is None else found
    if not isinstance(found, dict):
        raise Invalid(f"{path}: expected a mapping, found {type(found).__name__}")
    return Settings({**found, **{k: v for k, v in overrides.items() if v is not None}})
