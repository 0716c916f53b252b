"""One table of names: Megatron's (Bridge's convention for Kimi K3), the checkpoint's, and those of PEFT files, which are the checkpoint's
behind a prefix. `python -m bitroll.names` prints it; name_table.txt is what it printed."""
import re
import sys

from . import program

# Maps that have adapters, below a layer: (Megatron, checkpoint). {e}: the expert of a stack; a part behind ":" is one adapter of a fused map.
ATTENTION = tuple((f"self_attention.{part}", f"self_attn.{part}") for part in (
    "q_proj", "k_proj", "v_proj", "g_proj", "o_proj", "f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"))
DENSE = (("mlp.linear_fc1:gate", "mlp.gate_proj"), ("mlp.linear_fc1:up", "mlp.up_proj"), ("mlp.linear_fc2", "mlp.down_proj"))
MOE = (("mlp.fc1_latent_proj", "block_sparse_moe.routed_expert_down_proj"),
       ("mlp.fc2_latent_proj", "block_sparse_moe.routed_expert_up_proj"),
       ("mlp.experts.linear_fc1.gate", "block_sparse_moe.experts.{e}.w1"),
       ("mlp.experts.linear_fc1.up", "block_sparse_moe.experts.{e}.w3"),
       ("mlp.experts.linear_fc2", "block_sparse_moe.experts.{e}.w2"),
       ("mlp.shared_experts.linear_fc1:gate", "block_sparse_moe.shared_experts.gate_proj"),
       ("mlp.shared_experts.linear_fc1:up", "block_sparse_moe.shared_experts.up_proj"),
       ("mlp.shared_experts.linear_fc2", "block_sparse_moe.shared_experts.down_proj"))
TABLE = dict(ATTENTION + DENSE + MOE)

# Tensors that stay frozen, below a layer. {norm,proj}: two that the contract multiplies into one when they are loaded.
FROZEN = (("input_layernorm.weight", "input_layernorm.weight"), ("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
          ("self_attention_res", "self_attention_res_{norm,proj}.weight"), ("mlp_res", "mlp_res_{norm,proj}.weight"),
          *((f"self_attention.{part}", f"self_attn.{part}") for part in (
              "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "q_a_layernorm.weight",
              "kv_a_layernorm.weight", "indexer.wq_b.weight", "indexer.wk.weight", "indexer.weights_proj.weight")),
          ("self_attention.indexer.norm", "self_attn.indexer.k_norm.weight"),
          ("self_attention.indexer.norm_bias", "self_attn.indexer.k_norm.bias"),
          ("mlp.router.weight", "block_sparse_moe.gate.weight"),
          ("mlp.router.expert_bias", "block_sparse_moe.gate.e_score_correction_bias"),
          ("mlp.routed_expert_norm.weight", "block_sparse_moe.routed_expert_norm.weight"))
# The same outside the layers; the mix before the head belongs to the last layer.
ENDS = (("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("decoder.layers.{last}.output_attn_res", "model.output_attn_res_{norm,proj}.weight"),
        ("decoder.final_layernorm.weight", "model.norm.weight"), ("output_layer.weight", "lm_head.weight"))

PEFT_PREFIX = "base_model.model."
MODEL_PREFIX = "language_model."  # of every tensor of a multimodal checkpoint
LAYER = re.compile(r"(?:decoder\.)?layers\.(\d+)\.(.+)$")


def rows():
    """(Megatron, checkpoint, PEFT or None where nothing trains): modules of maps, tensors of the rest. {i}: every layer that has it."""
    for megatron, checkpoint in TABLE.items():
        name = f"model.layers.{{i}}.{checkpoint}"
        yield f"decoder.layers.{{i}}.{megatron}", name, f"{PEFT_PREFIX}{name}.lora_{{A,B}}.weight"
    for megatron, checkpoint in FROZEN:
        yield f"decoder.layers.{{i}}.{megatron}", f"model.layers.{{i}}.{checkpoint}", None
    for megatron, checkpoint in ENDS:
        yield megatron, checkpoint, None


def text():
    """The table as text."""
    lines = ["# Names in Megatron-Core, in the checkpoint (multimodal ones put language_model. before it) and of the adapter in PEFT files.",
             "# {i}: layer, {e}: expert; `:part` is one adapter of a fused map; frozen: no adapter. Made by python -m bitroll.names."]
    return "\n".join(lines + [f"{megatron} {checkpoint} {peft or 'frozen'}" for megatron, checkpoint, peft in rows()]) + "\n"


def low_ranks(tensors):
    """(checkpoint module, A, B) of {PEFT tensor name: tensor}, in the order of the A."""
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            module = name[len(PEFT_PREFIX) : -len(".lora_A.weight")]
            yield module, a, tensors[f"{PEFT_PREFIX}{module}.lora_B.weight"]


def checkpoint_module(megatron, part=None):
    """The checkpoint's name of a map: `decoder.layers.3.mlp.linear_fc1`, part "gate" -> `model.layers.3.mlp.gate_proj`. With {e} in it for
    a stack of experts."""
    found = LAYER.match(megatron)
    key = found and (found.group(2) if part is None else f"{found.group(2)}:{part}")
    if not found or key not in TABLE:
        raise KeyError(f"'{megatron}'{'' if part is None else ' ' + part}: no such map in the table of names")
    return f"model.layers.{found.group(1)}.{TABLE[key]}"


if __name__ == "__main__":
    sys.exit(program.status_of("names", lambda: program.say(text(), end="")))
