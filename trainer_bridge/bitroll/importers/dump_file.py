"""What the importers share: options that are not guessed, fields that are checked, and the file, which appears whole or not at all.

Format "foreign-logprobs" version 1, read by src/io/rollout_read.c. N sequences, T tokens of all of them one after the other:

    attributes          format, format_version "1", producer "rollout" or "trainer", source, logprob_kind: texts of fixed length
    /seq/offset         i64 [N+1]  sequence i has the tokens offset[i] .. offset[i+1] - 1
    /seq/uid, sample    text of 256 bytes, u32 [N]  the name, equal on both sides
    /seq/temperature    f32 [N]    of sampling
    /seq/prompt_len     i32 [N]    at least 1
    /tokens/id, mask    i32, u8 [T]  mask 1: sampled by the policy
    /tokens/logprob     f32 [T]    of this token given those before it; the pattern 0x7fc00000 where there is none
    /tokens/top_id, top_logprob   i32, f32 [T,K]  optional: alternatives, K at most 20; -1 and the same pattern where there is none
"""
import collections
import json
import os
import re
import sys
import warnings

from .. import libraries, program

try:
    import h5py
    import numpy as np
    FAULT = None
except Exception as error:
    FAULT = libraries.fault(error, "h5py numpy")

KINDS = ("full_softmax_over_T", "raw", "processed")
UNSCORED, NOT_A_NUMBER = 0x7FC00000, 0xFFC00000  # a NaN of the dump must not read as a log-prob that is not there
TOP_MAX, UID_BYTES, SAMPLE_END, TOKENS_MAX = 20, 256, 1 << 24, 1 << 20


class Refused(Exception):
    """One sentence: where, what was expected, what was found."""


class Text:
    """One sequence. logprob: a float or None a token; top: {token id: log-prob} a token, or None."""

    def __init__(self, uid, sample, temperature, prompt_len, tokens, mask, logprob, top=None):
        self.uid, self.sample, self.temperature, self.prompt_len = str(uid), sample, temperature, prompt_len
        self.tokens, self.mask, self.logprob, self.top = tokens, mask, logprob, top


class Names:
    """Numbers the sequences that share a name, in the order of the dump."""

    def __init__(self):
        self.count = collections.Counter()

    def next(self, uid):
        self.count[uid] += 1
        return self.count[uid] - 1


# ---- what is given or found, never guessed ------------------------------------------------------------------------------------------------


class Options:
    def __init__(self, args):
        self.args = args

    def settle(self, option, given, found, where, choices):
        if given is None and found is None:
            raise Refused(f"{where}: the dump does not say it and it is not guessed: give {option} {choices}")
        if given is not None and found is not None and given != found:
            raise Refused(f"{where}: the dump says {found}, {option} says {given}")
        return found if given is None else given

    def temperature(self, where, found=None):
        value = self.settle("--temperature", self.args.temperature, None if found is None else float(found), where, "T")
        if not 0 <= value < float("inf"):
            raise Refused(f"{where}: temperature {value}: expected a number from 0")
        return value

    def kind(self, where):
        return self.settle("--logprob-kind", self.args.logprob_kind, None, where, "|".join(KINDS))

    def shift(self, where):
        """Value i belongs to token i + shift."""
        return 1 if self.settle("--alignment", self.args.alignment, None, where, "same|next") == "next" else 0


def place(values, begin, n, shift):
    """A log-prob or None for each of n tokens: values[0] stands at token `begin`."""
    slots = [None] * n
    for i, value in enumerate(values):
        if 0 < begin + i + shift < n:
            slots[begin + i + shift] = value
    return slots


# ---- fields --------------------------------------------------------------------------------------------------------------------------------


def field(record, name, where, kind=list, why=""):
    if not isinstance(record, dict):
        raise Refused(f"{where}: expected an object, found {type(record).__name__}")
    if record.get(name) is None:
        raise Refused(f"{where}: field '{name}' is missing{why}")
    if not isinstance(record[name], kind):
        raise Refused(f"{where}: field '{name}' is of type {type(record[name]).__name__}: expected {kind.__name__}")
    return record[name]


def same_length(values, n, name, where):
    if not isinstance(values, list) or len(values) != n:
        found = f"{len(values)} values" if isinstance(values, list) else type(values).__name__
        raise Refused(f"{where}: field '{name}' has {found}: expected a list of {n}")
    return values


def records(path):
    """(where, record) of a file of JSON: one value, a list of them, or one a line."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path}: {error}") from None
    lines, count = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()], 0
    if not lines:
        raise Refused(f"{path}: the file is empty: expected JSON records")
    for number, line in lines if is_json(lines[0][1]) else [(1, text)]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Refused(f"{path}: line {number}: not whole JSON, is the file cut off? ({error})") from None
        for record in value if isinstance(value, list) else [value]:
            yield f"{path}: record {count}", record
            count += 1


def is_json(line):
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def torch_file(path):
    """The plain values and tensors of a torch file; a pickle that wants more than these is refused, and nothing in it runs."""
    try:
        import torch
    except Exception as error:
        raise Refused(f"{path}: a torch file: {libraries.fault(error, 'torch')}") from None
    numpy_parts = [np.ndarray, np.dtype, *(type(np.dtype(c)) for c in "?bBhHiIlLefd"), np.empty(0).__reduce__()[0]]
    try:
        with torch.serialization.safe_globals(numpy_parts), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles that are refused in the next line
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever the damage led to
        wanted = re.search(r"GLOBAL ([\w.]{1,160})", str(error))  # torch's own words advise to switch the safety off
        if wanted:
            raise Refused(f"{path}: a pickle that would run {wanted[1]} to be read: expected plain tensors, lists, numbers and texts, saved as such; "
                          "nothing in it was run") from None
        raise Refused(f"{path}: not a whole torch file of plain tensors, lists, numbers and texts ({type(error).__name__}); nothing in it was run") \
            from None


def plain(value):
    """Tensors and arrays as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


# ---- the file ------------------------------------------------------------------------------------------------------------------------------


def check(text, where, seen):
    n = len(text.tokens)
    if not 1 <= n <= TOKENS_MAX or any(type(t) is not int or not 0 <= t < 1 << 31 for t in text.tokens):
        raise Refused(f"{where}: expected 1 to 2^20 token ids, whole numbers from 0")
    if len(text.mask) != n or len(text.logprob) != n or any(m not in (0, 1) for m in text.mask):
        raise Refused(f"{where}: {n} tokens, {len(text.mask)} mask values of 0 or 1, {len(text.logprob)} log-probs: expected one each")
    if not 1 <= text.prompt_len <= n or text.mask[0]:
        raise Refused(f"{where}: a prompt of {text.prompt_len} of {n} tokens: expected at least one, outside the mask")
    if any(x is not None and type(x) not in (int, float) for x in text.logprob):
        raise Refused(f"{where}: a log-prob is not a number")
    if not 1 <= len(text.uid.encode()) < UID_BYTES or not 0 <= text.sample < SAMPLE_END:
        raise Refused(f"{where}: the name '{text.uid[:80]}' sample {text.sample}: expected 1 to 255 bytes, a number under 2^24")
    if (text.uid, text.sample) in seen:
        raise Refused(f"{where}: the name '{text.uid}' sample {text.sample} comes twice")
    seen.add((text.uid, text.sample))


def bits(values):
    """f32 with the patterns of NaN and of nothing told apart."""
    out = np.array([np.nan if v is None else v for v in values], dtype=np.float64).astype(np.float32).view(np.uint32)
    nan = np.isnan(out.view(np.float32))
    out[nan] = [UNSCORED if v is None else NOT_A_NUMBER for v, is_nan in zip(values, nan) if is_nan]
    return out.view(np.float32)


def alternatives(texts):
    """(ids, log-probs) of all tokens, K a row, best first."""
    rows = [sorted((row or {}).items(), key=lambda item: -item[1])[:TOP_MAX] for t in texts for row in t.top or [None] * len(t.tokens)]
    width = max(map(len, rows), default=0)
    ids, values = np.full((len(rows), width), -1, np.int32), np.full((len(rows), width), UNSCORED, np.uint32).view(np.float32)
    for i, row in enumerate(rows):
        if row:
            ids[i, : len(row)], values[i, : len(row)] = [id_ for id_, _ in row], bits([value for _, value in row])
    return ids, values


def columns_of(texts):
    columns = {
        "seq/offset": np.cumsum([0] + [len(t.tokens) for t in texts], dtype=np.int64),
        "seq/uid": np.array([t.uid.encode() for t in texts], dtype=f"S{UID_BYTES}"),
        "seq/sample": np.array([t.sample for t in texts], dtype=np.uint32),
        "seq/temperature": np.array([t.temperature for t in texts], dtype=np.float32),
        "seq/prompt_len": np.array([t.prompt_len for t in texts], dtype=np.int32),
        "tokens/id": np.array([i for t in texts for i in t.tokens], dtype=np.int32),
        "tokens/mask": np.array([m for t in texts for m in t.mask], dtype=np.uint8),
        "tokens/logprob": bits([x for t in texts for x in t.logprob]),
    }
    ids, values = alternatives(texts)
    if ids.shape[1]:
        columns.update({"tokens/top_id": ids, "tokens/top_logprob": values})
    return columns


def write(path, source, producer, kind, texts):
    attributes = dict(format="foreign-logprobs", format_version="1", producer=producer, source=source, logprob_kind=kind)
    try:
        columns = columns_of(texts)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise Refused(f"{path}: not written: a number of the dump does not fit its column: {error}") from None
    try:
        with h5py.File(path + ".part", "w", libver=("earliest", "v110")) as file:
            for name, text in attributes.items():
                file.attrs[name] = np.bytes_(text)
            for name, column in columns.items():
                file.create_dataset(name, data=column, compression="gzip", compression_opts=1, shuffle=True)
        os.replace(path + ".part", path)
    except OSError as error:
        raise Refused(f"{path}: cannot be written: {error}") from None
    finally:
        if os.path.exists(path + ".part"):
            os.remove(path + ".part")


def take(read, options, texts):
    seen = set()
    try:
        for where, text in read(options):
            check(text, where, seen)
            texts.append(text)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # values of a shape that nobody foresaw
        raise Refused(f"{options.args.dump}: malformed behind {len(texts)} whole sequences: {error}") from None


def run(*importer, **forms):
    """The program of an importer, of the arguments of `convert`."""
    sys.exit(program.status_of(importer[0], lambda: convert(*importer, **forms)))


def convert(source, description, read, sides=True, alignment=True):
    """The status of one command line. read(options) yields (where, Text)."""
    parser = program.Parser(prog=f"python -m bitroll.importers.{source}", description=description)
    parser.add_argument("dump", metavar="IN")
    parser.add_argument("--out", required=True, metavar="F.h5")
    if sides:
        parser.add_argument("--side", required=True, choices=("rollout", "train"), help="whose log-probs of the dump")
    parser.add_argument("--logprob-kind", choices=KINDS, help="log-softmax of x / T; of x; or over what top-k, top-p and min-p left: needed")
    parser.add_argument("--temperature", type=float, metavar="T", help="of sampling: needed where the dump does not say it")
    if alignment:
        parser.add_argument("--alignment", choices=("same", "next"),
                            help="value i is of token i, or of the token after it: needed where the dump does not say it")
    args = parser.parse_args()
    options, texts = Options(args), []
    try:
        if FAULT:
            raise Refused(FAULT)
        program.check_regular(args.dump)
        kind = options.kind(args.dump)
        take(read, options, texts)
        if not texts:
            raise Refused(f"{args.dump}: no sequence in it")
        write(args.out, source, "trainer" if sides and args.side == "train" else "rollout", kind, texts)
    except Refused as error:
        return program.failed(source, error)
    program.say(f"{source}: {len(texts)} sequences, {sum(map(len, (t.tokens for t in texts)))} tokens, "
                f"{sum(x is not None for t in texts for x in t.logprob)} log-probs of kind {kind}")
    return 0
