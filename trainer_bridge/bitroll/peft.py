"""A model's adapters to and from a PEFT folder: adapter_config.json and adapter_model.safetensors, in the bf16 values that forwards read."""
import json
import os

import torch

from . import program, refusals
from .lora import AbsorbedLinear, ExpertLinear, FusedLinear, LoraLinear
from .names import PEFT_PREFIX, checkpoint_module, low_ranks
from .tensors import read_json, read_safetensors, write_safetensors


def adapters(model, prefix=""):
    """(checkpoint module name, LowRank, index) of each adapter: index is the expert's, or None. prefix: of a multimodal checkpoint."""
    for name, module in model.named_modules():
        if isinstance(module, (LoraLinear, AbsorbedLinear)) and hasattr(module, "adapter"):
            yield prefix + checkpoint_module(name), module.adapter, None
        elif isinstance(module, FusedLinear):
            for part in module.maps:
                if hasattr(module, f"adapter_{part}"):
                    yield prefix + checkpoint_module(name, part), getattr(module, f"adapter_{part}"), None
        elif isinstance(module, ExpertLinear) and hasattr(module, "adapter"):
            for e in range(module.map.weight.n):
                yield prefix + checkpoint_module(name).format(e=e), module.adapter, e


def live(model):
    """{LowRank: (A, B)}: the bf16 values that forwards read, A (n, rank, n_in) and B (n, n_out, rank), n = 1 for a single map."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, AbsorbedLinear) and module.adapters():
            uk, uv = module.uk.adapter, module.uv.adapter
            if not torch.equal(uk.b.unpack().transpose(1, 2).view(torch.int16), uv.a.unpack().view(torch.int16)):
                raise RuntimeError(f"{name}: the two packed forms of A differ, and forwards read both")
            b = torch.cat((uk.a.unpack().transpose(1, 2), uv.b.unpack()), 1)  # rows of each head: d_nope, then d_v
            found[module.adapter] = uv.a.unpack(), b.reshape(1, -1, uv.rank)
        elif isinstance(module, FusedLinear):
            for part, m in module.maps.items():
                if m.adapter:
                    found[getattr(module, f"adapter_{part}")] = m.adapter.a.unpack(), m.adapter.b.unpack()
        elif isinstance(module, (LoraLinear, ExpertLinear)) and module.map.adapter:
            found[module.adapter] = module.map.adapter.a.unpack(), module.map.adapter.b.unpack()
    return found


def exported(model, prefix=""):
    """(PEFT tensor name, bf16 tensor) of every adapter, in the order of the names."""
    values, tensors = live(model), {}
    for name, low, e in adapters(model, prefix):
        a, b = values[low]
        tensors[f"{PEFT_PREFIX}{name}.lora_A.weight"] = a[e or 0]
        tensors[f"{PEFT_PREFIX}{name}.lora_B.weight"] = b[e or 0]
    return sorted(tensors.items())


def merged(checkpoint, maps, s):
    """{checkpoint tensor name: W + s B A} of each (checkpoint module, A, B), in the precision of A and B, rounded once to W's."""
    tensors = {}
    for module, a, b in maps:
        w = checkpoint.tensors[module + ".weight"]
        tensors[module + ".weight"] = (w.to(a.dtype) + s * (b @ a).to(w.device)).to(w.dtype)
    return tensors


def save(model, settings, folder, prefix=""):
    write(dict(exported(model, prefix)), settings, folder)


def write(tensors, settings, folder):
    """tensors: bf16, by PEFT's names."""
    os.makedirs(folder, exist_ok=True)
    targets = sorted({module.rsplit(".", 1)[-1] for module, _, _ in low_ranks(tensors)})
    config = dict(peft_type="LORA", task_type="CAUSAL_LM", r=settings.rank, lora_alpha=settings.alpha, lora_dropout=0.0, bias="none",
                  use_rslora=bool(settings.rslora), target_modules=targets, base_model_name_or_path="", inference_mode=True)
    write_safetensors(os.path.join(folder, "adapter_model.safetensors"), sorted(tensors.items()))
    with program.written(os.path.join(folder, "adapter_config.json"), encoding="utf-8") as file:
        json.dump(config, file, indent=2, sort_keys=True)
        file.write("\n")


def load(model, folder, prefix=""):
    """Fills the masters; every adapter of the model must be there and no other, of the model's rank and alpha. publish() makes them
    live."""
    config = read_json(os.path.join(folder, "adapter_config.json"))
    refusals.adapter(config)
    tensors = read_safetensors(os.path.join(folder, "adapter_model.safetensors"))
    with torch.no_grad():
        for name, low, e in adapters(model, prefix):
            if (config["r"], config["lora_alpha"]) != (low.settings.rank, low.settings.alpha):
                raise ValueError(f"{folder}: rank {config['r']}, alpha {config['lora_alpha']}: expected {low.settings.rank} and "
                                 f"{low.settings.alpha:g}")
            for part, master in (("lora_A", low.linear_in.weight), ("lora_B", low.linear_out.weight)):
                key = f"{PEFT_PREFIX}{name}.{part}.weight"
                if key not in tensors:
                    raise KeyError(f"{folder}: there is no tensor {key}")
                value, place = tensors.pop(key), master if e is None else master[e]
                if value.shape != place.shape:
                    raise ValueError(f"{folder}: {key} has shape {tuple(value.shape)}: expected {tuple(place.shape)}")
                place.copy_(value)
    if tensors:
        raise KeyError(f"{folder}: {len(tensors)} tensors that the model has no place for, the first is {min(tensors)}")
