"""What the two sides compare, computed from the caller's own values: XXH3-128 as text, 32 hex digits."""
import ctypes
import struct

import torch

from . import abi
from .names import MODEL_PREFIX, low_ranks
from .values import on_host

NOTHING = "0" * 32  # the digest of an adapter that is not there
DTYPE_NUMBER = {torch.bfloat16: 0, torch.float32: 1, torch.uint8: 2}  # br_dtype


def packed(digest):
    """As digests are hashed again."""
    return struct.pack("<QQ", digest.lo, digest.hi)


def digest_of_bits(library, bits):
    """XXH3-128, as text, of log-prob bits as little-endian words: what a certificate is."""
    return abi.text_of(library.hash(bytes(abi.array("log-prob", ctypes.c_uint32, bits))))


def adapter_digest(library, names, tensors, settings):
    """The digest of an adapter by lora/lora_digest.h, of bf16 tensors in the order of a manifest (A, then B, map by map)."""
    stream, values = b"", on_host([tensors[name].detach().contiguous() for name in names])
    for module, *pair in low_ranks(dict(zip(names, values))):
        stream += module.encode() + b"\0" + struct.pack("<iid", settings.rank, int(settings.rslora), settings.alpha)
        stream += b"".join(packed(library.hash_at(value.data_ptr(), value.nbytes)) for value in pair)
    return abi.text_of(library.hash(stream))


def weights_digest(library, tensors):
    """The digest of a checkpoint by br_weights.h, of {checkpoint name: tensor on the host}."""
    named = {name.removeprefix(MODEL_PREFIX).replace(".base_layer.", "."): tensor for name, tensor in tensors.items()}
    level = []
    for name, tensor in sorted(named.items()):
        if tensor.dtype not in DTYPE_NUMBER:
            raise ValueError(f"{name}: {tensor.dtype}: expected one of {', '.join(map(str, DTYPE_NUMBER))}")
        form = struct.pack(f"<ii{tensor.dim()}q", DTYPE_NUMBER[tensor.dtype], tensor.dim(), *tensor.shape)
        level.append(library.hash(b"".join((name.encode(), b"\0", form, tensor.flatten().view(torch.uint8).numpy()))))
    while len(level) > 1:  # an odd last one is carried up
        pairs = [library.hash(packed(a) + packed(b)) for a, b in zip(level[::2], level[1::2])]
        level = pairs + level[len(level) & ~1 :]
    return abi.text_of(level[0])
