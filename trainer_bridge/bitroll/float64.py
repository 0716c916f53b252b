"""The ops again in float64 torch, with the same names as functions.py: what forward and gradients are checked against.

A twin walks beside a real forward that was recorded: Pinned calls an op of this module on the values of the real forward, compares what comes
out, and goes on with the real forward's value and the float64 gradient (straight through every rounding). So a difference of gradients
is one of the backward, not of rounding that added up on the way. Choices are constants: those of the real forward."""
import torch
import torch.nn.functional as F

F64, BF16 = torch.float64, torch.bfloat16
CHOICES = ("index_select", "layernorm", "embed")
SAME = ("enter", "leave")
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=F64)


def rounded(x, dtype=BF16):
    """Inside an op, where a rounding has no value of its own in the record."""
    return x + (x.detach().to(dtype).to(F64) - x.detach())


class Recording:
    """Stands for functions.py in Rows.fn: calls it and keeps every output."""

    def __init__(self, functions):
        self.functions, self.outputs = functions, []

    def __getattr__(self, name):
        function = getattr(self.functions, name)

        def call(rows, *args, **kw):
            out = function(rows, *args, **kw)
            self.outputs.append((name, out.data if isinstance(out, self.functions.Stream) else out))
            return out
        return function if name in SAME else call


def _tensors(out):
    return out if isinstance(out, (tuple, list)) else (out,)


class Pinned:
    """Stands for functions.py in TwinRows.fn. worst: {op: largest |difference| of an output over its largest value}."""

    def __init__(self, outputs):
        self.outputs, self.worst = iter(outputs), {}

    def __getattr__(self, name):
        if name in SAME:
            return lambda x: x

        def call(rows, *args, **kw):
            recorded_name, recorded = next(self.outputs)
            assert recorded_name == name, (recorded_name, name)
            if name in CHOICES:
                return recorded if name == "index_select" else recorded.to(F64)
            rows.recorded = recorded
            made, pinned = globals()[name](rows, *args, **kw), []
            for got, want in zip(_tensors(made), _tensors(recorded)):
                if not got.is_floating_point():
                    pinned.append(got)
                    continue
                want = want.detach().to(F64)
                off = float((got.detach() - want).abs().max() / want.abs().max().clamp_min(1e-30))
                self.worst[name] = max(self.worst.get(name, 0.0), off)
                pinned.append(got + (want - got.detach()))
            return pinned if isinstance(made, tuple) else pinned[0]
        return call


class TwinRows:
    """Rows without ops, over the outputs of a Recording of the same rows. expert_weights: called with the name of a stack of MXFP4 experts,
    gives float64 (n, n_out, n_in)."""

    trace = None

    def __init__(self, lengths, outputs, expert_weights):
        self.fn, self.lengths, self.n_row = Pinned(outputs), lengths, sum(lengths)
        self.expert_weights, self.recorded = expert_weights, None
        self.layer, self.weights = -1, {}
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        self.spans = [slice(a, a + n) for a, n in zip(starts, lengths)]

    def show(self, stage, *pieces, count=None):
        return pieces[0]

    def weight(self, map):
        """Float64 of a map's base weights, (n, n_out, n_in)."""
        if map.name not in self.weights:
            self.weights[map.name] = self.expert_weights(map.name) if map.weight.form else map.weight.unpack().to(F64)
        return self.weights[map.name]


def decode_fp4(code, scale):
    """MXFP4 codes (.., n / 2) and scale bytes (.., n / 32) as numbers (.., n)."""
    values = FP4[torch.stack((code & 15, code >> 4), -1).long()].flatten(-2)
    return values * torch.exp2(scale.to(F64) - 127).repeat_interleave(32, -1)


def adapter_of(map):
    """(A, B, s) in float64: masters rounded, straight through."""
    if map.adapter is None:
        return None
    return rounded(map.adapter.master_a().to(F64)), rounded(map.adapter.master_b().to(F64)), map.adapter.s.to(F64)


# ---- linear maps --------------------------------------------------------------------------------------------------------------


def linear(rows, map, x, y_f32=False):
    x3, w = (x if x.dim() == 3 else x.unsqueeze(1)), rows.weight(map)
    y = torch.einsum("thi,hoi->tho", x3, w)
    low = adapter_of(map)
    if low:
        a, b, s = (low[0].unsqueeze(0) if low[0].dim() == 2 else low[0]), (low[1].unsqueeze(0) if low[1].dim() == 2 else low[1]), low[2]
        a, b = a.expand(w.shape[0], -1, -1), b.expand(w.shape[0], -1, -1)
        t = rounded(torch.einsum("thi,hri->thr", x3, a) * s[:, None])
        y = y + torch.einsum("thr,hor->tho", t, b)
    y = y if x.dim() == 3 else y.squeeze(1)
    return y


def linear_group(rows, maps, x, y_f32=()):
    return tuple(linear(rows, m, x) for m in maps)


# ---- rows ---------------------------------------------------------------------------------------------------------------------


def rms(x, eps):
    return torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def rmsnorm(rows, x, w, eps, name):
    return x * rms(x, eps) * w.to(F64)


def residual(rows, a, b, name):
    return a + b


def attnres(rows, bank, p, w, eps, name):
    v = torch.stack((*bank, p), 1)
    score = (v * w.to(F64)).sum(-1) * rms(v, eps).squeeze(-1)
    return (torch.softmax(score, 1).unsqueeze(-1) * v).sum(1)


def activate(g, u, act):
    if act["situ"]:
        beta, linear_beta = act["beta"], act["linear_beta"]
        return beta * torch.tanh(g / beta) * torch.sigmoid(g) * linear_beta * torch.tanh(u / linear_beta)
    return F.silu(g) * u


def glu(rows, g, u, act):
    return activate(g, u, act)


# ---- KDA ----------------------------------------------------------------------------------------------------------------------


def conv(rows, x, w):
    taps, out = w.to(F64).view(-1, 4), []
    for span in rows.spans:
        part = F.pad(x[span].t(), (3, 0))
        c = sum(taps[:, i : i + 1] * part[:, i : i + part.shape[1] - 3] for i in range(4))
        out.append((c * torch.sigmoid(c)).t())
    return torch.cat(out)


def kda_gate(rows, f, b, a_log, dt_bias, n_head, d, bounded, lower_bound):
    y, rate = f + dt_bias.to(F64), torch.exp(a_log.to(F64)).repeat_interleave(d)
    g = lower_bound * torch.sigmoid(rate * y) if bounded else -rate * F.softplus(y)
    return torch.exp(g), torch.sigmoid(b)


def kda(rows, q, k, v, a, beta, n_head, d, scale, name):
    def heads(t):
        return t.view(rows.n_row, n_head, d)

    def unit(t):
        return t / torch.sqrt((t * t).sum(-1, keepdim=True) + 1e-6)
    q, k, v, a, out = unit(heads(q)) * scale, unit(heads(k)), heads(v), heads(a), []
    for span in rows.spans:
        state = torch.zeros(n_head, d, d, dtype=F64, device=q.device)  # key, value
        for t in range(span.start, span.stop):
            decayed = a[t].unsqueeze(-1) * state
            r = torch.einsum("hkv,hk->hv", decayed, k[t])
            state = decayed + k[t].unsqueeze(-1) * (beta[t].unsqueeze(-1) * (v[t] - r)).unsqueeze(1)
            out.append(torch.einsum("hkv,hk->hv", state, q[t]).reshape(-1))
    return torch.stack(out)


def kda_norm(rows, o, gate, w, eps, n_head, d, name):
    o = o.view(rows.n_row, n_head, d)
    return (o * rms(o, eps) * w.to(F64)).reshape(rows.n_row, -1) * torch.sigmoid(gate)


# ---- attention ----------------------------------------------------------------------------------------------------------------


def attn(rows, q, q_r, latent, select, alpha, name):
    n_latent, out = q.shape[2], []
    for span in rows.spans:
        n, keys = span.stop - span.start, latent[span]
        score = alpha * torch.einsum("thc,jc->thj", torch.cat((q[span], q_r[span]), 2), keys)
        seen = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        if select is not None:
            seen = torch.zeros_like(seen)
            for t in range(n):
                seen[t, select[0][span.start + t, : int(select[1][span.start + t])].long()] = True
        p = torch.softmax(score.masked_fill(~seen.unsqueeze(1), -torch.inf), 2)
        out.append(torch.einsum("thj,jc->thc", p, keys[:, :n_latent]))
    return torch.cat(out)


def attn_gate(rows, o, gate):
    return o if gate is None else o * torch.sigmoid(gate)


# ---- experts ------------------------------------------------------------------------------------------------------------------


def route(rows, x, w, bias, topk, renormalize, scale, name):
    expert = rows.recorded[0]  # a choice
    s = torch.sigmoid(torch.einsum("td,tkd->tk", x, w.unpack()[0].to(F64)[expert.long()]))
    return expert, s / (s.sum(1, keepdim=True) + 1e-20) * scale if renormalize else s * scale


def experts(rows, x, expert, maps, act, name):
    w1, w3, w2 = (rows.weight(m) for m in maps)
    low = [adapter_of(m) for m in maps]
    y = torch.zeros(*expert.shape, w2.shape[1], dtype=F64, device=x.device)

    def one(x, e, w, lora):
        y = x @ w[e].t()
        return y if lora is None else y + rounded(x @ lora[0][e].t() * lora[2][e]) @ lora[1][e].t()
    for e in expert.unique().tolist():
        t, i = torch.nonzero(expert == e, as_tuple=True)
        h = rounded(activate(one(x[t], e, w1, low[0]), one(x[t], e, w3, low[1]), act))
        y = y.index_put((t, i), one(h, e, w2, low[2]))
    return y


def combine(rows, e, p):
    return (p.unsqueeze(-1) * e).sum(1)


# ---- head ---------------------------------------------------------------------------------------------------------------------


def score(rows, x, w, token, temperature, name="the head"):
    t = torch.where(temperature == 0, torch.ones_like(temperature), temperature).to(F64)
    z = x @ w.unpack()[0].to(F64).t()
    rank = token.long().unsqueeze(1)
    logp = torch.log_softmax(z / t.unsqueeze(1), 1)
    return logp.gather(1, rank).squeeze(1), torch.log_softmax(z, 1).gather(1, rank).squeeze(1), -(logp.exp() * logp).sum(1)
