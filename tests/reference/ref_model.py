"""ref_model: KimiK31, KimiK3 and KimiLinear in float64, written from the formulas of the architecture, nothing rounded.

Shares no code with the engine. FP8 quantisation of the index query and key is part of the function and is modelled; all other
roundings of the contract are what the comparison measures. Discrete choices are taken from outside, and the scores behind
them are handed back, so that one flipped near-tie does not hide an error of value.
Layer: tests. Shapes: S sequences, L positions (padded), D hidden, H heads. Mutants: see MUTANTS in reference_check.py."""
import numpy as np


def sigmoid(x):
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.logaddexp(0.0, x)


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def layer_norm(x, weight, bias, eps):
    d = x - np.mean(x, axis=-1, keepdims=True)
    return d / np.sqrt(np.mean(d * d, axis=-1, keepdims=True) + eps) * weight + bias


def softmax(x, axis=-1):
    e = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return e / np.sum(e, axis=axis, keepdims=True)


def short_conv(u, weight):
    """u (S, L, C), weight (C, 1, taps): causal, depthwise; the last tap meets the present token."""
    taps = weight.shape[-1]
    past = np.pad(u, ((0, 0), (taps - 1, 0), (0, 0)))
    return sum(weight[:, 0, j] * past[:, j:j + u.shape[1]] for j in range(taps))


def fp8_with_scale(x):
    """Last axis to e4m3 under one power-of-two scale: (values, scale)."""
    amax = np.maximum(np.max(np.abs(x), axis=-1, keepdims=True), 1e-4)
    scale = np.exp2(np.ceil(np.log2(amax / 448.0)))
    y = x / scale
    step = np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(y), 2.0**-20))), -6.0) - 3.0)
    return np.rint(y / step) * step, scale


def times(x, w):
    """x (.., n_in) times the transpose of w (n_out, n_in). einsum: twice as fast as the plain BLAS that numpy may come with."""
    return np.einsum("ni,oi->no", x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], w.shape[0])


class Model:
    def __init__(self, checkpoint, adapter=None, mutant=None):
        self.file = checkpoint
        self.config = checkpoint.config
        self.adapter = adapter
        self.mutant = mutant
        self.eps = self.config["rms_norm_eps"]
        self.is_linear = checkpoint.architecture == "KimiLinearForCausalLM"
        self.is_sparse = checkpoint.architecture == "KimiK31ForConditionalGeneration"
        self.expert_cache = {}

    def linear(self, x, module):
        y = times(x, self.file[module + ".weight"])
        return y + self.low_rank(x, module)

    def low_rank(self, x, module):
        factors = self.adapter.factors(module) if self.adapter else None
        if factors is None:
            return 0.0
        scale, a, b = factors
        return times(scale * times(x, a), b)

    def norm(self, x, name):
        return rms_norm(x, self.file[name + ".weight"], self.eps)

    # ---- KDA -----------------------------------------------------------------------------------------------------------------

    def kda(self, layer, x):
        c = self.config["linear_attn_config"]
        at = f"model.layers.{layer}.self_attn."
        heads = (*x.shape[:2], c["num_heads"], c["head_dim"])
        q, k, v = (silu(short_conv(self.linear(x, f"{at}{n}_proj"), self.file[f"{at}{n}_conv1d.weight"])).reshape(heads)
                   for n in "qkv")
        if self.mutant != "no_qk_norm":
            q = q / np.sqrt(np.sum(q * q, axis=-1, keepdims=True) + 1e-6)
            k = k / np.sqrt(np.sum(k * k, axis=-1, keepdims=True) + 1e-6)
        beta = sigmoid(self.linear(x, at + "b_proj"))
        decay = np.exp(self.log_decay(at, x, heads))
        o = self.delta_rule(q / np.sqrt(c["head_dim"]), k, v, decay, beta)
        gate = self.linear(x, at + "g_proj") if c["use_full_rank_gate"] else \
            self.linear(self.linear(x, at + "g_a_proj"), at + "g_b_proj")
        gate = sigmoid(gate).reshape(heads)
        o = self.norm(o * gate, at + "o_norm") if self.mutant == "gate_before_norm" else self.norm(o, at + "o_norm") * gate
        return self.linear(o.reshape(*x.shape[:2], -1), at + "o_proj")

    def log_decay(self, at, x, heads):
        c = self.config["linear_attn_config"]
        f = (self.linear(self.linear(x, at + "f_a_proj"), at + "f_b_proj") + self.file[at + "dt_bias"]).reshape(heads)
        rate = np.exp(self.file[at + "A_log"].ravel()[:c["num_heads"]])[:, None]
        bound = c["gate_lower_bound"]
        if self.mutant == "other_decay":
            bound = -5.0 if bound is None else None
        return -rate * softplus(f) if bound is None else bound * sigmoid(rate * f)

    @staticmethod
    def delta_rule(q, k, v, decay, beta):
        """q, k, v, decay (S, L, H, d), beta (S, L, H) -> o (S, L, H, d); the state is (S, H, key, value)."""
        n_seq, n_pos, n_head, d = q.shape
        state = np.zeros((n_seq, n_head, d, d))
        o = np.empty_like(v)
        for t in range(n_pos):
            state *= decay[:, t, :, :, None]
            read = (k[:, t, :, None, :] @ state)[:, :, 0]
            u = beta[:, t, :, None] * (v[:, t] - read)
            state += k[:, t, :, :, None] * u[:, :, None, :]
            o[:, t] = (q[:, t, :, None, :] @ state)[:, :, 0]
        return o

    # ---- MLA -----------------------------------------------------------------------------------------------------------------

    def mla(self, layer, x, choices, scores):
        c = self.config
        at = f"model.layers.{layer}.self_attn."
        n_seq, n_pos = x.shape[:2]
        n_head, nope, rope, d_v = (c[n] for n in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        if c["q_lora_rank"] is None:
            cq, q = None, self.linear(x, at + "q_proj")
        else:
            cq = self.norm(self.linear(x, at + "q_a_proj"), at + "q_a_layernorm")
            q = self.linear(cq, at + "q_b_proj")
        q = q.reshape(n_seq, n_pos, n_head, nope + rope).transpose(0, 2, 1, 3)
        latent = self.linear(x, at + "kv_a_proj_with_mqa")
        key_rope = np.broadcast_to(latent[:, None, :, -rope:], (n_seq, n_head, n_pos, rope))
        kv = self.linear(self.norm(latent[..., :-rope], at + "kv_a_layernorm"), at + "kv_b_proj")
        kv = kv.reshape(n_seq, n_pos, n_head, nope + d_v).transpose(0, 2, 1, 3)
        s = q @ np.concatenate([kv[..., :nope], key_rope], axis=-1).swapaxes(-1, -2) / np.sqrt(nope + rope)
        seen = np.broadcast_to(np.tril(np.ones((n_pos, n_pos), bool)), (n_seq, n_pos, n_pos))
        if self.is_sparse:
            scores.append(("index", layer, *self.index_scores(at, x, cq)))
            seen = choices.positions[layer]
        o = softmax(np.where(seen[:, None], s, -np.inf)) @ kv[..., nope:]
        o = o.transpose(0, 2, 1, 3).reshape(n_seq, n_pos, n_head * d_v)
        if c["mla_use_output_gate"] and self.mutant != "no_mla_gate":
            o = o * sigmoid(self.linear(x, at + "g_proj"))
        return self.linear(o, at + "o_proj")

    def index_scores(self, at, x, cq):
        """(S, L, L): what the row's query thinks of each position; (S, L): the largest value that vectors of these lengths
        could give, against which an error of rounding is small or large."""
        n_seq, n_pos = x.shape[:2]
        n_head, d = self.config["index_n_heads"], self.config["index_head_dim"]
        if self.mutant == "no_indexer":
            position = np.arange(n_pos, dtype=np.float64)
            return np.broadcast_to(position, (n_seq, n_pos, n_pos)), np.broadcast_to(position + 1.0, (n_seq, n_pos))
        q, scale_q = fp8_with_scale(self.linear(cq, at + "indexer.wq_b").reshape(n_seq, n_pos, n_head, d))
        bias = 0.0 if self.mutant == "no_index_bias" else self.file[at + "indexer.k_norm.bias"]
        k = layer_norm(self.linear(x, at + "indexer.wk"), self.file[at + "indexer.k_norm.weight"], bias, self.eps)
        k, scale_k = fp8_with_scale(k)
        w = self.linear(x, at + "indexer.weights_proj") / np.sqrt(n_head * d) * scale_q[..., 0]
        dots = np.maximum(q.reshape(n_seq, n_pos * n_head, d) @ k.swapaxes(-1, -2), 0.0)
        dots = dots.reshape(n_seq, n_pos, n_head, n_pos)
        longest_key = np.maximum.accumulate(np.linalg.norm(k, axis=-1) * scale_k[..., 0], axis=1)
        bound = np.sum(np.abs(w) * np.linalg.norm(q, axis=-1), axis=-1) * longest_key
        return np.sum(w[..., None] * dots, axis=2) * scale_k[:, None, :, 0], bound

    # ---- feed-forward --------------------------------------------------------------------------------------------------------

    def glu(self, gate, up):
        if self.config["hidden_act"] == "silu":
            return silu(gate) * up
        beta, linear_beta = self.config["activation_situ_beta"], self.config["activation_situ_linear_beta"]
        return beta * np.tanh(gate / beta) * sigmoid(gate) * linear_beta * np.tanh(up / linear_beta)

    def mlp(self, at, x):
        return self.linear(self.glu(self.linear(x, at + "gate_proj"), self.linear(x, at + "up_proj")), at + "down_proj")

    def expert_weights(self, layer):
        name = f"model.layers.{layer}.block_sparse_moe.experts.{{}}."
        if layer not in self.expert_cache:
            self.expert_cache[layer] = [self.file.experts(name + w, self.config["num_experts"]) for w in ("w1", "w3", "w2")]
        return name, self.expert_cache[layer]

    def routed(self, layer, z, chosen, p):
        """z (n, d); chosen (n, k) ids; p (n, n_expert) weights -> (n, d)"""
        name, (w1, w3, w2) = self.expert_weights(layer)
        out = np.zeros_like(z)
        for e in range(self.config["num_experts"]):
            row = np.flatnonzero(np.any(chosen == e, axis=1))
            if not row.size:
                continue
            at = name.format(e)
            x = z[row]
            h = self.glu(times(x, w1[e]) + self.low_rank(x, at + "w1"), times(x, w3[e]) + self.low_rank(x, at + "w3"))
            out[row] += p[row, e, None] * (times(h, w2[e]) + self.low_rank(h, at + "w2"))
        return out

    def moe(self, layer, x, choices, scores):
        c = self.config
        at = f"model.layers.{layer}.block_sparse_moe."
        s = sigmoid(times(x, self.file[at + "gate.weight"]))
        bias = 0.0 if self.mutant == "no_router_bias" else self.file[at + "gate.e_score_correction_bias"]
        scores.append(("route", layer, s + bias, np.ones(x.shape[:2])))  # a sigmoid reaches 1
        chosen = choices.experts[layer].reshape(-1, c["num_experts_per_token"])
        flat = x.reshape(-1, x.shape[-1])
        p = s.reshape(len(chosen), -1)
        total = np.sum(np.take_along_axis(p, chosen, axis=1), axis=1, keepdims=True)
        if c["moe_renormalize"]:
            p = p / (total + 1e-20)
        p = p * c["routed_scaling_factor"]
        if "routed_expert_hidden_size" in c:
            y = self.routed(layer, self.linear(flat, at + "routed_expert_down_proj"), chosen, p)
            if c["latent_moe_use_norm"] and self.mutant != "no_latent_norm":
                y = self.norm(y, at + "routed_expert_norm")
            y = self.linear(y, at + "routed_expert_up_proj")
        else:
            y = self.routed(layer, flat, chosen, p)
        return y.reshape(x.shape) + self.mlp(at + "shared_experts.", x)

    # ---- layers --------------------------------------------------------------------------------------------------------------

    def attention(self, layer, x, choices, scores):
        at = f"model.layers.{layer}.input_layernorm"
        is_mla = layer + 1 in self.config["linear_attn_config"]["full_attn_layers"]

        def block(y):
            return self.mla(layer, y, choices, scores) if is_mla else self.kda(layer, y)

        return self.norm(block(x), at) if self.mutant == "norm_after_block" else block(self.norm(x, at))

    def feed_forward(self, layer, x, choices, scores):
        x = self.norm(x, f"model.layers.{layer}.post_attention_layernorm")
        if layer < self.config["first_k_dense_replace"]:
            return self.mlp(f"model.layers.{layer}.mlp.", x)
        return self.moe(layer, x, choices, scores)

    def mix(self, bank, p, at):
        """AttnRes: the bank's rows and the running sum, weighted by a learned score."""
        rows = np.stack(bank + [p], axis=-2)
        query = self.file[at + "_norm.weight"] * self.file[at + "_proj.weight"][0]
        weight = softmax(np.sum(rms_norm(rows, 1.0, self.eps) * query, axis=-1))
        return np.sum(weight[..., None] * rows, axis=-2)

    def residual_bank(self, h, choices, scores):
        n_layer, block = self.config["num_hidden_layers"], self.config["attn_res_block_size"]
        writes = set(range(0, n_layer, block))
        if self.mutant == "one_write_less":
            writes.remove(max(writes))
        bank, p = [], h
        for layer in range(n_layer):
            at = f"model.layers.{layer}."
            x = self.mix(bank, p, at + "self_attention_res") if bank else p
            if layer in writes:
                bank = bank + [p]
            a = self.attention(layer, x, choices, scores)
            p = a if layer in writes else p + a
            p = p + self.feed_forward(layer, self.mix(bank, p, at + "mlp_res"), choices, scores)
        return self.mix(bank, p, "model.output_attn_res")

    def residual_stream(self, h, choices, scores):
        for layer in range(self.config["num_hidden_layers"]):
            h = h + self.attention(layer, h, choices, scores)
            h = h + self.feed_forward(layer, h, choices, scores)
        return h

    def forward(self, tokens, choices):
        """tokens (S, L) -> log-softmax (S, L, vocabulary) and the list of (kind, layer, scores (S, L, n), scale (S, L))"""
        scores = []
        h = self.file["model.embed_tokens.weight"][tokens]
        h = (self.residual_stream if self.is_linear else self.residual_bank)(h, choices, scores)
        logits = times(self.norm(h, "model.norm"), self.file["lm_head.weight"])
        logits -= np.max(logits, axis=-1, keepdims=True)
        return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True)), scores
