"""The rollout engine in this process: texts sampled token by token, and adapters that change between two steps."""
import ctypes
import os
import struct

import torch

from . import abi
from .names import PEFT_PREFIX

INITIAL, RESYNC = abi.CONSTANTS["BR_SWAP_INITIAL"], abi.CONSTANTS["BR_SWAP_RESYNC"]
DRAIN = abi.CONSTANTS["BR_SWAP_DRAIN"]
COMMITTED = abi.CONSTANTS["BR_SWAP_COMMITTED"]
POLL_MAX = 4096


class Sample:
    """A prompt and what was sampled behind it. logprob: the bits of binary32 numbers, one a sampled token."""

    def __init__(self, uid, sample, prompt):
        self.uid, self.sample, self.prompt, self.tokens, self.logprob, self.stop = uid, sample, list(prompt), [], [], None


class Engine:
    """adapters: {name: folder, or None for one that begins empty}. swap_rank: of adapters that change."""

    def __init__(self, library, model_dir, adapters, swap_rank=0, swap_alpha=0.0, backend="oracle", **options):
        sources = (abi.STRUCTS["br_adapter_source"] * max(1, len(adapters)))()
        self.keep = [os.fsencode(model_dir), backend.encode(), sources]
        for source, (name, folder) in zip(sources, adapters.items()):
            self.keep += [name.encode(), os.fsencode(folder) if folder else None]
            source.name, source.dir = self.text(self.keep[-2]), self.text(self.keep[-1])
        made = abi.STRUCTS["br_engine_options"](n_adapter=len(adapters), swap_rank=swap_rank, swap_alpha=swap_alpha, **options)
        made.model_dir, made.backend, made.adapter = self.text(self.keep[0]), self.text(self.keep[1]), ctypes.addressof(sources)
        self.library, self.handle = library, ctypes.c_void_p()
        library.check(library.c.br_engine_open(ctypes.byref(made), ctypes.byref(self.handle)))

    @staticmethod
    def text(data):
        return None if data is None else ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p)

    def close(self):
        self.library.c.br_engine_close(self.handle)
        self.handle = None

    def weights_digest(self):
        return abi.text_of(self.library.c.br_engine_weights_digest(self.handle))

    def live_digest(self, adapter):
        """Of the memory that forwards read, now."""
        digest = abi.STRUCTS["br_digest"]()
        self.library.check(self.library.c.br_engine_adapter_live_digest(self.handle, adapter.encode(), ctypes.byref(digest)))
        return abi.text_of(digest)

    # ---- sampling ------------------------------------------------------------------------------------------------------------

    def submit(self, text, adapter, seed, **sampling):
        setting = self.library.c.br_sampling_default()
        for name, value in sampling.items():
            setattr(setting, name, value)
        prompt, uid, name = (ctypes.c_int32 * len(text.prompt))(*text.prompt), text.uid.encode(), adapter.encode()
        request = abi.STRUCTS["br_request"](n_prompt=len(text.prompt), sample=text.sample, seed=seed, sampling=setting)
        request.uid, request.adapter, request.prompt = self.text(uid), self.text(name), ctypes.addressof(prompt)
        number = ctypes.c_uint64()
        self.library.check(self.library.c.br_submit(self.handle, ctypes.byref(request), ctypes.byref(number)))
        return number.value

    def generate(self, texts, adapter, seed, **sampling):
        """Fills the texts."""
        waiting, running, errors = list(reversed(texts)), {}, []
        tokens, n, done = (abi.STRUCTS["br_token"] * POLL_MAX)(), ctypes.c_int32(), ctypes.c_int32()
        while waiting or running:
            self.submit_some(waiting, running, adapter, seed, sampling)
            self.library.check(self.library.c.br_poll(self.handle, tokens, POLL_MAX, ctypes.byref(n), ctypes.byref(done)))
            for token in tokens[: n.value]:
                text = running[token.request]
                if token.token >= 0:
                    text.tokens.append(token.token)
                    text.logprob.append(token.logprob)
                if token.last:
                    text.stop = token.stop
                    del running[token.request]
                    errors += self.error_of(token)
        if errors:
            raise errors[0]

    def submit_some(self, waiting, running, adapter, seed, sampling):
        """As many as the engine holds at once; the rest when some have ended."""
        while waiting:
            try:
                running[self.submit(waiting[-1], adapter, seed, **sampling)] = waiting[-1]
            except abi.Error as error:
                if error.status != abi.CONSTANTS["BR_E_LIMIT"] or not running:
                    raise
                return
            waiting.pop()

    def error_of(self, token):
        """The error that ended a request, in a list; empty when none did."""
        if token.stop != abi.CONSTANTS["BR_STOP_ERROR"]:
            return []
        sentence = ctypes.c_char_p()
        status = self.library.c.br_request_error(self.handle, token.request, ctypes.byref(sentence))
        return [abi.Error(status, sentence.value.decode())]

    # ---- adapters that change ------------------------------------------------------------------------------------------------

    def manifest(self, adapter):
        """{PEFT name: shape} of a version's tensors, in order."""
        n, digest, tensor = ctypes.c_int64(), abi.STRUCTS["br_digest"](), abi.STRUCTS["br_swap_tensor"]()
        self.library.check(self.library.c.br_swap_manifest(self.handle, adapter.encode(), ctypes.byref(n), ctypes.byref(digest)))
        shapes = {}
        for i in range(n.value):
            self.library.check(self.library.c.br_swap_tensor_at(self.handle, adapter.encode(), i, ctypes.byref(tensor)))
            shapes[bytes(tensor.name).split(b"\0")[0].decode()] = (tensor.n_row, tensor.n_col)
        return shapes

    def swap(self, adapter, version, tensors, flags=0):
        """A version from this process's memory, live when the call returns. tensors: {PEFT name: bf16}."""
        shapes = self.manifest(adapter)
        if set(shapes) != set(tensors):
            raise KeyError(f"{len(tensors)} tensors: the engine's adapter has {len(shapes)}, not in both: {sorted(set(shapes) ^ set(tensors))[:3]}")
        for key, shape in shapes.items():
            if tensors[key].dtype != torch.bfloat16 or tuple(tensors[key].shape) != shape:
                raise ValueError(f"{key}: {tensors[key].dtype} {tuple(tensors[key].shape)}: expected torch.bfloat16 {shape}")
        values = [tensors[key].contiguous().cpu() for key in shapes]
        addresses, answer = (ctypes.c_void_p * len(values))(*(v.data_ptr() for v in values)), ctypes.c_int()
        c, name = self.library.c, adapter.encode()
        self.library.check(c.br_swap_from_memory(self.handle, name, addresses, len(values), None, version, flags, ctypes.byref(answer)))
        self.library.check(c.br_swap_commit(self.handle, name, version, DRAIN, ctypes.byref(answer)))
        if answer.value != COMMITTED:
            raise RuntimeError(f"version {version} of {adapter}: not committed, answer {answer.value}")


def adapter_digest(library, names, tensors, settings):
    """The digest of an adapter by lora/lora_digest.h, of bf16 tensors in the order of a manifest (A, then B, map by map)."""
    stream, names = b"", list(names)
    for name_a, name_b in zip(names[::2], names[1::2]):
        module = name_a[len(PEFT_PREFIX) : -len(".lora_A.weight")]
        stream += module.encode() + b"\0" + struct.pack("<iid", settings.rank, int(settings.rslora), settings.alpha)
        for name in (name_a, name_b):
            one = library.hash(tensors[name].contiguous().cpu().view(torch.uint8).numpy().tobytes())
            stream += struct.pack("<QQ", one.lo, one.hi)
    return abi.text_of(library.hash(stream))
