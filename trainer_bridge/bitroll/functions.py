"""One torch.autograd.Function an op. forward calls the op, backward calls its gradient; torch only adds gradients of one input up.

Gradients come and go in the dtype of their tensor (bf16 for bf16 values; f32 along the residual stream, see Stream), the C side computes on
f32. Only inputs are saved; what the backward needs beyond them it computes again from them."""
import functools

import torch

from . import refusals
from .node import UNKEPT, Op
from .ops import Host, Stack, packer

F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32
PACK_LORA = packer("bi_lora")


def _f32(grad):
    """A gradient as the ops take it."""
    return grad.to(F32).contiguous()


def _new(like, dtype=F32):
    return torch.empty(like.shape, dtype=dtype, device=like.device)


# ---- linear maps --------------------------------------------------------------------------------------------------------------


class Adapter:
    """What trains: masters (n, rank, n_in) and (n, n_out, rank) in f32, and the packed bf16 copies that every forward reads. shared:
    which of the two is one matrix for all n maps."""

    def __init__(self, ops, n, n_out, n_in, rank, s, master_a, master_b, shared=None):
        self.a = Stack(ops, n, rank, n_in, shared=shared == "a")
        self.b = Stack(ops, n, n_out, rank, shared=shared == "b")
        self.s = torch.full((n,), s, dtype=F32, device=ops.device)
        self.master_a, self.master_b, self.n, self.rank = master_a, master_b, n, rank
        self.n_published = 0
        self.slot = Host(ops.pack("bi_adapter", a=self.a.mat, b=self.b.mat, s=self.s))

    def publish(self):
        """Rounds the masters into what the forward reads."""
        self.a.round_from(self.master_a())
        self.b.round_from(self.master_b())
        self.n_published += 1


class Map:
    """n maps of one shape, with an adapter or without."""

    def __init__(self, weight, adapter=None, name=""):
        self.weight, self.adapter, self.name = weight, adapter, name
        self.packed = (None, b"")  # the last bi_lora, and where its rows' slots lie

    def lora(self, rows):
        """Its bi_lora: every row's adapter is the one of this map, or none."""
        at, packed = self.packed
        if self.adapter is not None and at != rows.row_slot.data_ptr():
            at, packed = self.packed = rows.row_slot.data_ptr(), PACK_LORA(slot=self.adapter.slot, n_slot=1, row_slot=rows.row_slot)
        return packed

    def masters(self):
        """What autograd gives gradients to."""
        if self.adapter is None or not torch.is_grad_enabled():
            return None, None
        return self.adapter.master_a(), self.adapter.master_b()


def _stack_grads(ops, adapter):
    """Room for the gradients of one adapter, one of each matrix a map, and the bi_grad_adapter that points there."""
    da = torch.empty(adapter.n, adapter.rank, adapter.a.n_in, dtype=F32, device=ops.device)
    db = torch.empty(adapter.n, adapter.b.n_out, adapter.rank, dtype=F32, device=ops.device)
    return da, db, Host(ops.pack("bi_grad_adapter", da=da, db=db))


def _fold(grad, stack, like):
    """Of maps that share a matrix the gradients add up."""
    if stack.shared:
        grad = grad.sum(0, keepdim=True)
    return grad.reshape(like)


class Linear(Op):
    """Maps of one input x (n_row, n_in), or (n_row, n, n_in) for stacks of n maps: one y of each, bf16 or f32. One op: a single map is
    linear, several are linear_group. The gradients of x add up in f32 in the order of the maps."""

    @staticmethod
    def fields(rows, map, x, y, y_f32):
        heads = x.dim() == 3
        return dict(n_row=rows.n_row, n_head=map.weight.n, x=x, x_ld=x.stride(0), x_head_ld=x.stride(1) if heads else 0, w=map.weight.mat,
                    lora=map.lora(rows), y=y, y_ld=y.stride(0), y_head_ld=y.stride(1) if heads else 0, y_f32=y_f32,
                    fault=rows.fault_at(map.name))

    @staticmethod
    def forward(ctx, x, rows, maps, y_f32, *masters):
        ops, out = rows.ops, [rows.empty(*x.shape[1:-1], m.weight.n_out, dtype=F32 if wide else BF16) for m, wide in zip(maps, y_f32)]
        for m in maps:
            assert x.stride(-1) == 1 and x.shape[-1] == m.weight.n_in, (m.name, x.shape, m.weight.n_in)
        calls = [Linear.fields(rows, m, x, y, wide) for m, y, wide in zip(maps, out, y_f32)]
        if len(calls) == 1:
            ops.linear(**calls[0])
        else:
            ops.linear_group(map=Host(b"".join(ops.pack("bi_linear_args", **call) for call in calls)), n=len(calls))
        ctx.save_for_backward(x)
        ctx.rows, ctx.maps = rows, maps
        ctx.shapes = [None if m is None else m.shape for m in masters]
        return tuple(out)

    @staticmethod
    def backward(ctx, *dys):
        (x,), total, grads = ctx.saved_tensors, None, []
        for i, (map, dy) in enumerate(zip(ctx.maps, dys)):
            dx, da, db = Linear.backward_one(ctx, x, map, _f32(dy), ctx.shapes[2 * i : 2 * i + 2], ctx.needs_input_grad[4 + 2 * i])
            total = dx if total is None else total.add_(dx)
            grads += [da, db]
        return (None if total is None else total.to(x.dtype)), None, None, None, *grads

    @staticmethod
    def backward_one(ctx, x, map, dy, shapes, trains):
        rows, heads, adapter = ctx.rows, x.dim() == 3, map.adapter
        ops, dx = rows.ops, _new(x) if ctx.needs_input_grad[0] else None
        da, db, slot = _stack_grads(ops, adapter) if trains else (None, None, None)
        ops.grad_linear(
            n_row=rows.n_row, n_head=map.weight.n, x=x, x_ld=x.stride(0), x_head_ld=x.stride(1) if heads else 0, w=map.weight.mat,
            lora=map.lora(rows), dy=dy, dy_ld=dy.stride(0), dy_head_ld=dy.stride(1) if heads else 0, dx=dx,
            dx_ld=dx.stride(0) if dx is not None else 0, dx_head_ld=dx.stride(1) if heads and dx is not None else 0, slot=slot)
        return (dx, _fold(da, adapter.a, shapes[0]), _fold(db, adapter.b, shapes[1])) if trains else (dx, None, None)


def linear_group(rows, maps, x, y_f32=()):
    """The outputs of maps that read one input, in a list; y_f32: the maps whose outputs stay f32."""
    masters = [master for m in maps for master in m.masters()]
    return list(Linear.run(x, rows, maps, [m in y_f32 for m in maps], *masters))


def linear(rows, map, x, y_f32=False):
    return Linear.run(x, rows, [map], [y_f32], *map.masters())[0]


# ---- rows ---------------------------------------------------------------------------------------------------------------------


def embed(rows, token, table):
    refusals.forward()  # the first op of every forward
    rows.check("token ids", token, I32)
    rows.ops.check_device(table)
    y = rows.empty(table.shape[1])
    rows.ops.embed(n_row=rows.n_row, d_model=table.shape[1], n_vocab=table.shape[0], token=token, table=table, y=y)
    return y


class Stream:
    """Rows of the residual stream, whose gradient stays f32 from op to op: it is rounded where a branch begins, not at every addition
    along the depth. data: bf16, which ops read; edge: f32 zeros, all in one place of memory, that stand for data in the graph."""
    __slots__ = ("data", "edge")

    def __init__(self, data, edge):
        self.data, self.edge = data, edge


@functools.cache
def _zero(device):
    return torch.zeros((), dtype=F32, device=device)


def _edge(ctx, like):
    zero = _zero(like.device)
    return zero if ctx is UNKEPT else zero.expand(like.shape)  # outside of a graph nobody asks for its shape


class Enter(Op):
    @staticmethod
    def forward(ctx, x):
        return _edge(ctx, x)

    @staticmethod
    def backward(ctx, dedge):
        return dedge.to(BF16)


class Leave(Op):
    @staticmethod
    def forward(ctx, edge, data):
        return data if ctx is UNKEPT else data.view_as(data)

    @staticmethod
    def backward(ctx, dy):
        return _f32(dy), None


def enter(x):
    """A bf16 tensor as the stream, or as a row of the bank."""
    return Stream(x.detach(), Enter.run(x))


def leave(stream):
    """The stream as a bf16 tensor."""
    return Leave.run(stream.edge, stream.data)


def _stream(out):
    return Stream(*out)


class RmsNorm(Op):
    """Of a bf16 tensor, or of a stream (x its edge, data its rows)."""

    @staticmethod
    def forward(ctx, x, data, w, eps, rows, name):
        data = x if data is None else data
        y = rows.empty(data.shape[1])
        rows.ops.rmsnorm(n_row=rows.n_row, d=data.shape[1], x=data, x_ld=data.stride(0), w=w, eps=eps, y=y, y_ld=y.stride(0),
                         fault=rows.fault_at(name))
        ctx.save_for_backward(data, w)
        ctx.rows, ctx.eps, ctx.dtype = rows, eps, x.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx, dy = _new(x), _f32(dy)
        ctx.rows.ops.grad_rmsnorm(n_row=ctx.rows.n_row, d=x.shape[1], x=x, x_ld=x.stride(0), w=w, eps=ctx.eps, dy=dy, dx=dx)
        return dx.to(ctx.dtype), None, None, None, None, None


def rmsnorm(rows, x, w, eps, name):
    if isinstance(x, Stream):
        return RmsNorm.run(x.edge, x.data, w, eps, rows, name)
    return RmsNorm.run(x, None, w, eps, rows, name)


def layernorm(rows, x, w, b, eps, name):
    """Of the indexer, which carries no gradient."""
    y = rows.empty(x.shape[1])
    rows.ops.layernorm(n_row=rows.n_row, d=x.shape[1], x=x, x_ld=x.stride(0), w=w, b=b, eps=eps, y=y, y_ld=y.stride(0),
                       fault=rows.fault_at(name))
    return y


class Residual(Op):
    """edge None: the sum of two bf16 tensors, a bf16 tensor; else of a stream's rows `a` and a branch, a stream."""

    @staticmethod
    def forward(ctx, edge, a, b, rows, name):
        y = rows.empty(b.shape[1])
        rows.ops.residual(n_row=rows.n_row, d=b.shape[1], a=a, b=b, y=y, fault=rows.fault_at(name))
        ctx.is_stream, ctx.dtype = edge is not None, b.dtype
        if edge is None:
            return y
        ctx.mark_non_differentiable(y)
        return y, _edge(ctx, y)

    @staticmethod
    def backward(ctx, *dys):
        dy = dys[-1]
        return (dy, None, dy.to(ctx.dtype), None, None) if ctx.is_stream else (None, dy, dy, None, None)


def residual(rows, a, b, name):
    if isinstance(a, Stream):
        return _stream(Residual.run(a.edge, a.data, b, rows, name))
    return Residual.run(None, a, b, rows, name)


class AttnRes(Op):
    """The mix of the bank's rows and the running sum p: edges first, then as many rows, p's the last."""

    @staticmethod
    def forward(ctx, rows, w, eps, name, *both):
        n = len(both) // 2
        *bank, p = both[n:]
        y = rows.empty(p.shape[1])
        rows.ops.attnres(n_row=rows.n_row, d=p.shape[1], n_bank=len(bank), bank=rows.ops.pointers(bank), p=p, w=w, eps=eps, y=y,
                         fault=rows.fault_at(name))
        ctx.save_for_backward(w, *both[n:])
        ctx.rows, ctx.eps = rows, eps
        ctx.mark_non_differentiable(y)
        return y, _edge(ctx, y)

    @staticmethod
    def backward(ctx, _, dy):
        w, *bank, p = ctx.saved_tensors
        rows, dy, dp, dbank = ctx.rows, _f32(dy), _new(p), [_new(b) for b in bank]
        rows.ops.grad_attnres(n_row=rows.n_row, d=p.shape[1], n_bank=len(bank), bank=rows.ops.pointers(bank), p=p, w=w, eps=ctx.eps,
                              dy=dy, dbank=rows.ops.pointers(dbank), dp=dp)
        return None, None, None, None, *dbank, dp, *(None for _ in range(len(bank) + 1))


def attnres(rows, bank, p, w, eps, name):
    streams = (*bank, p)
    return _stream(AttnRes.run(rows, w, eps, name, *(s.edge for s in streams), *(s.data for s in streams)))


class Glu(Op):
    @staticmethod
    def forward(ctx, g, u, rows, act):
        y = rows.empty(g.shape[1])
        rows.ops.glu(n_row=rows.n_row, d=g.shape[1], g=g, u=u, ld=g.stride(0), act=rows.ops.pack("bi_act", **act), y=y)
        ctx.save_for_backward(g, u)
        ctx.rows, ctx.act = rows, act
        return y

    @staticmethod
    def backward(ctx, dy):
        g, u = ctx.saved_tensors
        dg, du, dy = _new(g), _new(u), _f32(dy)
        ctx.rows.ops.grad_glu(n_row=ctx.rows.n_row, d=g.shape[1], g=g, u=u, ld=g.stride(0), act=ctx.rows.ops.pack("bi_act", **ctx.act), dy=dy, dg=dg, du=du)
        return dg, du, None, None


def glu(rows, g, u, act):
    return Glu.run(g, u, rows, act)


# ---- KDA ----------------------------------------------------------------------------------------------------------------------


class Conv(Op):
    @staticmethod
    def forward(ctx, x, w, rows):
        n_chan, y = x.shape[1], rows.empty(x.shape[1])
        history, _memory = rows.state(3 * n_chan * 2)
        rows.ops.conv(batch=rows.batch, n_chan=n_chan, x=x, x_ld=x.stride(0), w=w, history=history, y=y, y_ld=y.stride(0))
        ctx.save_for_backward(x, w)
        ctx.rows = rows
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx, dy = _new(x), _f32(dy)
        ctx.rows.ops.grad_conv(batch=ctx.rows.batch, n_chan=x.shape[1], x=x, x_ld=x.stride(0), w=w, dy=dy, dx=dx)
        return dx.to(x.dtype), None, None


def conv(rows, x, w):
    return Conv.run(x, w, rows)


class KdaGate(Op):
    @staticmethod
    def forward(ctx, f, b, a_log, dt_bias, rows, shape):
        a, beta = rows.empty(f.shape[1], dtype=F32), rows.empty(b.shape[1], dtype=F32)
        rows.ops.kda_gate(n_row=rows.n_row, **shape, f=f, b=b, a_log=a_log, dt_bias=dt_bias, a=a, beta=beta)
        ctx.save_for_backward(f, b, a_log, dt_bias)
        ctx.rows, ctx.shape = rows, shape
        return a, beta

    @staticmethod
    def backward(ctx, da, dbeta):
        f, b, a_log, dt_bias = ctx.saved_tensors
        df, db, da, dbeta = _new(f), _new(b), _f32(da), _f32(dbeta)
        ctx.rows.ops.grad_kda_gate(n_row=ctx.rows.n_row, **ctx.shape, f=f, b=b, a_log=a_log, dt_bias=dt_bias, da=da, dbeta=dbeta, df=df, db=db)
        return df.to(f.dtype), db.to(b.dtype), None, None, None, None


def kda_gate(rows, f, b, a_log, dt_bias, n_head, d, bounded, lower_bound):
    """Decay (n_row, n_head * d) and beta (n_row, n_head), f32."""
    return KdaGate.run(f, b, a_log, dt_bias, rows, dict(n_head=n_head, d=d, bounded=bounded, lower_bound=lower_bound))


class Kda(Op):
    @staticmethod
    def forward(ctx, q, k, v, a, beta, rows, n_head, d, scale, name):
        o = rows.empty(n_head * d, dtype=F32)
        state, _memory = rows.state(rows.ops.library.c.br_ops_kda_state_bytes(rows.ops.handle, n_head, d))
        rows.ops.kda(batch=rows.batch, n_head=n_head, d=d, q=q, k=k, v=v, ld=q.stride(0), a=a, beta=beta, scale=scale, state=state, o=o,
                     fault=rows.fault_at(name))
        ctx.save_for_backward(q, k, v, a, beta)
        ctx.rows, ctx.shape = rows, dict(n_head=n_head, d=d, scale=scale)
        return o

    @staticmethod
    def backward(ctx, d_o):
        q, k, v, a, beta = ctx.saved_tensors
        out = [_new(t) for t in (q, k, v, a, beta)]
        d_o = _f32(d_o)
        ctx.rows.ops.grad_kda(batch=ctx.rows.batch, **ctx.shape, q=q, k=k, v=v, ld=q.stride(0), a=a, beta=beta, d_o=d_o,
                              dq=out[0], dk=out[1], dv=out[2], da=out[3], dbeta=out[4])
        return *(g.to(t.dtype) for g, t in zip(out, (q, k, v, a, beta))), None, None, None, None, None


def kda(rows, q, k, v, a, beta, n_head, d, scale, name):
    return Kda.run(q, k, v, a, beta, rows, n_head, d, scale, name)


class KdaNorm(Op):
    @staticmethod
    def forward(ctx, o, gate, w, eps, rows, n_head, d, name):
        y = rows.empty(n_head * d)
        rows.ops.kda_norm(n_row=rows.n_row, n_head=n_head, d=d, o=o, w=w, gate=gate, eps=eps, y=y, fault=rows.fault_at(name))
        ctx.save_for_backward(o, gate, w)
        ctx.rows, ctx.shape = rows, dict(n_head=n_head, d=d, eps=eps)
        return y

    @staticmethod
    def backward(ctx, dy):
        o, gate, w = ctx.saved_tensors
        d_o, dgate, dy = _new(o), _new(gate), _f32(dy)
        ctx.rows.ops.grad_kda_norm(n_row=ctx.rows.n_row, **ctx.shape, o=o, w=w, gate=gate, dy=dy, d_o=d_o, dgate=dgate)
        return d_o, dgate.to(gate.dtype), None, None, None, None, None, None


def kda_norm(rows, o, gate, w, eps, n_head, d, name):
    return KdaNorm.run(o, gate, w, eps, rows, n_head, d, name)


# ---- attention ----------------------------------------------------------------------------------------------------------------


def latent_store(rows, latent):
    """The latent rows in a cache of their own: (bi_cache, memory)."""
    c = rows.ops.library.c
    cache, memory = rows.cache(c.br_ops_latent_block_bytes(rows.ops.handle, latent.shape[1]))
    rows.ops.latent_store(batch=rows.batch, d_latent=latent.shape[1], x=latent, x_ld=latent.stride(0), cache=cache)
    return cache, memory


class Attn(Op):
    """z (n_row, n_head, C) of absorbed queries q (n_row, n_head, C) and their rope part q_r (n_row, n_head, r), over the latent rows
    that `cache` was filled with."""

    @staticmethod
    def forward(ctx, q, q_r, latent, cache, select, rows, alpha, name):
        z = rows.empty(*q.shape[1:])
        choice = dict(select=select[0], n_select=select[1], select_ld=select[0].stride(0)) if select else {}
        args = dict(batch=rows.batch, n_head=q.shape[1], d_kv_latent=q.shape[2], d_rope=q_r.shape[2], q_r_ld=q_r.stride(0),
                        q_r_head_ld=q_r.stride(1), alpha=alpha, **choice)
        rows.ops.attn(**args, q=q, q_r=q_r, cache=cache[0], z=z, fault=rows.fault_at(name))
        ctx.save_for_backward(q, q_r, latent)
        ctx.rows, ctx.args = rows, args
        return z

    @staticmethod
    def backward(ctx, dz):
        q, q_r, latent = ctx.saved_tensors
        dq, dq_r, dlatent, dz = _new(q), _new(q_r), _new(latent), _f32(dz)
        ctx.rows.ops.grad_attn(**ctx.args, q=q, q_r=q_r, latent=latent, latent_ld=latent.stride(0), dz=dz, dq=dq, dq_r=dq_r, dlatent=dlatent)
        return dq.to(q.dtype), dq_r.to(q_r.dtype), dlatent.to(latent.dtype), None, None, None, None, None


def attn(rows, q, q_r, latent, select, alpha, name):
    """select: None (all visible positions), or (ids (n_row, topk), counts (n_row))."""
    return Attn.run(q, q_r, latent, latent_store(rows, latent.detach()), select, rows, alpha, name)


class AttnGate(Op):
    @staticmethod
    def forward(ctx, o, gate, rows):
        y = rows.empty(o.shape[1])
        rows.ops.attn_gate(n_row=rows.n_row, d=o.shape[1], o=o, gate=gate, y=y)
        ctx.save_for_backward(o, gate)
        ctx.rows = rows
        return y

    @staticmethod
    def backward(ctx, dy):
        o, gate = ctx.saved_tensors
        d_o, dgate, dy = _new(o), None if gate is None else _new(gate), _f32(dy)
        ctx.rows.ops.grad_attn_gate(n_row=ctx.rows.n_row, d=o.shape[1], o=o, gate=gate, dy=dy, d_o=d_o, dgate=dgate)
        return d_o, None if gate is None else dgate.to(gate.dtype), None


def attn_gate(rows, o, gate):
    return AttnGate.run(o, gate, rows)


def index_select(rows, q, k, w, n_head, d, topk, c, name):
    """Positions (n_row, topk) ascending, and how many; of q (n_row, n_head * d), normed keys k (n_row, d), weights w f32. A choice: it
    carries no gradient."""
    ops = rows.ops
    cache, _memory = rows.cache(ops.library.c.br_ops_index_block_bytes(ops.handle, d))
    ops.index_store(batch=rows.batch, d=d, k=k, cache=cache, fault=rows.fault_at(name))
    select, count = rows.empty(topk, dtype=I32), rows.empty(dtype=I32)
    ops.index_select(batch=rows.batch, n_head=n_head, d=d, topk=topk, q=q, w=w, c=c, cache=cache, select=select, n_select=count,
                     fault=rows.fault_at(name))
    return select, count


# ---- experts ------------------------------------------------------------------------------------------------------------------


class Route(Op):
    @staticmethod
    def forward(ctx, x, rows, w, bias, shape, name):
        expert, p = rows.empty(shape["topk"], dtype=I32), rows.empty(shape["topk"], dtype=F32)
        rows.ops.route(n_row=rows.n_row, d=x.shape[1], x=x, w=w.mat, bias=bias, **shape, expert=expert, p=p, fault=rows.fault_at(name))
        ctx.mark_non_differentiable(expert)
        ctx.save_for_backward(x, expert)
        ctx.rows, ctx.w, ctx.shape = rows, w, shape
        return expert, p

    @staticmethod
    def backward(ctx, _, dp):
        x, expert = ctx.saved_tensors
        dx, dp = _new(x), _f32(dp)
        ctx.rows.ops.grad_route(n_row=ctx.rows.n_row, d=x.shape[1], x=x, w=ctx.w.mat, expert=expert, **ctx.shape, dp=dp, dx=dx)
        return dx.to(x.dtype), None, None, None, None, None


def route(rows, x, w, bias, topk, renormalize, scale, name):
    """The chosen experts (n_row, topk), ascending, and their probabilities."""
    return Route.run(x, rows, w, bias, dict(n_expert=w.n_out, topk=topk, renormalize=renormalize, scale=scale), name)


class Experts(Op):
    @staticmethod
    def forward(ctx, x, expert, rows, maps, act, name, *masters):
        w1, w3, w2 = (m.weight for m in maps)
        y = rows.empty(expert.shape[1], x.shape[1])
        args = dict(n_row=rows.n_row, d=x.shape[1], d_ff=w1.n_out, n_expert=w1.n, topk=expert.shape[1], w1=w1.mat, w3=w3.mat, w2=w2.mat,
                    n_slot=1, row_slot=rows.row_slot, act=rows.ops.pack("bi_act", **act), x=x, expert=expert)
        if maps[0].adapter is not None:
            args.update((f"lora{i}", m.adapter.slot) for i, m in zip((1, 3, 2), maps))
        rows.ops.experts(**args, y=y, fault=rows.fault_at(name))
        ctx.save_for_backward(x, expert)
        ctx.rows, ctx.maps, ctx.args = rows, maps, args
        return y

    @staticmethod
    def backward(ctx, dy):
        x, expert = ctx.saved_tensors
        ops, dx, dy = ctx.rows.ops, _new(x), _f32(dy)
        grads, slots = [], {}
        if any(ctx.needs_input_grad[6:]):
            for i, m in zip((1, 3, 2), ctx.maps):
                da, db, slots[f"slot{i}"] = _stack_grads(ops, m.adapter)
                grads += [da, db]
        ops.grad_experts(**ctx.args, dy=dy, dx=dx, **slots)
        return dx.to(x.dtype), None, None, None, None, None, *(grads or [None] * (len(ctx.needs_input_grad) - 6))


def experts(rows, x, expert, maps, act, name):
    """maps: w1, w3, w2, stacks of all experts; y (n_row, topk, d)."""
    return Experts.run(x, expert, rows, maps, act, name, *(t for m in maps for t in m.masters()))


class Combine(Op):
    @staticmethod
    def forward(ctx, e, p, rows):
        y = rows.empty(e.shape[2])
        rows.ops.combine(n_row=rows.n_row, d=e.shape[2], topk=e.shape[1], e=e, p=p, y=y)
        ctx.save_for_backward(e, p)
        ctx.rows = rows
        return y

    @staticmethod
    def backward(ctx, dy):
        e, p = ctx.saved_tensors
        de, dp, dy = _new(e), _new(p), _f32(dy)
        ctx.rows.ops.grad_combine(n_row=ctx.rows.n_row, d=e.shape[2], topk=e.shape[1], e=e, p=p, dy=dy, de=de, dp=dp)
        return de.to(e.dtype), dp, None


def combine(rows, e, p):
    return Combine.run(e, p, rows)


# ---- head ---------------------------------------------------------------------------------------------------------------------


class Score(Op):
    @staticmethod
    def forward(ctx, x, rows, w, token, temperature, name, entropy):
        out = [rows.empty(dtype=F32), rows.empty(dtype=F32), rows.empty(dtype=F32) if entropy else None]
        rows.ops.score(n_row=rows.n_row, d=x.shape[1], n_vocab=w.n_out, x=x, w=w.mat, token=token, temperature=temperature,
                       logprob=out[0], logprob_raw=out[1], entropy=out[2], fault=rows.fault_at(name))
        ctx.save_for_backward(x, token, temperature)
        ctx.rows, ctx.w = rows, w
        ctx.mark_non_differentiable(*(one for one in out[1:] if one is not None))
        return tuple(out)

    @staticmethod
    def backward(ctx, dlogprob, _raw, _entropy):
        x, token, temperature = ctx.saved_tensors
        dx, dlogprob = _new(x), _f32(dlogprob)
        ctx.rows.ops.grad_score(n_row=ctx.rows.n_row, d=x.shape[1], n_vocab=ctx.w.n_out, x=x, w=ctx.w.mat, token=token,
                                temperature=temperature, dlogprob=dlogprob, dx=dx)
        return dx.to(x.dtype), None, None, None, None, None, None


def score(rows, x, w, token, temperature, name="the head", entropy=True):
    """Log-probs of the given tokens at each row's temperature, the same at temperature 1, entropies, None unless wanted: without them a GPU
    takes a faster way. The first carries gradient."""
    rows.check("target ids", token, I32)
    rows.check("temperatures", temperature, F32)
    return Score.run(x, rows, w, token, temperature, name, entropy)
