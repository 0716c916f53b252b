"""ref_files: reads what a run leaves on disk (checkpoint, adapter, rollout) into float64 arrays.

Owns its own readers: nothing here is shared with the engine, so that a misread byte shows up as a wrong log-prob.
Layer: tests. Knows file formats, not the model."""
import json
import os

import h5py
import numpy as np

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MXFP4_CODES = np.concatenate([E2M1, -E2M1])
MXFP4_GROUP = 32


def read_json(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def read_safetensors(path):
    """name -> array: BF16 and F32 as float64, which holds both exactly; U8 as it is."""
    with open(path, "rb") as file:
        raw = file.read()
    data = 8 + int.from_bytes(raw[:8], "little")
    tensors = {}
    for name, entry in json.loads(raw[8:data]).items():
        if name == "__metadata__":
            continue
        begin, end = (data + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            array = (np.frombuffer(raw[begin:end], "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        elif entry["dtype"] == "F32":
            array = np.frombuffer(raw[begin:end], "<f4").astype(np.float64)
        elif entry["dtype"] == "U8":
            array = np.frombuffer(raw[begin:end], np.uint8)
        else:
            raise ValueError(f"{path}: {name} has dtype {entry['dtype']}: expected BF16, F32 or U8")
        tensors[name] = array.reshape(entry["shape"])
    return tensors


def mxfp4(packed, scale):
    """(.., n / 2) bytes and (.., n / 32) exponents -> (.., n) values; the low nibble is the even column."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], packed.shape[-1] * 2)
    return MXFP4_CODES[codes] * np.exp2(np.repeat(scale.astype(np.float64) - 127.0, MXFP4_GROUP, axis=-1))


class Checkpoint:
    """A folder as published: config.json, shards named by the index."""

    def __init__(self, folder):
        config = read_json(os.path.join(folder, "config.json"))
        self.architecture = config["architectures"][0]
        self.config = config.get("text_config", config)
        shards = set(read_json(os.path.join(folder, "model.safetensors.index.json"))["weight_map"].values())
        self.tensors = {}
        for shard in sorted(shards):
            self.tensors.update(read_safetensors(os.path.join(folder, shard)))
        self.prefix = "" if self.architecture == "KimiLinearForCausalLM" else "language_model."

    def __getitem__(self, name):
        return self.tensors[self.prefix + name]

    def experts(self, name, n_expert):
        """(n_expert, n_out, n_in) of one matrix of all experts of a layer; name holds {} for the expert."""
        if self.prefix + name.format(0) + ".weight" in self.tensors:
            return np.stack([self[name.format(e) + ".weight"] for e in range(n_expert)])
        packed = np.stack([self[name.format(e) + ".weight_packed"] for e in range(n_expert)])
        scale = np.stack([self[name.format(e) + ".weight_scale"] for e in range(n_expert)])
        return mxfp4(packed, scale)


class Adapter:
    """A PEFT folder; factors(module) is (alpha / r, A, B), None where the adapter has nothing to say."""

    def __init__(self, folder, prefix):
        config = read_json(os.path.join(folder, "adapter_config.json"))
        self.scale = config["lora_alpha"] / config["r"]
        self.prefix = "base_model.model." + prefix
        self.tensors = read_safetensors(os.path.join(folder, "adapter_model.safetensors"))

    def factors(self, module):
        a = self.tensors.get(f"{self.prefix}{module}.lora_A.weight")
        if a is None:
            return None
        return self.scale, a, self.tensors[f"{self.prefix}{module}.lora_B.weight"]


def read_rollout(path):
    """A list of sequences in file order, each with its ids, log-probs (NaN where unscored) and, if recorded, best tokens."""
    with h5py.File(path, "r", libver="latest", swmr=True) as file:
        offset = file["seq/offset"][:]
        fields = {name: file["tokens/" + name][:] for name in ("id", "logprob", "mask", "top_id") if name in file["tokens"]}
        return [{name: array[begin:end] for name, array in fields.items()} for begin, end in zip(offset[:-1], offset[1:])]
