"""Weights that change in a worker: adapters and the base. Names and shapes are agreed on, then the bytes are sent, by the handle of a GPU's
memory where the worker can open that, checked whole by the worker, and committed between two of its steps."""
import collections
import ctypes
import time

from . import abi
from .connection import Connection, Refused
from .digests import adapter_digest, weights_digest
from .tensors import DTYPE_NAME
from .values import block_of, each_on_host, in_order, on_host
from .wire import C, S, made, text_at

MODE = {"drain": C["TB_DRAIN"], "stop": C["TB_STOP"], "finish-old": C["TB_FINISH_OLD"], "in-flight": C["TB_IN_FLIGHT"]}
CHUNK_BYTES = 8 << 20
NOT_OPENED = ("BAD_TENSOR", "NOT_BUILT")  # what a worker answers that cannot open a handle, among others


# A version on its way. kind: TB_W_ADAPTER or TB_W_FULL; values: {name: tensor on the host}.
Change = collections.namedtuple("Change", "kind version values digest adapter flags", defaults=("", 0))


def size_of(change):
    return sum(value.nbytes for value in change.values.values())


def tensor_of(name, value):
    """A line of a manifest."""
    kind = "TB_LORA_A" if ".lora_A." in name else "TB_LORA_B" if ".lora_B." in name else "TB_BASE"
    return made("tensor", name=name, dtype=C["TB_" + DTYPE_NAME[value.dtype]], kind=C[kind], n_dim=value.dim(), dim=tuple(value.shape))


class Weights(Connection):
    """settings: lora.Settings of the adapter that is swapped."""

    def __init__(self, library, model_dir, address, settings=None, **limits):
        adapters = dict(rank=settings.rank, alpha=settings.alpha) if settings else {}
        super().__init__(library, model_dir, address, **adapters, **limits)
        self.settings, self.live_version, self.base_digest = settings, self.hello.live_version, self.hello.base
        self.opens = bool(self.hello.can & C["TB_CAN_IPC"])  # the worker opens our GPU memory
        self.shapes, self.in_force = {}, {}  # of adapters: {PEFT name: shape}; {kind: (names, hash of the manifest)}
        self.mode, self.last_swap = "drain", {}

    def contract_digest(self):
        return self.hello.contract

    def weights_digest(self):
        return self.base_digest

    def manifest(self, adapter):
        """{PEFT name: shape} of a version's tensors, in order: the worker's own."""
        if adapter not in self.shapes:
            self.send("MANIFEST_REQ", adapter=adapter)
            tensors, at, tensor, shapes = self.answer("MANIFEST").tensors, ctypes.c_uint64(), S["tb_tensor"](), {}
            while self.bridge.c.tb_tensor_next(ctypes.byref(tensors), ctypes.byref(at), ctypes.byref(tensor)):
                shapes[text_at(tensor.name)] = tuple(tensor.dim[: tensor.n_dim])
            self.shapes[adapter] = shapes
        return self.shapes[adapter]

    def live_digest(self, adapter):
        """Of the memory that the worker's forwards read, now."""
        self.manifest(adapter)  # the worker has this one, and no other that changes
        self.send("STATS_REQ")
        return abi.text_of(self.answer("STATS").adapter)

    def swap(self, adapter, version, tensors, flags=0, mode="drain"):
        """A version, live when the call returns. tensors: {PEFT name: bf16}; a worker on the same GPU reads them there. mode: what becomes of
        texts under way: drain, stop, finish-old, in-flight. Returns the digest of the live memory; the worker has compared the bytes with
        ours before."""
        self.last_swap, self.clock = {}, time.monotonic()
        shapes = self.manifest(adapter)
        values = in_order(shapes, tensors)
        block = block_of(values)
        values = dict(zip(shapes, on_host(values, block)))
        change = Change(C["TB_W_ADAPTER"], version, values, adapter_digest(self.library, shapes, values, self.settings), adapter, flags)
        self.lap("export_ms")
        if version == self.live_version and flags == 0:  # sent before: the answer says what is live
            self.begin(change)
            live = abi.text_of(self.answer("W_COMMITTED").digest)
        else:
            self.agree(change)
            live = self.transfer_adapter(change, block, mode)
        if live != change.digest:
            raise abi.Error(C["BR_E_MISMATCH"], f"version {version} of {adapter} is live with digest {live}: expected {change.digest}")
        self.live_version = version
        return live

    def swap_base(self, version, tensors):
        """All tensors of the checkpoint, {Hugging Face name: tensor}, in place of the base weights. Versions of the base count from 1."""
        self.last_swap, self.clock = {}, time.monotonic()
        values = each_on_host(tensors)
        change = Change(C["TB_W_FULL"], version, values, weights_digest(self.library, values))
        self.lap("export_ms")
        self.agree(change)
        self.base_digest = self.transfer(change)
        if self.base_digest != change.digest:
            raise abi.Error(C["BR_E_MISMATCH"], f"version {version} of the base is live with digest {self.base_digest}: expected {change.digest}")
        return self.base_digest

    # ---- the parts of a swap -------------------------------------------------------------------------------------------------

    def agree(self, change):
        """MANIFEST, unless it is the one in force."""
        names = list(change.values)
        if self.in_force.get(change.kind, (None,))[0] == names:
            return
        self.in_force.pop(change.kind, None)
        raw, message = S["tb_buffer"](), S["tb_message"]()
        try:
            for name, value in change.values.items():
                self.bridge.c.tb_tensor_add(ctypes.byref(raw), ctypes.byref(tensor_of(name, value)))
            self.bridge.check(raw.failed)
            tensors = message.manifest.tensors
            tensors.n, tensors.raw.p, tensors.raw.n = len(names), raw.bytes, raw.n
            self.post("MANIFEST", message)
        finally:
            self.bridge.c.tb_buffer_close(ctypes.byref(raw))
        self.in_force[change.kind] = names, self.answer("MANIFEST_ACK").hash

    def begin(self, change):
        self.send("W_BEGIN", change.version, flags=change.flags, kind=change.kind, base_version=self.live_version or 0, n_bytes=size_of(change),
                  manifest=self.in_force.get(change.kind, (None, 0))[1], adapter=change.adapter)
        self.flush()  # a refusal can then be heard on the way

    def transfer_adapter(self, change, block, *how):
        """By the handle of the block that holds the values, or by their bytes where there is none, or none that the worker can open."""
        handle = self.handle_of(block) if self.opens and block is not None else None
        if handle is not None:
            try:
                return self.transfer(change, *how, handle=handle)
            except Refused as refusal:
                if refusal.code not in NOT_OPENED:
                    raise
        live = self.transfer(change, *how)
        self.opens = self.opens and handle is None  # the values were sound: it was the handle
        return live

    def handle_of(self, block):
        """None: memory that cannot be shared."""
        handle = S["br_ipc"]()
        return None if self.library.c.br_ipc_export(block.data_ptr(), ctypes.byref(handle)) else handle

    def transfer(self, change, mode="drain", handle=None):
        """W_BEGIN to W_COMMITTED; times and sizes go to last_swap. handle: of the block that the values are, one behind the other."""
        self.clock = time.monotonic()
        self.begin(change)
        if handle is None:
            self.send_chunks(change)
        else:
            self.send_handles(change, handle)
        self.send("W_END", change.version, body="w_digest", digest=change.digest)
        self.lap("transfer_ms")
        self.answer("W_PREPARED")
        self.lap("verify_ms")
        pauses = (mode, self.mode) != ("drain", "drain")  # the worker keeps the mode of the last pause
        if pauses:
            self.send("PAUSE", mode=MODE[mode])
            self.mode = mode
            self.answer("STATS")
        try:
            self.send("W_COMMIT", change.version)
            live = abi.text_of(self.answer("W_COMMITTED").digest)
        except Refused:  # what was live serves on
            self.resume(pauses)
            raise
        self.resume(pauses)
        self.lap("commit_ms")
        self.last_swap.update(bytes=size_of(change), by_handle=handle is not None)
        return live

    def resume(self, pauses):
        if pauses:
            self.send("RESUME")
            self.answer("STATS")

    def lap(self, part):
        now = time.monotonic()
        self.last_swap[part], self.clock = 1000 * (now - self.clock), now

    def send_chunks(self, change):
        """From the tensors' own memory. A refusal on the way ends the sending."""
        unheard = 0
        for i, value in enumerate(change.values.values()):
            for at in range(0, max(1, value.nbytes), CHUNK_BYTES):
                n = min(CHUNK_BYTES, value.nbytes - at)
                self.send_chunk(change.version, i, at, value.data_ptr() + at, n)
                unheard += n
                if unheard >= CHUNK_BYTES:
                    unheard = 0
                    self.take(0)

    def send_chunk(self, version, tensor, offset, address, n):
        self.check(self.bridge.c.tb_trainer_send_chunk(self.trainer, version, tensor, offset, address, n))

    def send_handles(self, change, handle):
        message = S["tb_message"](w_ipc=made("w_ipc", offset=handle.offset, handle=bytes(handle.handle)))
        for i, value in enumerate(change.values.values()):
            self.post("W_IPC", message, change.version, i)
            message.w_ipc.offset += value.nbytes
