"""ref_engine: drives the bitroll command: makes a model and sequences, and reads back log-probs, best tokens and choices.

Layer: tests. Knows the command's options and files, not the model."""
import json
import os
import subprocess
from dataclasses import dataclass

import numpy as np

import ref_files

PROMPT_LENGTHS = (4, 9, 17, 30, 8, 24)
TOTAL_LENGTHS = (20, 41, 64, 88, 105, 120)  # past top-k 16, and past one cache page of 64
LORA_RANK = 32


@dataclass
class Choices:
    """What the engine chose, by layer."""
    experts: dict    # (S, L, k) ids
    positions: dict  # (S, L, L) bool


@dataclass
class Batch:
    """Sequences that ran with one adapter, padded to the longest. Row t predicts token t + 1."""
    tokens: np.ndarray    # (S, L)
    targets: np.ndarray   # (S, L)
    real: np.ndarray      # (S, L) bool
    logprob: np.ndarray   # (S, L) by the engine
    best: np.ndarray      # (S, L) the engine's most probable token, -1 where it was not recorded
    choices: Choices


class Engine:
    def __init__(self, command, preset, folder):
        self.command = command
        self.folder = folder
        self.model = self.path("model")
        self.adapter = self.path("adapter")
        self.run("init", "--preset", preset, "--seed", "1", "--out", self.model,
                 "--lora-rank", str(LORA_RANK), "--lora-out", self.adapter, "--lora-seed", "2")

    def path(self, name):
        return os.path.join(self.folder, name)

    def run(self, *arguments):
        return subprocess.run([self.command, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout

    def write_prompts(self, name, prompts, adapter, settings=None):
        path = self.path(name)
        with open(path, "w", encoding="utf-8") as file:
            for i, prompt in enumerate(prompts):
                line = {"prompt": [int(token) for token in prompt], "uid": str(i), "adapter": adapter}
                file.write(json.dumps({**line, **(settings[i] if settings else {})}) + "\n")
        return path

    def batch(self, adapter, config):
        """Rolls sequences out at temperature 1, then scores and dumps them as plain token ids, so that every token counts."""
        rng = np.random.default_rng(7)
        prompts = [rng.integers(3, config["vocab_size"], n) for n in PROMPT_LENGTHS]
        settings = [{"max_new": total - n} for n, total in zip(PROMPT_LENGTHS, TOTAL_LENGTHS)]
        use = ["--model", self.model, "--adapter", "tuned=" + self.adapter, "--threads", "1"]
        rolled, scored = self.path(adapter + ".rolled.h5"), self.path(adapter + ".scored.h5")
        self.run("generate", *use, "--prompts", self.write_prompts(adapter + ".prompts", prompts, adapter, settings),
                 "--out", rolled, "--temperature", "1", "--ignore-eos", "--top-logprobs", "1", "--seed", "3")
        rollout = ref_files.read_rollout(rolled)
        whole = self.write_prompts(adapter + ".jsonl", [seq["id"] for seq in rollout], adapter)
        self.run("score", *use, "--in", whole, "--out", scored)
        dump = self.run("dump", "--stage-hash", "--choices", "--as", "score", *use, "--in", whole)
        return make_batch(rollout, ref_files.read_rollout(scored), dump, config)


def pad(rows, fill, dtype):
    out = np.full((len(rows), max(len(row) for row in rows)), fill, dtype)
    for i, row in enumerate(rows):
        out[i, :len(row)] = row
    return out


def make_batch(rollout, scored, dump, config):
    for seq, again in zip(rollout, scored, strict=True):
        if not np.array_equal(seq["id"], again["id"]):
            raise ValueError("scoring returned other tokens than were rolled out")
        if np.any(np.isnan(again["logprob"][1:])):
            raise ValueError("scoring left a token without a log-prob")
    ids = [seq["id"] for seq in rollout]
    best = [np.where(seq["mask"] == 1, seq["top_id"][:, 0], -1) for seq in rollout]
    real = pad([np.ones(len(row) - 1) for row in ids], 0, bool)
    return Batch(tokens=pad([row[:-1] for row in ids], 0, np.int64), targets=pad([row[1:] for row in ids], 0, np.int64),
                 real=real, logprob=pad([seq["logprob"][1:] for seq in scored], 0, np.float64),
                 best=pad([row[1:] for row in best], -1, np.int64), choices=read_choices(dump, real, config))


def read_choices(dump, real, config):
    """Lines "uid#sample position layer stage hash ids"; every real row must have one in each layer that chooses."""
    n_seq, n_pos = real.shape
    top_k = config["num_experts_per_token"]
    n_layer = config["num_hidden_layers"]
    experts = {layer: np.full((n_seq, n_pos, top_k), -1) for layer in range(config["first_k_dense_replace"], n_layer)}
    positions = {}
    if "index_topk" in config:
        positions = {layer - 1: np.zeros((n_seq, n_pos, n_pos), bool) for layer in config["linear_attn_config"]["full_attn_layers"]}
    for line in dump.splitlines():
        part = line.split(" ")
        if len(part) != 6 or part[3] not in ("route", "index_topk"):
            continue
        seq, pos, layer = int(part[0].split("#")[0]), int(part[1]), int(part[2])
        chosen = [int(i) for i in part[5].split(",")]
        if part[3] == "route":
            experts[layer][seq, pos] = chosen
        else:
            positions[layer][seq, pos, chosen] = True
    for layer, array in experts.items():
        if np.any(array[real] < 0):
            raise ValueError(f"the dump lacks the experts of some row of layer {layer}")
        array[~real] = np.arange(top_k)
    for layer, array in positions.items():
        if not np.all(array[real].any(axis=1)):
            raise ValueError(f"the dump lacks the index positions of some row of layer {layer}")
        array[~real] = np.arange(n_pos) == 0  # any one position: a padded row is never looked at
    return Choices(experts, positions)
