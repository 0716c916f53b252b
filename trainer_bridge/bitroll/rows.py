"""The rows of one forward: sequences packed one after the other, each from its position 0."""
import itertools
from array import array

import torch

from . import abi, functions
from .ops import Host, packer

PAGE_TOKENS, PACK_FAULT = abi.CONSTANTS["BR_PAGE_TOK"], packer("bi_fault")


class Rows:
    """cu_seqlens: [0, n_0, n_0 + n_1, ..]; n_row: rows that come, every one of a sequence: a row that no op fills would bring chance into the
    gradients. slot: 0, the adapter, or -1, the base, of every row, or a tensor (n_row) int32 of these; of a tensor on a GPU the values are not
    checked, which would wait for the GPU: the caller answers for them. fn: what computes, one function an op under the names of functions.py
    (float64.py, rehash.py and torch_ops.py have others)."""

    def __init__(self, ops, cu_seqlens, n_row=None, slot=0, fn=functions):
        cu = [int(c) for c in cu_seqlens]
        lengths = [b - a for a, b in zip(cu, cu[1:])]
        if min(lengths, default=0) < 1 or cu[0] != 0:
            raise ValueError(f"sequences of {lengths} rows from row {cu[0] if cu else 'none'}: expected at least one, of one row or more, from row 0")
        self.ops, self.fn, self.n_seq, self.lengths = ops, fn, len(lengths), lengths
        self.n_row = cu[-1] if n_row is None else n_row
        if self.n_row != cu[-1]:
            raise ValueError(f"{cu[-1]} rows in sequences: expected {self.n_row}, as many as come (padding goes by cu_seqlens_q_padded)")
        if self.n_row > ops.limits.n_row or max(lengths) > ops.limits.n_pos:
            raise ValueError(f"{self.n_row} rows, the longest sequence {max(lengths)}: expected at most {ops.limits.n_row}, {ops.limits.n_pos}: what "
                             "the ops were opened for")
        blocks = [(n + PAGE_TOKENS - 1) // PAGE_TOKENS for n in lengths]
        self.n_block = sum(blocks)
        seg, row_seg, first_block = array("i"), array("i"), array("i", [0, *itertools.accumulate(blocks[:-1])])
        for i, n in enumerate(lengths):
            seg.extend((i, cu[i], n, 0))
            row_seg.extend(array("i", (i,)) * n)
        self.seg, self.row_seg, self.first_block = self._upload(seg, row_seg, first_block)
        self.batch = Host(ops.pack("bi_batch", n_row=self.n_row, n_seg=self.n_seq, seg_row_max=max(lengths),
                             pos_max=max(lengths) - 1, seg=self.seg, row_seg=self.row_seg))
        if isinstance(slot, torch.Tensor):
            self.check("slots", slot, torch.int32)
            self.check_slots(slot)
        elif slot not in (0, -1):
            raise ValueError(f"slot {slot}: expected 0, the adapter, or -1, the base")
        self.row_slot = slot if isinstance(slot, torch.Tensor) else ops.rows_of_slot(slot)[: self.n_row]
        self.fault = torch.zeros(self.n_row, dtype=torch.int32, device=ops.device)
        self.stage = ["no fault"]  # names of the codes in fault
        self.trace, self.layer = None, -1  # called with (stage, layer, pieces, count) at the points that `dump --stage-hash` names

    def _upload(self, *parts):
        """Arrays of int32 on the ops' device, in one copy that a GPU's queue is not drained for."""
        whole = torch.frombuffer(bytearray().join(parts), dtype=torch.int32)
        if self.ops.device.type == "cuda":
            whole = whole.pin_memory().to(self.ops.device, non_blocking=True)
        return whole.split([len(p) for p in parts])

    def check(self, what, tensor, dtype):
        """A tensor that comes from outside, one value a row: an op takes its address, whatever lies there."""
        self.ops.check_device(tensor)
        if tensor.dtype != dtype or tensor.shape != (self.n_row,) or not tensor.is_contiguous():
            raise ValueError(f"{what}: {tensor.dtype} {tuple(tensor.shape)}{'' if tensor.is_contiguous() else ' with gaps'}: expected {dtype} "
                             f"({self.n_row},), one behind the other")

    @staticmethod
    def check_slots(slot):
        """An op reads the matrices of an adapter where a slot says that they are."""
        bad = ((slot < -1) | (slot > 0)).nonzero() if slot.device.type == "cpu" else ()
        if len(bad):
            row = int(bad[0])
            raise ValueError(f"slots: {int(slot[row])} at row {row}: expected 0, the adapter, or -1, the base")

    def fault_at(self, name):
        """The fault argument of an op: rows that go wrong there say so in check_faults."""
        self.stage.append(name)
        return PACK_FAULT(row=self.fault, code=len(self.stage) - 1)

    def check_faults(self):
        if int(torch.count_nonzero(self.fault)):
            row = int(torch.nonzero(self.fault)[0])
            seg = int(self.row_seg[row])
            raise FloatingPointError(f"row {row} (sequence {seg}): not finite at {self.stage[int(self.fault[row])]}")

    def show(self, stage, *pieces, count=None):
        """Lets the trace see the rows of a stage; returns the first."""
        if self.trace:
            self.trace(stage, self.layer, [p.data if isinstance(p, functions.Stream) else p for p in pieces], count)
        return pieces[0]

    def cache(self, block_bytes):
        """Fresh pages for one layer: a bi_cache, and the memory to keep."""
        memory = torch.empty(self.n_block * block_bytes, dtype=torch.uint8, device=self.ops.device)
        return self.ops.pack("bi_cache", base=memory, block_bytes=block_bytes, first=self.first_block), memory

    def state(self, seq_bytes):
        memory = torch.empty(self.n_seq * seq_bytes, dtype=torch.uint8, device=self.ops.device)
        return self.ops.pack("bi_state", base=memory, seq_bytes=seq_bytes), memory

    def empty(self, *shape, dtype=torch.bfloat16):
        return torch.empty(self.n_row, *shape, dtype=dtype, device=self.ops.device)
