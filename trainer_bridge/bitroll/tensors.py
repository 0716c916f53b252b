"""Tensors in files, safetensors: a checkpoint folder's by their names, mapped, not read; and files written anew."""
import json
import mmap
import os

import torch

from .names import MODEL_PREFIX

DTYPE = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
DTYPE_NAME = {dtype: name for name, dtype in DTYPE.items()}


class Checkpoint:
    def __init__(self, model_dir):
        self.dir = model_dir
        index = os.path.join(model_dir, "model.safetensors.index.json")
        if os.path.exists(index):
            with open(index, encoding="utf-8") as file:
                shards = sorted(set(json.load(file)["weight_map"].values()))
        else:
            shards = ["model.safetensors"]
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


def read_safetensors(path):
    """{name: tensor} over the mapped file."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # copy on write: torch has no read-only tensors
    n_header = int.from_bytes(mapped[:8], "little")
    if n_header > len(mapped) - 8:
        raise ValueError(f"{path}: a header of {n_header} bytes in a file of {len(mapped)}")
    tensors = {}
    for name, entry in json.loads(mapped[8 : 8 + n_header]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        count, dtype = 1, DTYPE[entry["dtype"]]
        for size in entry["shape"]:
            count *= size
        if end - begin != count * dtype.itemsize or 8 + n_header + end > len(mapped):
            raise ValueError(f"{path}: {name} of shape {entry['shape']} has bytes {begin} to {end}")
        flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=8 + n_header + begin) if count else torch.empty(0, dtype=dtype)
        tensors[name] = flat.view(entry["shape"])
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
    with open(path + ".part", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in tensors:
            file.write(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)
