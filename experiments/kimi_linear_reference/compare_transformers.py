#!/usr/bin/env python3
"""compare_transformers: one checkpoint, three programs: bitroll, transformers' own kimi_linear, the float64 reference.

Run by hand (README.md). Layer: experiments; takes the file readers and the model of tests/reference."""
import argparse
import os
import sys
import tempfile

import numpy as np
import torch
import transformers

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "reference"))
from ref_engine import Choices, Engine  # noqa: E402
from ref_files import Checkpoint  # noqa: E402
from ref_model import Model  # noqa: E402


def settle_choices(model, batch):
    """The reference's own experts: a layer's scores depend on the choices of the layers before it, so that as many passes
    settle all. Without this, near-ties that the engine's rounding decided hide an agreement to 1e-6."""
    experts = {layer: ids.copy() for layer, ids in batch.choices.experts.items()}
    while True:
        logits, scores = model.forward(batch.tokens, Choices(experts, {}))
        own = {layer: np.argsort(-values, axis=-1)[..., :experts[layer].shape[-1]] for _, layer, values, _ in scores}
        if all(np.array_equal(own[layer], experts[layer]) for layer in own):
            return logits
        experts = own


def log_probs_of_transformers(folder, batch, dtype):
    """(S, L) log-probs of the targets, and the loading report"""
    model, loading = transformers.KimiLinearForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager", output_loading_info=True)
    model.eval()
    out = np.zeros(batch.tokens.shape)
    with torch.no_grad():
        for i, n in enumerate(batch.real.sum(axis=1)):
            logits = model(input_ids=torch.tensor(batch.tokens[i:i + 1, :n]), use_cache=False).logits[0].double()
            target = torch.tensor(batch.targets[i, :n, None])
            out[i, :n] = torch.log_softmax(logits, dim=-1).gather(1, target)[:, 0].numpy()
    return out, loading


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--bitroll", required=True, help="the command to check")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, numpy {np.__version__}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bitroll-transformers-") as folder:
        engine = Engine(os.path.abspath(arguments.bitroll), "kimi-linear-nano", folder)
        checkpoint = Checkpoint(engine.model)
        batch = engine.batch("base", checkpoint.config)
        results = {"bitroll": batch.logprob}
        model = Model(checkpoint)
        for name, logits in (("float64, bitroll's experts", model.forward(batch.tokens, batch.choices)[0]),
                             ("float64, its own experts", settle_choices(model, batch))):
            results[name] = np.take_along_axis(logits, batch.targets[..., None], axis=-1)[..., 0]
        for name, dtype in (("transformers f64", torch.float64), ("transformers f32", torch.float32),
                            ("transformers bf16", torch.bfloat16)):
            results[name], loading = log_probs_of_transformers(engine.model, batch, dtype)
            print(f"{name}: {({key: len(value) for key, value in loading.items()})}")
    names = list(results)
    print(f"\n{np.sum(batch.real)} log-probs of {len(batch.real)} sequences\n\n| a | b | mean | p99 | largest |\n|---|---|---|---|---|")
    for i, a in enumerate(names):
        for b in names[i + 1:]:
            delta = np.abs(results[a] - results[b])[batch.real]
            print(f"| {a} | {b} | {np.mean(delta):.2e} | {np.quantile(delta, 0.99):.2e} | {np.max(delta):.2e} |")


if __name__ == "__main__":
    main()
