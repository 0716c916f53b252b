"""The blocks of a layer, each a straight list of ops as in the engine's src/model: rows in, rows out, (n_row, width) bf16."""
import torch
from torch import nn

from . import functions as fn
from .lora import AbsorbedLinear, ExpertLinear, FusedLinear, LoraLinear, frozen
from .ops import Stack

F32 = torch.float32


def vector(ops, tensor, n=None):
    """The first n elements in f32, widened exactly."""
    flat = tensor.reshape(-1)[:n].to(F32)
    return frozen(flat.contiguous().to(ops.device))


class Named(nn.Module):
    """A frozen weight under its name."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight


def norm_of(ops, tensor):
    return Named(vector(ops, tensor))


class Kda(nn.Module):
    """Kimi Delta Attention. Shapes: H heads of d, P = H * d."""

    def __init__(self, settings, config, tensors, name):
        super().__init__()
        ops, self.config, self.name = settings.ops, config, name
        full = bool(config.kda_full_gate)
        for part in ("q", "k", "v", "f_a", "f_b", "b", "o") + (("g",) if full else ("g_a", "g_b")):
            setattr(self, part + "_proj", LoraLinear(settings, tensors[f"{part}_proj.weight"], f"{name}.{part}_proj"))
        for part in "qkv":
            setattr(self, part + "_conv1d", Named(vector(ops, tensors[f"{part}_conv1d.weight"])))
        self.A_log = vector(ops, tensors["A_log"], config.kda_n_head)  # files pad it to 128
        self.dt_bias = vector(ops, tensors["dt_bias"])
        self.o_norm = norm_of(ops, tensors["o_norm.weight"])
        self.scale = ops.library.c.br_ops_kda_scale(config.kda_d_head)

    def forward(self, rows, x):
        c, shape = self.config, dict(n_head=self.config.kda_n_head, d=self.config.kda_d_head)
        first = [self.q_proj, self.k_proj, self.v_proj, self.f_a_proj, self.b_proj, self.g_proj if c.kda_full_gate else self.g_a_proj]
        q, k, v, f, b, gate = rows.fn.linear_group(rows, [m.map for m in first], x)  # (R, P) each, but b (R, H), low ranks
        f = self.f_b_proj(rows, f)
        gate = gate if c.kda_full_gate else self.g_b_proj(rows, gate)
        rows.show("qkv", q, k, v)
        q, k, v = (rows.fn.conv(rows, t, getattr(self, part + "_conv1d").weight) for t, part in ((q, "q"), (k, "k"), (v, "v")))
        rows.show("conv", q, k, v)
        decay, beta = rows.fn.kda_gate(rows, f, b, self.A_log, self.dt_bias, **shape, bounded=c.kda_bounded, lower_bound=c.kda_lower_bound)
        rows.show("gate", decay, beta, gate)
        o = rows.fn.kda(rows, q, k, v, decay, beta, **shape, scale=self.scale, name=self.name + ".kda")
        rows.show("kda", o)
        mixed = rows.fn.kda_norm(rows, o, gate, self.o_norm.weight, c.norm_eps, **shape, name=self.name + ".o_norm")
        return rows.show("attn_out", self.o_proj(rows, mixed))


class Indexer(nn.Module):
    """Which positions a row attends to: frozen."""

    def __init__(self, ops, config, tensors, name):
        super().__init__()
        self.config, self.name = config, name
        self.wq_b, self.wk, self.weights_proj = (fn.Map(Stack(ops, 1, *w.shape).pack(w), None, f"{name}.{part}") for part, w in
                                                 ((p, tensors[f"indexer.{p}.weight"]) for p in ("wq_b", "wk", "weights_proj")))
        self.norm = vector(ops, tensors["indexer.k_norm.weight"])
        self.norm_bias = vector(ops, tensors["indexer.k_norm.bias"]) if "indexer.k_norm.bias" in tensors else None
        self.c = ops.library.c.br_ops_index_c(config.index_n_head, config.index_d_head)

    @torch.no_grad()
    def forward(self, rows, x, cq):
        c = self.config
        k, w = rows.fn.linear_group(rows, [self.wk, self.weights_proj], x, y_f32=[self.weights_proj])
        q = rows.fn.linear(rows, self.wq_b, cq)
        k = rows.fn.layernorm(rows, k, self.norm, self.norm_bias, c.norm_eps, self.name + ".k_norm")
        select, count = rows.fn.index_select(rows, q, k, w, c.index_n_head, c.index_d_head, c.index_topk, self.c, self.name)
        rows.show("index_topk", select, count=count)
        return select, count


class Mla(nn.Module):
    """Absorbed latent attention. Shapes: H heads, C d_kv_latent, r d_rope."""

    def __init__(self, settings, config, tensors, name):
        super().__init__()
        ops, self.config, self.name = settings.ops, config, name
        parts = ["kv_a_proj_with_mqa", "o_proj"] + (["q_a_proj", "q_b_proj"] if config.d_q_latent else ["q_proj"])
        for part in parts + (["g_proj"] if config.mla_gate else []):
            setattr(self, part, LoraLinear(settings, tensors[part + ".weight"], f"{name}.{part}"))
        self.kv_b_proj = AbsorbedLinear(settings, tensors["kv_b_proj.weight"], config.n_head, config.d_nope, config.d_v, name + ".kv_b_proj")
        self.kv_a_layernorm = norm_of(ops, tensors["kv_a_layernorm.weight"])
        if config.d_q_latent:
            self.q_a_layernorm = norm_of(ops, tensors["q_a_layernorm.weight"])
        self.indexer = Indexer(ops, config, tensors, name + ".indexer") if config.index_topk else None
        self.alpha = ops.library.c.br_ops_attn_alpha(config.d_nope, config.d_rope)

    def query(self, rows, q):
        """Queries (R, H, d_nope + d_rope) of what q_a_proj or q_proj gave, and the normed low rank that the indexer reads."""
        c, cq = self.config, None
        if c.d_q_latent:
            cq = rows.fn.rmsnorm(rows, q, self.q_a_layernorm.weight, c.lora_norm_eps, self.name + ".q_a_layernorm")
            q = self.q_b_proj(rows, cq)
        return q.view(rows.n_row, c.n_head, c.d_nope + c.d_rope), cq

    def latent(self, rows, row):
        """(R, C + r): the first C normed."""
        c = self.config
        normed = rows.fn.rmsnorm(rows, row[:, : c.d_kv_latent], self.kv_a_layernorm.weight, c.lora_norm_eps, self.name + ".kv_a_layernorm")
        return torch.cat((normed, row[:, c.d_kv_latent :]), 1)

    def forward(self, rows, x):
        c = self.config
        first = [self.kv_a_proj_with_mqa, self.q_a_proj if c.d_q_latent else self.q_proj] + ([self.g_proj] if c.mla_gate else [])
        row, q, *gate = rows.fn.linear_group(rows, [m.map for m in first], x)
        latent, (q, cq) = self.latent(rows, row), self.query(rows, q)
        rows.show("qkv", q, latent)
        select = self.indexer(rows, x.detach(), cq.detach()) if self.indexer else None
        absorbed = rows.fn.linear(rows, self.kv_b_proj.uk, q[:, :, : c.d_nope])  # (R, H, C)
        z = rows.fn.attn(rows, absorbed, q[:, :, c.d_nope :], latent, select, self.alpha, self.name + ".attn")
        rows.show("mla", z)
        o = rows.fn.linear(rows, self.kv_b_proj.uv, z, y_f32=True).flatten(1)  # (R, H * d_v)
        mixed = rows.fn.attn_gate(rows, o, gate[0] if gate else None)
        return rows.show("attn_out", self.o_proj(rows, mixed))


class Mlp(nn.Module):
    """down(act(gate, up)): the dense layers', and the shared experts'."""

    def __init__(self, settings, config, tensors, name):
        super().__init__()
        self.act = dict(situ=config.act_situ, beta=config.situ_beta, linear_beta=config.situ_linear_beta)
        parts = dict(gate=tensors["gate_proj.weight"], up=tensors["up_proj.weight"])
        self.linear_fc1 = FusedLinear(settings, parts, name + ".linear_fc1")
        self.linear_fc2 = LoraLinear(settings, tensors["down_proj.weight"], name + ".linear_fc2")

    def second(self, rows, gate, up):
        return self.linear_fc2(rows, rows.fn.glu(rows, gate, up, self.act))


class DenseMlp(Mlp):
    def forward(self, rows, x):
        first = self.linear_fc1.every
        return rows.show("ffn_out", self.second(rows, *rows.fn.linear_group(rows, first, x, y_f32=first)))


class Experts(nn.Module):
    """w1, w3, w2 of all experts; linear_fc1 holds w1 (gate) and w3 (up)."""

    def __init__(self, settings, config, tensors, name):
        super().__init__()
        self.name = name
        self.act = dict(situ=config.act_situ, beta=config.situ_beta, linear_beta=config.situ_linear_beta)
        self.linear_fc1 = nn.Module()
        self.linear_fc1.gate = self.stack(settings, config, tensors, "w1", name + ".linear_fc1.gate")
        self.linear_fc1.up = self.stack(settings, config, tensors, "w3", name + ".linear_fc1.up")
        self.linear_fc2 = self.stack(settings, config, tensors, "w2", name + ".linear_fc2")

    @staticmethod
    def stack(settings, config, tensors, part, name):
        every = range(config.n_expert)
        if not config.experts_fp4:
            return ExpertLinear(settings, torch.stack([tensors[f"experts.{e}.{part}.weight"] for e in every]), None, name)
        codes, scales = ([tensors[f"experts.{e}.{part}.weight_{kind}"] for e in every] for kind in ("packed", "scale"))
        return ExpertLinear(settings, torch.stack(codes), torch.stack(scales), name)

    def forward(self, rows, x, expert):
        maps = [m.map for m in (self.linear_fc1.gate, self.linear_fc1.up, self.linear_fc2)]
        return rows.fn.experts(rows, x, expert, maps, self.act, self.name)


class Router(nn.Module):
    def __init__(self, ops, config, tensors, name):
        super().__init__()
        self.config, self.name = config, name
        self.weight = frozen(tensors["gate.weight"])
        self.expert_bias = vector(ops, tensors["gate.e_score_correction_bias"])
        self.stack = Stack(ops, 1, *self.weight.shape).pack(self.weight)

    def forward(self, rows, x):
        c = self.config
        expert, p = rows.fn.route(rows, x, self.stack, self.expert_bias, c.n_expert_topk, c.renormalize, c.route_scale, self.name)
        rows.show("route", expert, p)
        return expert, p


class Moe(nn.Module):
    """Routed experts, behind a latent where the config has one, and shared experts."""

    def __init__(self, settings, config, tensors, name):
        super().__init__()
        ops, self.config, self.name = settings.ops, config, name
        self.router = Router(ops, config, tensors, name + ".router")
        self.experts = Experts(settings, config, tensors, name + ".experts")
        self.shared_experts = Mlp(settings, config, tensors.below("shared_experts"), name + ".shared_experts")
        if config.d_latent:
            self.fc1_latent_proj = LoraLinear(settings, tensors["routed_expert_down_proj.weight"], name + ".fc1_latent_proj")
            self.fc2_latent_proj = LoraLinear(settings, tensors["routed_expert_up_proj.weight"], name + ".fc2_latent_proj")
        if config.latent_norm:
            self.routed_expert_norm = norm_of(ops, tensors["routed_expert_norm.weight"])

    def forward(self, rows, x):
        c = self.config
        expert, p = self.router(rows, x)  # the router reads x, not the latent
        shared = self.shared_experts.linear_fc1.every
        first = ([self.fc1_latent_proj.map] if c.d_latent else []) + shared
        *latent, gate, up = rows.fn.linear_group(rows, first, x, y_f32=shared)
        inner = latent[0] if latent else x
        routed = rows.fn.combine(rows, self.experts(rows, inner, expert), p)
        rows.show("experts", routed)
        if c.latent_norm:
            routed = rows.fn.rmsnorm(rows, routed, self.routed_expert_norm.weight, c.norm_eps, self.name + ".routed_expert_norm")
        if c.d_latent:
            routed = self.fc2_latent_proj(rows, routed)
        return rows.show("ffn_out", rows.fn.residual(rows, routed, self.shared_experts.second(rows, gate, up), self.name))
