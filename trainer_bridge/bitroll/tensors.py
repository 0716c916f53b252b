"""Tensors in files, safetensors: a checkpoint folder's by their names, mapped, not read; and files written anew."""
import errno
import json
import math
import mmap
import operator
import os

import torch

from . import program
from .names import MODEL_PREFIX

DTYPE = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
DTYPE_NAME = {dtype: name for name, dtype in DTYPE.items()}


class Checkpoint:
    def __init__(self, model_dir):
        self.dir = model_dir
        program.check_regular(os.path.join(model_dir, "config.json"))  # what every checkpoint has: without it the folder is another one
        index = os.path.join(model_dir, "model.safetensors.index.json")
        if os.path.exists(index):
            shards = _shards(index)
        elif os.path.exists(os.path.join(model_dir, "model.safetensors")):
            shards = ["model.safetensors"]
        else:
            raise FileNotFoundError(errno.ENOENT, "expected model.safetensors.index.json or model.safetensors in it, found neither", model_dir)
        self.tensors = {}
        for shard in shards:
            self.tensors.update(read_safetensors(os.path.join(model_dir, shard)))
        self.prefix = MODEL_PREFIX if any(name.startswith(MODEL_PREFIX) for name in self.tensors) else ""

    def __getitem__(self, name):
        """By the name behind the prefix of multimodal checkpoints."""
        try:
            return self.tensors[self.prefix + name]
        except KeyError:
            raise KeyError(f"{self.dir}: there is no tensor {self.prefix + name}") from None

    def __contains__(self, name):
        return self.prefix + name in self.tensors


def _object(path, text):
    """What JSON says, if it is an object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found


def read_json(path):
    with open(path, "rb") as file:
        return _object(path, file.read())


def _shards(path):
    """Names of the files of an index."""
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{path}: expected a weight_map of names of files")
    return sorted(set(names.values()))


def _entry(path, name, entry, n_data):
    """(dtype, shape, count, first byte) of a tensor in a file with so many bytes behind its header."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        count = math.prod(map(operator.index, shape))
        fits = min(shape, default=0) >= 0 and 0 <= begin <= end <= n_data
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path}: {name}: expected a dtype, a shape and two data_offsets") from None
    if not isinstance(dtype, str) or dtype not in DTYPE:
        raise ValueError(f"{path}: {name}: dtype {dtype!r:.80}: expected one of {', '.join(DTYPE)}")
    if not fits or end - begin != count * DTYPE[dtype].itemsize:
        raise ValueError(f"{path}: {name} of shape {shape} has bytes {begin} to {end}")
    return DTYPE[dtype], shape, count, begin


def read_safetensors(path):
    """{name: tensor} over the mapped file."""
    with program.named(path), open(path, "rb") as file:
        n_file = os.fstat(file.fileno()).st_size
        n_header = int.from_bytes(file.read(8), "little")
        if n_file < 8 or n_header > n_file - 8:
            raise ValueError(f"{path}: a header of {n_header} bytes in a file of {n_file}")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # copy on write: torch has no read-only tensors
    tensors = {}
    for name, entry in _object(path, mapped[8 : 8 + n_header]).items():
        if name == "__metadata__":
            continue
        dtype, shape, count, begin = _entry(path, name, entry, n_file - 8 - n_header)
        flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=8 + n_header + begin) if count else torch.empty(0, dtype=dtype)
        tensors[name] = flat.view(shape)
    return tensors


def write_safetensors(path, tensors):
    """tensors: (name, tensor), written in this order; the file appears whole or not at all."""
    header, at = {}, 0
    for name, tensor in tensors:
        n = tensor.numel() * tensor.element_size()
        header[name] = dict(dtype=DTYPE_NAME[tensor.dtype], shape=list(tensor.shape), data_offsets=[at, at + n])
        at += n
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with program.written(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in tensors:
            file.write(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
