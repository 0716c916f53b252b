"""What a trainer without this engine would compute: linear maps by torch.matmul in bf16, everything else as in functions.py. For a control
run, whose log-probs differ from the rollout's: mcore.BitrollModel(.., fn=TorchLinear()). Routed experts keep their own op."""
import torch

from . import functions

BF16, F32 = torch.bfloat16, torch.float32


class TorchLinear:
    """Stands for functions.py in Rows.fn."""

    def __init__(self):
        self.weights = {}   # {Map: its base weights as bf16 (n, n_in, n_out)}
        self.operands = {}  # {(Adapter, whether gradients are wanted): when it was published, and what torch multiplies by}
        self.rows = self.has_adapter = None

    def __getattr__(self, name):
        return getattr(functions, name)

    def weight(self, map):
        if map not in self.weights:
            self.weights[map] = map.weight.unpack().transpose(1, 2)
        return self.weights[map]

    def low_rank(self, adapter):
        """A^T (n, n_in, rank), B^T (n, rank, n_out) and s as bf16, made once for what was published."""
        key = adapter, torch.is_grad_enabled()
        if self.operands.get(key, (None,))[0] != adapter.n_published:
            a, b = (m.reshape(-1, *m.shape[-2:]).to(BF16).transpose(1, 2) for m in (adapter.master_a(), adapter.master_b()))
            self.operands[key] = adapter.n_published, (a, b, adapter.s.to(BF16).view(-1, 1, 1))
        return self.operands[key][1]

    def mask(self, rows):
        """(1, n_row, 1): has the row an adapter?"""
        if rows is not self.rows:
            self.rows, self.has_adapter = rows, (rows.row_slot >= 0).view(1, -1, 1)
        return self.has_adapter

    def linear(self, rows, map, x, y_f32=False):
        heads = (x if x.dim() == 3 else x.unsqueeze(1)).transpose(0, 1)  # (n, n_row, n_in)
        y = torch.matmul(heads, self.weight(map))
        if map.adapter is not None:
            a, b, s = self.low_rank(map.adapter)
            y = y + torch.matmul(torch.matmul(heads, a), b) * s * self.mask(rows)
        y = y.transpose(0, 1) if x.dim() == 3 else y[0]
        return y.to(F32).contiguous() if y_f32 else y.contiguous()

    def linear_group(self, rows, maps, x, y_f32=()):
        return [self.linear(rows, m, x, m in y_f32) for m in maps]
