"""What this trainer refuses, by name: settings of other trainers that would make its forward another function than the rollout's, or that
it does not compute. Each refusal is one sentence: what was asked, what is expected, why."""
import sys

import torch

PARALLEL = ("tensor", "pipeline", "expert", "expert_tensor", "context")

# Of an adapter's settings, in the names of PEFT and of Megatron-Bridge: (key, why only its plain value is taken).
FEATURES = (
    ("lora_dropout", "a forward that drops entries gives other bits than the rollout"),
    ("dropout", "a forward that drops entries gives other bits than the rollout"),
    ("use_dora", "DoRA rescales the base weights by norms of the merged matrix, which no op of the contract computes"),
    ("use_rslora", "the run publishes s = alpha / rank, and rsLoRA's is alpha / sqrt(rank)"),
    ("modules_to_save", "whole modules beside the adapter would train, and only adapters are sent to the rollout"),
    ("rank_pattern", "every adapter of a run has one rank"),
    ("alpha_pattern", "every adapter of a run has one alpha"),
    ("share_expert_adapters", "an adapter shared by the experts of a rank means another function for every number of ranks"),
    ("experts_shared_outer_loras", "every routed expert has an adapter of its own"),
    ("normalize_moe_lora", "every adapter of a run has one rank"),
)
# Keys that say nothing of what a forward computes, or that are read elsewhere.
READ = {"peft_type", "type", "task_type", "r", "dim", "rank", "lora_alpha", "alpha", "target_modules", "exclude_modules", "bias",
        "init_lora_weights", "auto_mapping", "base_model_name_or_path", "inference_mode", "layers_pattern", "megatron_core", "peft_version",
        "qalora_group_size", "revision"}
# Starts that leave the base weights alone; PiSSA, OLoRA, CorDA and LoftQ subtract something from them.
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


class Refused(ValueError):
    """A setting that this trainer does not take."""


def _is_off(value):
    return value is None or value == 0 or value in ("", (), [], {})


def adapter(config):
    """config: adapter_config.json of PEFT, or settings in the names of Megatron-Bridge."""
    kind = config.get("peft_type", config.get("type", "LORA"))
    if str(kind).upper() != "LORA":
        raise Refused(f"an adapter of type {kind}: expected LORA, the only kind that the linear op computes")
    if config.get("bias", "none") != "none":
        raise Refused(f"bias '{config['bias']}': expected none, maps of this model have no bias")
    start = config.get("init_lora_weights")
    if not any(start is plain or (isinstance(plain, str) and start == plain) for plain in PLAIN_STARTS):
        raise Refused(f"init_lora_weights '{start}': expected a start that leaves the base weights as published, the rollout runs on those")
    for key, why in FEATURES:
        if not _is_off(config.get(key)):
            raise Refused(f"{key} is {config[key]!r}: expected it off, {why}")
    named = READ | {key for key, _ in FEATURES}
    for key in sorted(set(config) - named, key=str):
        if not _is_off(config[key]):
            raise Refused(f"{key} is {config[key]!r}: expected null, false or empty, this trainer does not compute it")


def parallel(sizes):
    """sizes: {kind of PARALLEL: ranks}; a kind that is absent is 1."""
    for kind in PARALLEL:
        if sizes.get(kind, 1) > 1:
            raise Refused(f"{kind.replace('_', ' ')} parallel size {sizes[kind]}: expected 1, this trainer holds the whole model on one rank")


def megatron(source):
    """source: a TransformerConfig, or the module parallel_state once it is initialized."""
    def size(kind):
        name = kind + ("_parallel" if kind in ("context", "expert_tensor") else "_model_parallel")
        if hasattr(source, f"get_{name}_world_size"):
            return getattr(source, f"get_{name}_world_size")()
        return getattr(source, f"{name}_size", None) or 1
    parallel({kind: size(kind) for kind in PARALLEL})


def machine(backend):
    """backend: of settings or an argument."""
    if backend == "cuda" and not torch.cuda.is_available():
        raise Refused("backend cuda: torch finds no GPU on this machine: give --backend oracle")


def forward():
    """The state of this thread that would change a forward's bits, or that a forward cannot run in."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise Refused("autocast is on: expected a forward outside of it, each op has its own dtypes")
    least = sys.float_info.min
    if least * 0.5 == 0.0:  # the flag is the thread's, so it shows in Python's own numbers
        raise Refused("denormal numbers are flushed to zero (torch.set_flush_denormal): expected them kept, the contract's results have them")
    if torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None:
        raise Refused("a forward under torch.compile: expected plain execution, ops of the engine cannot be traced")
