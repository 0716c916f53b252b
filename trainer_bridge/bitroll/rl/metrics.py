"""One CSV row a step. The columns up to ledger_link are the same in every run of the same settings; times and sizes behind it are not."""
import csv
import io
import os
import resource

import torch

from .. import program
from .objective import zero_spread

STATISTICS = ("max_abs_d", "rollout_probs_diff_max", "rollout_probs_diff_mean", "rollout_probs_diff_std", "ratio_min", "ratio_max", "clip_share")
REPEATABLE = ("step", "reward_mean", "reward_std", "mismatch_count", "n_compared", "k1", "k3", *STATISTICS, "entropy", "grad_norm",
              "zero_spread_share", "response_length_mean", "k1_base", "k3_base", "differ_from_base_share", "heldout_accuracy", "adapter_norm",
              "weight_version", "digest_rollout", "digest_trainer", "ledger_link")
MEASURED = ("sync_bytes", "sync_ms", "rollout_ms", "certify_ms", "update_ms", "step_ms", "rollout_tok_per_s", "trainer_tok_per_s",
            "memory_peak_mib")
COLUMNS = REPEATABLE + MEASURED
LAST = 10  # steps whose mean reward is the run's end


def memory_peak_mib(backend):
    """Of this process, or of the GPU's memory that torch holds."""
    if backend == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def row(step, link, norms, sync_bytes, backend):
    """{column: value} of a step that is done; None: not measured in this step."""
    n_sampled = sum(map(len, step.rollout))
    n_row, ms = sum(e.n_row for e in step.episodes), step.ms
    based = step.base is not None
    return dict(
        step.statistics, step=step.number, reward_mean=float(step.rewards.double().mean()),
        reward_std=float(step.rewards.double().std(unbiased=False)), mismatch_count=step.n_differ, n_compared=step.n_compared, k1=step.k1,
        k3=step.k3, entropy=step.entropy, grad_norm=step.grad_norm, zero_spread_share=zero_spread(step.rewards),
        response_length_mean=n_sampled / len(step.episodes), k1_base=step.k1_base if based else None, k3_base=step.k3_base if based else None,
        differ_from_base_share=step.differ_from_base if based else None, heldout_accuracy=step.heldout,
        adapter_norm=sum(v * v for v in norms.values()) ** 0.5, weight_version=step.number, digest_rollout=step.digest_rollout,
        digest_trainer=step.digest_trainer, ledger_link=link, sync_bytes=sync_bytes, sync_ms=ms["sync"], rollout_ms=ms["rollout"],
        certify_ms=ms["certify"], update_ms=ms["update"], step_ms=ms["step"], rollout_tok_per_s=1e3 * n_sampled / ms["rollout"],
        trainer_tok_per_s=2e3 * n_row / (ms["certify"] + ms["update"]), memory_peak_mib=memory_peak_mib(backend))


def text_of(value):
    if value is None:
        return ""
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def read(path):
    """Rows as dicts of text. A last line that was cut off, of a run that was killed while it wrote, is left out."""
    with open(path, encoding="ascii", errors="replace", newline="") as file:
        text = file.read()
    try:
        rows = list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))
    except csv.Error as error:
        raise ValueError(f"{path}: no table: {error}") from error
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise ValueError(f"{path}: line {number} has too {'many' if None in row else 'few'} fields: expected one a column")
    return rows


def ends(rewards):
    """(of the first step, mean of the last ones): what a run began and ended with."""
    return rewards[0], sum(rewards[-LAST:]) / len(rewards[-LAST:])


class Table:
    """The file of a run, a row at a time, on disk when append returns. n_step: rows of a run that goes on that stay."""

    def __init__(self, path, n_step=0):
        kept = read(path)[:n_step] if n_step else []
        if [r.get("step") for r in kept] != [str(i) for i in range(n_step)]:
            raise ValueError(f"{path}: expected rows of steps 0 to {n_step - 1}, found {len(kept)} rows")
        with program.written(path, encoding="ascii", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept)
        self.path = path
        self.file = open(path, "a", encoding="ascii", newline="")  # noqa: SIM115 closed by close()

    def append(self, row):
        with program.named(self.path):
            csv.DictWriter(self.file, COLUMNS, lineterminator="\n").writerow({c: text_of(row[c]) for c in COLUMNS})
            self.file.flush()
            os.fsync(self.file.fileno())

    def close(self):
        with program.named(self.path):
            self.file.close()
