"""What a trainer without this engine would compute: linear maps by torch.matmul in bf16, everything else as in functions.py. For a control
run, whose log-probs differ from the rollout's: mcore.BitrollModel(.., fn=TorchLinear()). Routed experts keep their own op."""
import torch

from . import functions

BF16, F32 = torch.bfloat16, torch.float32


class TorchLinear:
    """Stands for functions.py in Rows.fn."""

    def __init__(self):
        self.weights = {}  # {Map: its base weights as bf16 (n, n_in, n_out)}

    def __getattr__(self, name):
        return getattr(functions, name)

    def weight(self, map):
        if map not in self.weights:
            self.weights[map] = map.weight.unpack().transpose(1, 2)
        return self.weights[map]

    def linear(self, rows, map, x, y_f32=False):
        heads = (x if x.dim() == 3 else x.unsqueeze(1)).transpose(0, 1)  # (n, n_row, n_in)
        y = torch.matmul(heads, self.weight(map))
        if map.adapter is not None:
            a, b = (m.reshape(-1, *m.shape[-2:]).to(BF16).transpose(1, 2) for m in (map.adapter.master_a(), map.adapter.master_b()))
            low = torch.matmul(torch.matmul(heads, a), b) * map.adapter.s.to(BF16).view(-1, 1, 1)
            y = y + low * (rows.row_slot >= 0).view(1, -1, 1)
        y = y.transpose(0, 1) if x.dim() == 3 else y[0]
        return y.to(F32).contiguous() if y_f32 else y.contiguous()

    def linear_group(self, rows, maps, x, y_f32=()):
        return [self.linear(rows, m, x, m in y_f32) for m in maps]
