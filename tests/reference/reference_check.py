#!/usr/bin/python3
"""reference_check: is the function that the engine computes the right one?

For each architecture, base and adapter: compares the engine's log-probs with a float64 reference that takes the engine's
discrete choices and checks each of them against its own scores. Then changes the reference on purpose (MUTANTS): each change
must be noticed, by the log-probs or by the choices, or this test could not fail.
Layer: tests. Exit 0: every check holds."""
import argparse
import os
import sys
import tempfile

import numpy as np

from ref_engine import Engine
from ref_files import Adapter, Checkpoint
from ref_model import Model

MEAN_MAX = 0.02
P99_MAX = 0.1
GREEDY_MARGIN = 0.25
CHOICE_TOLERANCE = 2.0**-6
MUTANT_FACTOR = 5.0

# What each mutant changes, and the presets that have the part it changes.
ALL = ("nano", "k3-nano", "kimi-linear-nano")
VALUE_MUTANTS = {
    "no_latent_norm": ("nano", "k3-nano"),    # the combined latent goes up unnormalised
    "no_mla_gate": ("nano", "k3-nano"),       # attention output without its sigmoid gate
    "one_write_less": ("nano", "k3-nano"),    # the last write to the residual bank is left out
    "other_decay": ALL,                       # softplus where the decay has a lower bound, the bound where it has none
    "norm_after_block": ALL,                  # the input norm follows the attention block
    "gate_before_norm": ALL,                  # KDA's output is gated, then normalised
    "no_qk_norm": ALL,                        # KDA's q and k keep their lengths
}
CHOICE_MUTANTS = {
    "no_router_bias": ALL,                    # experts by score alone
    "no_indexer": ("nano",),                  # the last k positions
    "no_index_bias": ("nano",),               # the index key's norm without its bias: the smallest change that has to show
}


class Report:
    def __init__(self):
        self.n_pass = 0
        self.n_fail = 0

    def check(self, holds, sentence):
        self.n_pass += bool(holds)
        self.n_fail += not holds
        print(f"{'ok  ' if holds else 'FAIL'} {sentence}", flush=True)


def choice_errors(scores, scale, chosen, visible, k):
    """scores, chosen, visible (n, m), scale (n). How far each row's choice lies on the wrong side of the row's own threshold (its
    k-th best score), in units of scale; 0 where the choices are equal, inf where it is not a choice of k. The scale is what a
    score could at most be. In FP8 one flipped code moves an index score by the lengths of its vectors, whatever cancels in the
    sum: over 15,552 rows of nano the farthest choice lay 0.017 of that off (2 rows over 2^-6). The row's largest score would be
    no scale: 5 % of rows lie over 2^-6 of it off, the farthest 0.11."""
    masked = np.where(visible, scores, -np.inf)
    n_choose = np.minimum(k, np.sum(visible, axis=1))
    threshold = np.take_along_axis(-np.sort(-masked, axis=1), n_choose[:, None] - 1, axis=1)
    too_low = np.max(np.where(chosen, threshold - masked, 0.0), axis=1)
    left_out = np.max(np.where(visible & ~chosen, masked - threshold, 0.0), axis=1)
    error = np.maximum(np.maximum(too_low, left_out), 0.0) / scale
    return np.where(np.sum(chosen, axis=1) == n_choose, error, np.inf)


def all_choice_errors(batch, scores, config):
    """kind -> errors of all rows of all layers"""
    errors = {}
    n_pos = batch.tokens.shape[1]
    for kind, layer, own, scale in scores:
        if kind == "route":
            chosen = np.zeros(own.shape, bool)
            np.put_along_axis(chosen, batch.choices.experts[layer], True, axis=-1)
            visible, k = np.ones(own.shape, bool), config["num_experts_per_token"]
        else:
            chosen, k = batch.choices.positions[layer], config["index_topk"]
            visible = np.broadcast_to(np.tril(np.ones((n_pos, n_pos), bool)), own.shape)
        rows = (array[batch.real] for array in (own, scale, chosen, visible))
        errors.setdefault(kind, []).append(choice_errors(*rows, k))
    return {kind: np.concatenate(parts) for kind, parts in errors.items()}


def run_reference(checkpoint, adapter, batch, mutant):
    """|delta log-prob| of every predicted token, the reference's log-softmax, its choice scores"""
    with np.errstate(all="ignore" if mutant else "warn"):  # a mutant may overflow: that is noticed as well
        logits, scores = Model(checkpoint, adapter, mutant).forward(batch.tokens, batch.choices)
    own = np.take_along_axis(logits, batch.targets[..., None], axis=-1)[..., 0]
    return np.abs(own - batch.logprob)[batch.real], logits, scores


def check_unchanged(report, what, checkpoint, batch, delta, logits, scores):
    mean, p99 = np.mean(delta), np.quantile(delta, 0.99)
    report.check(mean <= MEAN_MAX and p99 <= P99_MAX,
                 f"{what}: {delta.size} log-probs, mean |delta| {mean:.5f} (at most {MEAN_MAX}), p99 {p99:.5f} (at most {P99_MAX}), "
                 f"largest {np.max(delta):.5f}")
    top = np.partition(logits, -2, axis=-1)[..., -2:]
    clear = (batch.best >= 0) & (top[..., 1] - top[..., 0] > GREEDY_MARGIN)
    n_wrong = np.sum(np.argmax(logits, axis=-1)[clear] != batch.best[clear])
    report.check(n_wrong == 0 and np.sum(clear) >= 50,
                 f"{what}: {n_wrong} of {np.sum(clear)} best tokens with a margin over {GREEDY_MARGIN} differ")
    for kind, error in all_choice_errors(batch, scores, checkpoint.config).items():
        report.check(np.max(error) <= CHOICE_TOLERANCE,
                     f"{what}: {kind}: {np.sum(error > 0)} of {error.size} choices differ, the farthest by {np.max(error):.5f} of "
                     f"the scale (at most {CHOICE_TOLERANCE:.5f})")


def check_mutant(report, preset, mutant, checkpoint, adapter, batch, mean):
    delta, _, scores = run_reference(checkpoint, adapter, batch, mutant)
    if mutant in VALUE_MUTANTS:
        factor = np.mean(delta) / mean if np.all(np.isfinite(delta)) else np.inf
        report.check(factor >= MUTANT_FACTOR, f"{preset}: mutant {mutant}: {factor:.1f} times the mean |delta| (at least "
                                              f"{MUTANT_FACTOR})")
    else:
        kind = "route" if mutant == "no_router_bias" else "index"
        error = all_choice_errors(batch, scores, checkpoint.config)[kind]
        report.check(np.max(error) > CHOICE_TOLERANCE,
                     f"{preset}: mutant {mutant}: {np.sum(error > CHOICE_TOLERANCE)} of {error.size} choices over the tolerance, "
                     f"the farthest by {np.max(error):.5f} (must exceed {CHOICE_TOLERANCE:.5f})")


def check_preset(report, command, preset, mutants, folder):
    engine = Engine(command, preset, folder)
    checkpoint = Checkpoint(engine.model)
    for name in ("base", "tuned"):
        adapter = Adapter(engine.adapter, checkpoint.prefix) if name == "tuned" else None
        batch = engine.batch(name, checkpoint.config)
        delta, logits, scores = run_reference(checkpoint, adapter, batch, None)
        check_unchanged(report, f"{preset}, {name}", checkpoint, batch, delta, logits, scores)
    for mutant in mutants:  # on the adapter's sequences: the gate has to meet LoRA too
        if preset in {**VALUE_MUTANTS, **CHOICE_MUTANTS}[mutant]:
            check_mutant(report, preset, mutant, checkpoint, adapter, batch, np.mean(delta))


def main():
    every = [*VALUE_MUTANTS, *CHOICE_MUTANTS]
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--bitroll", required=True, help="the command to check")
    parser.add_argument("--preset", choices=ALL, action="append", help="only this one; may be given again [all]")
    parser.add_argument("--mutant", choices=[*every, "none"], action="append", help="only this change [all]")
    arguments = parser.parse_args()
    report = Report()
    mutants = [mutant for mutant in arguments.mutant or every if mutant != "none"]
    for preset in arguments.preset or ALL:
        with tempfile.TemporaryDirectory(prefix="bitroll-reference-") as folder:
            check_preset(report, os.path.abspath(arguments.bitroll), preset, mutants, folder)
    print(f"{report.n_pass} passed, {report.n_fail} failed")
    return 1 if report.n_fail or not report.n_pass else 0


if __name__ == "__main__":
    sys.exit(main())
