"""The model as a Megatron-Core GPTModel: our layer, attention, MoE, norm and head through ModuleSpec; the rest is Megatron's.

The rows of a micro-batch are packed sequences (THD, batch dimension 1) described by PackedSeqParams; the residual bank rides in `context`
from layer to layer. `log_probs` is the way in. Importing this module needs megatron-core; where Triton is absent, one of its modules that
nothing here uses gets an empty stand-in first."""
import itertools
import sys
import types

import torch
import torch.distributed as dist
from torch import nn

from . import quiet

try:
    import triton  # noqa: F401
except ImportError:
    STAND_IN = "megatron.core.transformer.moe.ops.paged_stash"
    sys.modules[STAND_IN] = types.ModuleType(STAND_IN)
    sys.modules[STAND_IN].__getattr__ = lambda _: None

with quiet.known():
    from megatron.core import __version__ as MEGATRON_VERSION
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from . import functions, refusals
from .blocks import vector
from .lora import frozen
from .model import Below, Layer, mix_weight
from .ops import Stack
from .rows import Rows

PINNED = "0.19.2"


def initialize(backend):
    """One process, one rank, no ports: what Megatron-Core asks for before a model is built."""
    if MEGATRON_VERSION != PINNED:
        raise RuntimeError(f"megatron-core {MEGATRON_VERSION} is installed: this trainer is written for {PINNED}")
    if not dist.is_initialized():
        dist.init_process_group("gloo" if backend == "oracle" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(1, 1)
    refusals.megatron(parallel_state)
    if backend == "cuda":  # the stock head, which OutputLayer replaces, is filled from this generator
        megatron_random.model_parallel_cuda_manual_seed(1)
    if backend == "oracle":
        without_gpu()


def shut_down(has_failed):
    """Before the process ends; NCCL complains of a group that is left. has_failed: why has been said, and a GPU that failed fails here again."""
    try:
        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    except Exception:
        if not has_failed:
            raise


def without_gpu():
    """Megatron-Core asks for a GPU where none is needed: recomputing activations for its generator, from which nothing of this model draws,
    and writing checkpoints for its stream and its number."""
    megatron_random._get_cuda_rng_state = lambda *_, **__: None
    megatron_random._set_cuda_rng_state = lambda *_, **__: None
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"


class MegatronLayer(Layer, TransformerLayer):
    """Hidden states (n_row, 1, d_model), the bank (n_bank, n_row, d_model) as context. The last layer owns the mix before the head."""

    def __init__(self, config, layer_number=1, settings=None, model_config=None, checkpoint=None, **_):
        Layer.__init__(self, settings, model_config, checkpoint, layer_number - 1)
        self.layer_number, self.config, self.cuda_graphs = layer_number, config, []
        if layer_number == model_config.n_layer and self.has_bank:
            self.output_attn_res = mix_weight(settings.ops, Below(checkpoint, "model."), "output_attn_res")

    def forward(self, hidden_states, context=None, packed_seq_params=None, **_):
        rows = packed_seq_params.bitroll_rows
        bank = () if context is None else tuple(rows.fn.enter(row) for row in context.unbind(0))
        p, after = Layer.forward(self, rows, rows.fn.enter(hidden_states[:, 0]), bank)
        if len(after) > len(bank):
            row = rows.fn.leave(after[-1]).unsqueeze(0)
            context = row if context is None else torch.cat((context, row))
        if self.layer_number == self.shape.n_layer and self.has_bank:
            rows.layer = self.shape.n_layer
            p = rows.show("res_attn", rows.fn.attnres(rows, after, p, self.output_attn_res, self.shape.norm_eps, "output_attn_res"))
        return rows.fn.leave(p).unsqueeze(1), context

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """The masters of the adapters: a LoRA run's checkpoint names the frozen base by its digest and does not copy it."""
        masters = {name: p for name, p in self.named_parameters() if p.requires_grad}
        return make_sharded_tensors_for_checkpoint(masters, prefix, sharded_offsets=sharded_offsets)


class CurrentRows:
    """The rows of the forward under way, for the modules that Megatron calls without packed_seq_params."""
    rows = None


class FinalNorm(nn.Module):
    def __init__(self, weight, eps, current):
        super().__init__()
        self.weight, self.eps, self.current = weight, eps, current

    def forward(self, hidden_states):
        rows = self.current.rows
        rows.layer = rows.ops.config.n_layer
        return rows.show("final", rows.fn.rmsnorm(rows, hidden_states[:, 0], self.weight, self.eps, "final_layernorm")).unsqueeze(1)


class Embedding(nn.Module):
    """Under Megatron's name, `embedding.word_embeddings.weight`."""

    def __init__(self, table, current, recompute):
        super().__init__()
        self.word_embeddings = nn.Module()
        self.word_embeddings.weight, self.current, self.recompute = frozen(table), current, recompute

    def forward(self, input_ids, position_ids=None, **_):
        rows = self.current.rows
        rows.layer = -1
        y = rows.show("embed", rows.fn.embed(rows, input_ids[0].to(torch.int32), self.word_embeddings.weight)).unsqueeze(1)
        # A layer that is computed again takes part in the backward only if its input does.
        return y.requires_grad_(self.recompute and torch.is_grad_enabled())


class OutputLayer(nn.Module):
    def __init__(self, ops, weight):
        super().__init__()
        self.weight, self.stack = frozen(weight), Stack(ops, 1, *weight.shape).pack(weight)


def logprob_head(hidden_states, output_layer, labels, packed_seq_params, context, **_):
    """GPTModel's output processor: (log-prob, log-prob at temperature 1, entropy or None), each (n_row)."""
    rows = packed_seq_params.bitroll_rows
    out = rows.fn.score(rows, hidden_states[:, 0], output_layer.stack, labels[0].to(torch.int32), **context)
    rows.show("logprob", out[0])
    return out


def transformer_config(config, backend, recompute):
    """What Megatron's own parts ask; our modules read the model's config."""
    # cuda_graph_modules: of its own default, "full", Megatron-Core says at every start that it is deprecated; no CUDA graph is captured here.
    extra = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1) if recompute else {}
    return TransformerConfig(
        num_layers=config.n_layer, hidden_size=config.d_model, ffn_hidden_size=config.d_ff, num_attention_heads=config.n_head,
        use_cpu_initialization=backend == "oracle", transformer_impl="local", normalization="RMSNorm", layernorm_epsilon=config.norm_eps,
        hidden_dropout=0.0, attention_dropout=0.0, bias_dropout_fusion=False, gradient_accumulation_fusion=False, bf16=True,
        params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, hetereogenous_dist_checkpoint=True, cuda_graph_modules=[], **extra)


class BitrollModel(GPTModel):
    """settings: ops and adapters; checkpoint: the base. Every parameter but the adapters' masters is frozen. fn: what computes, see
    Rows."""

    def __init__(self, settings, config, checkpoint, recompute=False, fn=functions):
        ops, current = settings.ops, CurrentRows()
        megatron = transformer_config(config, ops.backend, recompute)
        layer = ModuleSpec(MegatronLayer, params=dict(settings=settings, model_config=config, checkpoint=checkpoint))
        norm = vector(ops, checkpoint["model.norm.weight"])
        spec = TransformerBlockSubmodules(layer_specs=[layer] * config.n_layer,
                                          layer_norm=lambda **_: FinalNorm(norm, config.norm_eps, current))
        super().__init__(megatron, spec, vocab_size=config.n_vocab, max_sequence_length=config.position_max, position_embedding_type="none",
                         share_embeddings_and_output_weights=False, pre_process=False, post_process=True)
        self.pre_process = self.decoder.pre_process = True  # the stock embedding and head would be built only to be replaced
        self.embedding = Embedding(checkpoint["model.embed_tokens.weight"].to(ops.device), current, recompute)
        self.output_layer = OutputLayer(ops, checkpoint["lm_head.weight"])
        self.ops, self.current, self.model_config, self.fn = ops, current, config, fn

    def log_probs(self, token, packed, target, temperature, slot=0, trace=None, entropy=True):
        """token, target (n_row) ids; packed: PackedSeqParams of the same rows; temperature (n_row) f32; slot: of every row, or (n_row) with
        -1 for base rows. (log-prob, log-prob at temperature 1, entropy or None), each (n_row). With cu_seqlens_q_padded the rows between sequences
        are left out of the forward and come back as 0."""
        keep = unpadded_rows(packed, token.numel())
        if keep is not None:
            keep = keep.to(token.device)
            inner = [t[keep] if isinstance(t, torch.Tensor) and t.dim() else t for t in (token, target, temperature, slot)]
            out = self.log_probs(inner[0], tight(packed), *inner[1:], trace, entropy)
            return tuple(t if t is None else torch.zeros(token.numel(), dtype=t.dtype, device=t.device).index_copy(0, keep, t) for t in out)
        rows = packed.bitroll_rows = self.current.rows = Rows(self.ops, packed.cu_seqlens_q.tolist(), token.numel(), slot, self.fn)
        rows.trace = trace(rows) if trace else None
        return self(input_ids=token.unsqueeze(0), position_ids=None, attention_mask=None, labels=target.unsqueeze(0), packed_seq_params=packed,
                    output_processor=logprob_head, output_processor_context=dict(temperature=temperature, entropy=entropy))


def pack(lengths, padded=None):
    """PackedSeqParams of sequences of so many rows; padded: the room that each has, where it is more."""
    def cumulated(counts):
        return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    cu, cu_padded = cumulated(lengths), None if padded is None else cumulated(padded)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=cu_padded, cu_seqlens_kv_padded=cu_padded,
                           max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))


def unpadded_rows(packed, n_row):
    """Which rows are a sequence's, when others lie between them; else None."""
    if packed.cu_seqlens_q_padded is None:
        return None
    cu, room = packed.cu_seqlens_q.tolist(), packed.cu_seqlens_q_padded.tolist()
    keep = [room[i] + k for i in range(len(cu) - 1) for k in range(cu[i + 1] - cu[i])]
    return None if keep == list(range(n_row)) else torch.tensor(keep, dtype=torch.int64)


def tight(packed):
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=packed.cu_seqlens_q, cu_seqlens_kv=packed.cu_seqlens_q,
                           max_seqlen_q=packed.max_seqlen_q, max_seqlen_kv=packed.max_seqlen_q)
