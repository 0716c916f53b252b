"""Linear maps with adapters: what is frozen, what trains, and the packed copies that forwards read. Names are Megatron-Bridge's:
`to_wrap.weight`, `adapter.linear_in.weight` (A), `adapter.linear_out.weight` (B)."""
import math

import torch
from torch import nn

from . import functions as fn
from .ops import FORM_BF16, FORM_FP4, Stack


class Settings:
    """rank 0: no adapters. s = alpha / rank, or alpha / sqrt(rank) when rslora, rounded as the contract says."""

    def __init__(self, ops, rank=0, alpha=0.0, rslora=False):
        self.ops, self.rank, self.alpha, self.rslora = ops, rank, alpha, rslora
        self.s = ops.library.c.br_ops_lora_s(alpha, rank, int(rslora)) if rank else 0.0


class LowRank(nn.Module):
    """The masters of one adapter, or of one for each of n maps: A (n, rank, n_in), B (n, n_out, rank), f32; B = 0 at the start."""

    def __init__(self, settings, n_out, n_in, n=None):
        super().__init__()
        self.settings, lead = settings, () if n is None else (n,)
        device = settings.ops.device
        self.linear_in, self.linear_out = nn.Module(), nn.Module()
        a = torch.empty(*lead, settings.rank, n_in, device=device)
        for one in a if lead else (a,):
            nn.init.xavier_normal_(one)
        self.linear_in.weight = nn.Parameter(a)
        self.linear_out.weight = nn.Parameter(torch.zeros(*lead, n_out, settings.rank, device=device))

    def a(self):
        return self.linear_in.weight

    def b(self):
        return self.linear_out.weight


def frozen(tensor):
    return nn.Parameter(tensor, requires_grad=False)


class Maps(nn.Module):
    """Something whose adapters are published after each update of the masters. every: its fn.Map objects."""

    def adapt(self, settings, n_out, n_in, n=None, name="adapter"):
        """The fn.Adapter of a map, its masters under `name`; None where the settings have none."""
        if not settings.rank:
            return None
        low = LowRank(settings, n_out, n_in, n)
        setattr(self, name, low)
        return fn.Adapter(settings.ops, n or 1, n_out, n_in, settings.rank, settings.s, low.a, low.b)

    def adapters(self):
        return [m.adapter for m in self.every if m.adapter]

    def publish(self):
        for adapter in self.adapters():
            adapter.publish()


class LoraLinear(Maps):
    """One map, y (n_row, n_out) = W x (+ adapter)."""

    def __init__(self, settings, weight, name):
        super().__init__()
        ops, (n_out, n_in) = settings.ops, weight.shape
        self.to_wrap = nn.Module()
        self.to_wrap.weight = frozen(weight)
        adapter = self.adapt(settings, n_out, n_in)
        self.map = fn.Map(Stack(ops, 1, n_out, n_in).pack(weight), adapter, name)
        self.every = [self.map]

    def forward(self, rows, x, y_f32=False):
        return rows.fn.linear(rows, self.map, x, y_f32)


class FusedLinear(Maps):
    """Several maps of one input under one name, as Megatron fuses gate and up; an adapter for each, `adapter_<part>`. Used all at once in a
    linear_group."""

    def __init__(self, settings, parts, name):
        super().__init__()
        self.to_wrap = nn.Module()
        self.maps = {}
        for part, weight in parts.items():
            setattr(self.to_wrap, f"weight_{part}", frozen(weight))
            adapter = self.adapt(settings, *weight.shape, name=f"adapter_{part}")
            self.maps[part] = fn.Map(Stack(settings.ops, 1, *weight.shape).pack(weight), adapter, f"{name}.{part}")
        self.every = list(self.maps.values())


class ExpertLinear(Maps):
    """One stack of n_expert maps, bf16 (n, n_out, n_in) or MXFP4 (codes and scales); one adapter an expert."""

    def __init__(self, settings, weight, scale, name):
        super().__init__()
        ops, n, n_out = settings.ops, weight.shape[0], weight.shape[1]
        n_in = weight.shape[2] * (1 if scale is None else 2)
        if scale is None:
            stack = Stack(ops, n, n_out, n_in, FORM_BF16).pack(weight)
        else:
            stack = Stack(ops, n, n_out, n_in, FORM_FP4).pack_fp4(weight, scale)
        self.map = fn.Map(stack, self.adapt(settings, n_out, n_in, n), name)
        self.every = [self.map]


class AbsorbedLinear(Maps):
    """kv_b (n_head * (d_nope + d_v), d_kv_latent) in its two absorbed halves: W_UK of each head transposed, and W_UV. Its one adapter
    serves both: of W_UK the low rank runs backwards (A is B's rows of the head, B is A transposed)."""

    def __init__(self, settings, weight, n_head, d_nope, d_v, name):
        super().__init__()
        ops, latent = settings.ops, weight.shape[1]
        self.to_wrap = nn.Module()
        self.to_wrap.weight = frozen(weight)
        heads = weight.view(n_head, d_nope + d_v, latent)
        uk = Stack(ops, n_head, latent, d_nope).pack(heads[:, :d_nope].transpose(1, 2))
        uv = Stack(ops, n_head, d_v, latent).pack(heads[:, d_nope:])
        adapter_uk = adapter_uv = None
        if settings.rank:
            self.adapter = low = LowRank(settings, weight.shape[0], latent)

            def rows_of_heads():
                return low.b().view(n_head, d_nope + d_v, settings.rank)
            adapter_uk = fn.Adapter(ops, n_head, latent, d_nope, settings.rank, settings.s,
                                    lambda: rows_of_heads()[:, :d_nope].transpose(1, 2), lambda: low.a().t().unsqueeze(0), shared="b")
            adapter_uv = fn.Adapter(ops, n_head, d_v, latent, settings.rank, settings.s,
                                    lambda: low.a().unsqueeze(0), lambda: rows_of_heads()[:, d_nope:], shared="a")
        self.uk, self.uv = fn.Map(uk, adapter_uk, name + ".uk"), fn.Map(uv, adapter_uv, name + ".uv")
        self.every = [self.uk, self.uv]


ROUNDS_TO_INF = float.fromhex("0x1.ffp127")  # the least f32 whose bf16 is infinite


def check_masters(model):
    """Every master must stay finite as bf16."""
    masters = [(name, p.detach()) for name, p in model.named_parameters() if p.requires_grad]
    if not masters:
        return
    largest = torch.stack(torch._foreach_norm([p for _, p in masters], float("inf"))).tolist()
    for (name, _), value in zip(masters, largest):
        if not value < ROUNDS_TO_INF:
            raise FloatingPointError(f"{name}: its largest entry is {value}: expected finite numbers, nothing was published")


def clip_gradients(masters, limit, step):
    """The norm of all gradients together, which above the limit are scaled down to it."""
    norm = float(torch.nn.utils.clip_grad_norm_([p for p in masters if p.grad is not None], limit))
    if not math.isfinite(norm):
        raise FloatingPointError(f"step {step}: the gradient's norm is {norm}")
    return norm


def publish(model):
    """Every adapter of a model: masters rounded into what forwards read. No forward may be under way."""
    check_masters(model)
    for module in model.modules():
        if isinstance(module, Maps):
            module.publish()
