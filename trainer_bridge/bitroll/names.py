"""One table of module names: Megatron's (Bridge's convention for Kimi K3) and the checkpoint's, below a layer. PEFT files use the
checkpoint's names behind a prefix."""
import re

# (Megatron, checkpoint). {e}: the expert of a stack; a part behind ":" is one adapter of a fused map.
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

PEFT_PREFIX = "base_model.model."
LAYER = re.compile(r"(?:decoder\.)?layers\.(\d+)\.(.+)$")


def checkpoint_module(megatron, part=None):
    """The checkpoint's name of a map: `decoder.layers.3.mlp.linear_fc1`, part "gate" -> `model.layers.3.mlp.gate_proj`. With {e} in it for
    a stack of experts."""
    found = LAYER.match(megatron)
    key = found and (found.group(2) if part is None else f"{found.group(2)}:{part}")
    if not found or key not in TABLE:
        raise KeyError(f"'{megatron}'{'' if part is None else ' ' + part}: no such map in the table of names")
    return f"model.layers.{found.group(1)}.{TABLE[key]}"
