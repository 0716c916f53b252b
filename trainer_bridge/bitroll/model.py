"""The three architectures out of the blocks: layers over a residual bank (K3, K3.1) or a plain residual (Kimi-Linear)."""
import torch
from torch import nn

from .abi import CONSTANTS
from .blocks import DenseMlp, Kda, Mla, Moe, Named, norm_of
from .lora import frozen
from .ops import Stack

LINEAR = CONSTANTS["BR_ARCH_KIMI_LINEAR"]


class Below:
    """The tensors of a checkpoint under one prefix."""

    def __init__(self, checkpoint, prefix):
        self.checkpoint, self.prefix = checkpoint, prefix

    def __getitem__(self, name):
        return self.checkpoint[self.prefix + name]

    def __contains__(self, name):
        return self.prefix + name in self.checkpoint

    def below(self, part):
        return Below(self.checkpoint, self.prefix + part + ".")


def mix_weight(ops, tensors, name):
    """W of N-RES: its norm's and its projection's weights in one, rounded once."""
    norm, proj = (tensors[f"{name}_{part}.weight"].reshape(-1).to(torch.float32).to(ops.device) for part in ("norm", "proj"))
    w = torch.empty_like(norm)
    ops.library.check(ops.library.c.br_ops_attnres_weight(ops.handle, w.data_ptr(), norm.data_ptr(), proj.data_ptr(), w.numel()))
    return frozen(w)


class Layer(nn.Module):
    """number: from 0. A forward hands on (p, bank): the running sum, a stream, and the streams saved before it, none in Kimi-Linear."""

    def __init__(self, settings, config, checkpoint, number):
        nn.Module.__init__(self)  # also the base of a Megatron layer, whose own constructor builds what this replaces
        ops, tensors = settings.ops, Below(checkpoint, f"model.layers.{number}.")
        self.shape, self.number, self.name = config, number, f"layers.{number}"
        attention = Mla if config.layer_is_mla[number] else Kda
        self.self_attention = attention(settings, config, tensors.below("self_attn"), self.name + ".self_attention")
        if number < config.n_dense_layer:
            self.mlp = DenseMlp(settings, config, tensors.below("mlp"), self.name + ".mlp")
        else:
            self.mlp = Moe(settings, config, tensors.below("block_sparse_moe"), self.name + ".mlp")
        self.input_layernorm = norm_of(ops, tensors["input_layernorm.weight"])
        self.pre_mlp_layernorm = norm_of(ops, tensors["post_attention_layernorm.weight"])
        self.has_bank = config.arch != LINEAR
        if self.has_bank:
            self.self_attention_res = mix_weight(ops, tensors, "self_attention_res")
            self.mlp_res = mix_weight(ops, tensors, "mlp_res")

    def normed(self, rows, x, norm, stage):
        return rows.show(stage, rows.fn.rmsnorm(rows, x, norm.weight, self.shape.norm_eps, f"{self.name}.{stage}"))

    def mix(self, rows, p, bank, w, stage):
        return rows.show(stage, rows.fn.attnres(rows, bank, p, w, self.shape.norm_eps, f"{self.name}.{stage}"))

    def forward(self, rows, p, bank):
        rows.layer = self.number
        return self.over_bank(rows, p, bank) if self.has_bank else (self.plain(rows, p), bank)

    def plain(self, rows, p):
        rows.show("res_attn", p)
        p = rows.fn.residual(rows, p, self.self_attention(rows, self.normed(rows, p, self.input_layernorm, "norm_attn")), self.name)
        rows.show("res_mlp", p)
        return rows.fn.residual(rows, p, self.mlp(rows, self.normed(rows, p, self.pre_mlp_layernorm, "norm_mlp")), self.name)

    def over_bank(self, rows, p, bank):
        x = p if not bank else self.mix(rows, p, bank, self.self_attention_res, "res_attn")
        branch = self.self_attention(rows, self.normed(rows, x, self.input_layernorm, "norm_attn"))
        if self.number % self.shape.res_block == 0:  # after the mix above, which saw the bank without this row
            bank, p = (*bank, p), rows.fn.enter(branch)
        else:
            p = rows.fn.residual(rows, p, branch, self.name)
        x = self.mix(rows, p, bank, self.mlp_res, "res_mlp")
        branch = self.mlp(rows, self.normed(rows, x, self.pre_mlp_layernorm, "norm_mlp"))
        return rows.fn.residual(rows, p, branch, self.name), bank


class Ends(nn.Module):
    """What lies before and behind the layers: embedding, last mix and norm, head."""

    def __init__(self, settings, config, checkpoint):
        super().__init__()
        ops, self.shape = settings.ops, config
        self.word_embeddings = Named(frozen(checkpoint["model.embed_tokens.weight"].to(ops.device)))
        self.final_layernorm = norm_of(ops, checkpoint["model.norm.weight"])
        self.output_layer = Named(frozen(checkpoint["lm_head.weight"]))
        self.head = Stack(ops, 1, config.n_vocab, config.d_model).pack(checkpoint["lm_head.weight"])
        if config.arch != LINEAR:
            self.output_attn_res = mix_weight(ops, Below(checkpoint, "model."), "output_attn_res")

    def embed(self, rows, token):
        rows.layer = -1
        return rows.show("embed", rows.fn.embed(rows, token, self.word_embeddings.weight))

    def final(self, rows, p, bank):
        """The rows that the head reads."""
        rows.layer = self.shape.n_layer
        if bank:
            p = rows.show("res_attn", rows.fn.attnres(rows, bank, p, self.output_attn_res, self.shape.norm_eps, "output_attn_res"))
        return rows.show("final", rows.fn.rmsnorm(rows, p, self.final_layernorm.weight, self.shape.norm_eps, "final_layernorm"))


class Model(nn.Module):
    """The whole model in plain torch: `log_probs` of the tokens that follow, packed rows in one call."""

    def __init__(self, settings, config, checkpoint):
        super().__init__()
        self.shape = config
        self.ends = Ends(settings, config, checkpoint)
        self.layers = nn.ModuleList(Layer(settings, config, checkpoint, i) for i in range(config.n_layer))

    def forward(self, rows, token):
        p, bank = rows.fn.enter(self.ends.embed(rows, token)), ()
        for layer in self.layers:
            p, bank = layer(rows, p, bank)
        return self.ends.final(rows, p, bank)

    def log_probs(self, rows, token, target, temperature):
        """(log-prob at the row's temperature, at temperature 1, entropy), each (n_row) f32, of target[t] after row t."""
        return rows.fn.score(rows, self(rows, token), self.ends.head, target, temperature)
