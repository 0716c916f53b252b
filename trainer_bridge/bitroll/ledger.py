"""The proof ledger of a training run (bitroll_ledger.h): a step's texts, their log-probs three times, one link of a chain.

A log-prob list of a text has an entry, 32 bits as an int, for every token that the policy sampled: all of text.tokens, or those that
text.mask marks 1 where a text has several turns."""
import ctypes
import os

from . import abi

UNSCORED = 0x7FC00000


class Record:
    """What a step's record says. first: (sequence of the step, position in it) of the first log-prob that differs, or None."""

    def __init__(self, made):
        for name in ("step", "version", "n_seq", "n_tok", "n_compared", "n_differ", "n_differ_again", "n_differ_update", "k1", "k3",
                     "reward_mean"):
            setattr(self, name, getattr(made, name))
        self.first = None if made.first_seq < 0 else (made.first_seq, made.first_pos)
        self.link = bytes(made.link).hex()


def _or(value, default):
    return default if value is None else value


def _slots(text, mask, bits, what):
    """One array of a text, aligned with its tokens."""
    if len(bits) != sum(mask):
        raise ValueError(f"uid '{text.uid}', sample {text.sample}: {len(bits)} log-probs of {what}: expected {sum(mask)}, one a sampled token")
    following = iter(bits)
    return abi.array(f"uid '{text.uid}', sample {text.sample}: log-prob of {what}", ctypes.c_uint32,
                     [next(following) if sampled else UNSCORED for sampled in mask])


def n_step_of(library, path):
    """How many steps the file has."""
    n_step = ctypes.c_int64()
    library.check(library.c.br_ledger_steps(os.fsencode(path), ctypes.byref(n_step)))
    return n_step.value


class Ledger:
    """Made by create or resume."""

    def __init__(self, library, handle):
        self.library, self.handle = library, handle

    @staticmethod
    def _run(run):
        digests = {name: abi.digest_of(run[name]) for name in ("contract", "base_rollout", "base_trainer")}
        config = run["config_text"].encode()
        return ctypes.byref(abi.STRUCTS["br_ledger_run"](config=abi.address_of(config), n_config=len(config), **digests))

    @classmethod
    def create(cls, library, path, run):
        """run: contract, base_rollout and base_trainer as digest texts, and config_text."""
        handle = ctypes.c_void_p()
        library.check(library.c.br_ledger_create(os.fsencode(path), cls._run(run), ctypes.byref(handle)))
        return cls(library, handle)

    @classmethod
    def resume(cls, library, path, run, n_step):
        """Keeps the first n_step records of the file, drops the others."""
        handle = ctypes.c_void_p()
        library.check(library.c.br_ledger_resume(os.fsencode(path), cls._run(run), abi.fitting("n_step", ctypes.c_int64, n_step), ctypes.byref(handle)))
        return cls(library, handle)

    def append(self, step, version, adapter_rollout, adapter_trainer, texts, rewards, advantages, rollout, again, update, temperature=1.0):
        """On the disk when it returns; texts of one uid are a group. temperature: the one that the texts were sampled and scored at."""
        groups = {}
        made = (abi.STRUCTS["br_ledger_seq"] * max(1, len(texts)))()
        for name, values in (("rewards", rewards), ("advantages", advantages), ("rollout", rollout), ("again", again), ("update", update)):
            if len(values) != len(texts):
                raise ValueError(f"{len(values)} {name} of {len(texts)} texts: expected one each")
        for i, (seq, text) in enumerate(zip(made, texts)):
            mask = list(_or(getattr(text, "mask", None), [1] * len(text.tokens)))
            if len(mask) != len(text.tokens):
                raise ValueError(f"uid '{text.uid}', sample {text.sample}: a mask of {len(mask)} for {len(text.tokens)} tokens: expected one each")
            ids, mask = [*text.prompt, *text.tokens], [0] * len(text.prompt) + mask
            arrays = {"token": abi.array("token", ctypes.c_int32, ids), "mask": abi.array("mask", ctypes.c_uint8, mask),
                      "rollout": _slots(text, mask, rollout[i], "rollout"), "again": _slots(text, mask, again[i], "again"),
                      "update": _slots(text, mask, update[i], "update"), "uid": text.uid.encode()}
            for name, array in arrays.items():
                setattr(seq, name, abi.address_of(array))
            seq.sample, seq.group, seq.stop, seq.temperature = text.sample, groups.setdefault(text.uid, len(groups)), text.stop, temperature
            seq.prompt_len, seq.n_tok, seq.reward, seq.advantage = len(text.prompt), len(ids), rewards[i], advantages[i]
            seq.version_begin, seq.version_end = (_or(getattr(text, name, None), version) for name in ("version_begin", "version_end"))
        record = abi.STRUCTS["br_ledger_record"]()
        one = abi.STRUCTS["br_ledger_step"](step=step, version=version, adapter_rollout=abi.digest_of(adapter_rollout),
                                            adapter_trainer=abi.digest_of(adapter_trainer), seq=abi.address_of(made), n_seq=len(texts))
        self.library.check(self.library.c.br_ledger_append(self.handle, ctypes.byref(one), ctypes.byref(record)))
        return Record(record)

    def __len__(self):
        return self.library.c.br_ledger_step_count(self.handle)

    def root(self):
        """The last link, as hex: publishing it fixes all that the file says."""
        link = (ctypes.c_uint8 * abi.CONSTANTS["BR_LEDGER_LINK_BYTES"])()
        self.library.c.br_ledger_root(self.handle, link)
        return bytes(link).hex()

    def close(self):
        """Packs the file; what was appended is on the disk whether this is called or not."""
        handle, self.handle = self.handle, None
        if handle:
            self.library.check(self.library.c.br_ledger_close(handle))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
