"""What runs looked like, from the folders that they left: plots, one HTML page that needs no other file, TensorBoard events.

    python -m bitroll.rl.report DIR [DIR...] [--out DIR]

Of each folder: metrics.csv; run.yaml, for arm and seed; ledger.h5, which `bitroll verify` replays. Runs of equal settings but for the seed are
one curve, their mean with the range over seeds. With one folder, the report goes there. Nothing here computes a number of a run again but
sums, means and extremes."""
import base64
import html
import math
import os
import re
import subprocess
import sys

from .. import abi, libraries, program

try:
    import matplotlib
    import yaml
    from tensorboardX import SummaryWriter
    from tensorboardX.proto.summary_pb2 import Summary

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # the backend comes first

    from . import metrics  # with torch
    FAULT = None
except Exception as error:
    FAULT = libraries.fault(error, "matplotlib pyyaml tensorboardX torch")

# {column: verl's name}. Milliseconds become seconds under timing_s.
VERL = {
    "reward_mean": "critic/rewards/mean", "heldout_accuracy": "val-core/arithmetic/acc/mean@1", "response_length_mean": "response_length/mean",
    "entropy": "actor/entropy", "grad_norm": "actor/grad_norm", "clip_share": "actor/pg_clipfrac",
    "rollout_probs_diff_max": "training/rollout_probs_diff_max", "rollout_probs_diff_mean": "training/rollout_probs_diff_mean",
    "rollout_probs_diff_std": "training/rollout_probs_diff_std", "k1": "rollout_corr/kl", "k3": "rollout_corr/k3_kl",
    "rollout_ms": "timing_s/gen", "certify_ms": "timing_s/old_log_prob", "update_ms": "timing_s/update_actor", "sync_ms": "timing_s/update_weights",
    "step_ms": "timing_s/step", "rollout_tok_per_s": "perf/throughput_gen", "trainer_tok_per_s": "perf/throughput_update"}
TEXT_COLUMNS = ("digest_rollout", "digest_trainer", "ledger_link")
NEEDED = ("step", "reward_mean", "mismatch_count", "n_compared", "k3", "digest_rollout", "digest_trainer", "ledger_link", "sync_ms")
PARTS = {"rollout_ms": "rollout", "certify_ms": "certificate", "update_ms": "update", "sync_ms": "weight sync"}
ARMS = {"E": "exact", "M1": "merged adapter", "M2": "torch's own ops", "M3": "one step stale"}
COLOURS = ("#1f5fa8", "#c8501e", "#2b7f4f", "#7a4f9e", "#8c6d1f", "#5b6670")


def value_of(column, text):
    """A number, None for an empty field, or a digest as it is."""
    return text if column in TEXT_COLUMNS else float(text) if text else None


class Run:
    """One run's folder. rows: of metrics.csv, as numbers."""

    def __init__(self, folder):
        self.folder, path = os.path.normpath(folder), os.path.join(folder, "metrics.csv")
        rows = metrics.read(path)
        try:
            self.rows = [{c: value_of(c, text) for c, text in row.items()} for row in rows]
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if not self.rows:
            raise ValueError(f"{path}: no step was recorded")
        missing = [c for c in NEEDED if c not in self.rows[0]]
        if missing:
            raise ValueError(f"{path}: there is no column {missing[0]}")
        self.settings_text, self.settings = self.read_settings()
        self.arm, self.seed = self.settings.get("arm", "E"), self.settings.get("seed", "")
        self.curve = self.arm

    def read_settings(self):
        path = os.path.join(self.folder, "run.yaml")
        if not os.path.exists(path):
            return "", {}
        with open(path, encoding="utf-8") as file:
            text = file.read()
        try:
            found = yaml.safe_load(text) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None
        if not isinstance(found, dict):
            raise ValueError(f"{path}: expected a mapping, found {type(found).__name__}")
        return text, found

    def column(self, name):
        """[(step, value)] where there is one."""
        return [(int(r["step"]), r[name]) for r in self.rows if r.get(name) is not None]

    def total(self, name):
        return sum(v for _, v in self.column(name))

    def mean(self, name):
        values = self.column(name)
        return self.total(name) / len(values) if values else 0.0

    def reward(self):
        return metrics.ends([v for _, v in self.column("reward_mean")])

    def verified(self):
        """The last line of `bitroll verify` over the ledger."""
        ledger = os.path.join(self.folder, "ledger.h5")
        if not os.path.exists(ledger):
            return "no ledger in this folder"
        try:
            done = subprocess.run(abi.command("verify", ledger), capture_output=True, text=True)
        except OSError as error:
            return f"not verified: {error}"
        lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
        return lines[-1] if lines else f"verify ended with {done.returncode} and no word"


def name_curves(runs):
    """Runs whose settings differ in more than the seed are two curves: the arm names the first of them, its folder any other."""
    known = {}
    for run in runs:
        kind = repr(sorted((k, v) for k, v in run.settings.items() if k not in ("seed", "steps")))
        if kind not in known:
            folder = re.sub(r"_seed\d+$", "", os.path.basename(run.folder))
            known[kind] = run.arm if run.arm not in known.values() else folder
        run.curve = known[kind]


# ---- plots -------------------------------------------------------------------------------------------------------------------


def curves(runs, column):
    """{curve: (steps, means, least, greatest)} over the runs of the curve that have the step."""
    found = {}
    for run in runs:
        for step, value in run.column(column):
            found.setdefault(run.curve, {}).setdefault(step, []).append(value)
    return {curve: (sorted(by), *([f(by[s]) for s in sorted(by)] for f in (lambda v: sum(v) / len(v), min, max))) for curve, by in found.items()}


def draw(axes, runs, column):
    found = curves(runs, column)
    others = [curve for curve in dict.fromkeys(r.curve for r in runs) if curve not in ARMS]
    for curve, (steps, mean, least, greatest) in found.items():
        colour = COLOURS[[*ARMS, *others].index(curve) % len(COLOURS)]
        n = sum(r.curve == curve for r in runs)
        name = f"{curve} {ARMS.get(curve, '')}".strip() + (f", {n} seeds" if n > 1 else "")
        axes.plot(steps, mean, color=colour, linewidth=1.6, label=name, marker="o" if len(steps) < 30 else None, markersize=2.5)
        if n > 1:
            axes.fill_between(steps, least, greatest, color=colour, alpha=0.18, linewidth=0)
    return found


def zero_and_log(axes, found, smallest):
    """A logarithmic axis below which zero has a line of its own: from the power of ten under the smallest value that is not 0."""
    sizes = [abs(v) for curve in found.values() for v in curve[1] + curve[3] if v and math.isfinite(v)]
    floor = 10.0 ** math.floor(math.log10(min(sizes))) if sizes else smallest
    axes.set_yscale("symlog", linthresh=floor, linscale=0.5)
    axes.axhline(0.0, color="#303030", linewidth=0.9, linestyle=(0, (4, 3)), gid="zero")
    axes.set_ylim(-0.4 * floor, max([floor, *sizes]) * 3)


def plot(runs, column, title, unit, zero=None):
    """A figure; zero: the floor of a logarithmic axis whose values are all 0."""
    figure, axes = plt.subplots(figsize=(7.0, 3.4), layout="constrained")
    found = draw(axes, runs, column)
    if zero:
        zero_and_log(axes, found, zero)
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    axes.legend(frameon=False, fontsize=9)
    return figure


PLOTS = {
    "reward": dict(column="reward_mean", title="Reward, mean of the step's texts", unit="reward"),
    "k3": dict(column="k3", title="k3 of trainer against rollout", unit="k3", zero=1e-16),
    "mismatch": dict(column="mismatch_count", title="Log-probs whose bits differ", unit="log-probs", zero=1.0),
    "sync": dict(column="sync_ms", title="Weight sync: export, transfer, check, commit", unit="ms"),
}


def write_plots(runs, folder):
    """plots/NAME.png and .svg; {NAME: path of the svg}."""
    os.makedirs(folder, exist_ok=True)
    paths = {}
    with plt.rc_context({"svg.hashsalt": "bitroll", "font.size": 9}):
        for name, what in PLOTS.items():
            figure = plot(runs, **what)
            figure.savefig(os.path.join(folder, name + ".png"), dpi=150)
            paths[name] = os.path.join(folder, name + ".svg")
            figure.savefig(paths[name], metadata={"Date": None})
            plt.close(figure)
    return paths


# ---- the page ----------------------------------------------------------------------------------------------------------------

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1c1c1c}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse;font-size:.9rem;display:block;overflow-x:auto}
th,td{text-align:left;padding:.25rem .8rem .25rem 0;border-bottom:1px solid #ddd;vertical-align:top;white-space:nowrap}
td.n{text-align:right;font-variant-numeric:tabular-nums}img{width:100%;max-width:48rem;display:block;margin:.5rem 0}
code,pre{font:.85rem/1.45 ui-monospace,monospace}pre{background:#f6f6f6;padding:.8rem;overflow-x:auto}.bad{color:#a3260b;font-weight:600}"""


def table(head, rows):
    """Cells that are strings stand left, the others, already text in a tuple of one, right."""
    def cell(value):
        return f"<td class='n'>{html.escape(value[0])}</td>" if isinstance(value, tuple) else f"<td>{html.escape(value)}</td>"
    lines = ["<table><tr>" + "".join(f"<th>{html.escape(h)}</th>" for h in head) + "</tr>"]
    return "\n".join(lines + ["<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows] + ["</table>"])


def name_of(run):
    return f"{run.curve} seed {run.seed}" if run.settings else os.path.basename(run.folder)


def summary(runs):
    rows = []
    for run in runs:
        first, last = run.reward()
        held = [v for _, v in run.column("heldout_accuracy")]
        rows.append((name_of(run), (str(len(run.rows)),), (f"{first:.3f}",), (f"{last:.3f}",),
                     (f"{held[0]:.3f} to {held[-1]:.3f}" if held else "",), (f"{run.total('mismatch_count'):,.0f}",),
                     (f"{run.total('n_compared'):,.0f}",), (f"{max(v for _, v in run.column('k3')):.3e}",)))
    head = ("run", "steps", "reward, step 0", f"reward, last {metrics.LAST}", "held out, greedy", "log-probs that differ", "compared", "largest k3")
    return table(head, rows)


def digests(runs):
    rows = []
    for run in runs:
        last, differ = run.rows[-1], [int(r["step"]) for r in run.rows if r["digest_rollout"] != r["digest_trainer"]]
        rows.append((name_of(run), last["digest_rollout"], last["digest_trainer"],
                     "at every step" if not differ else f"not at step {differ[0]}" + (f" and {len(differ) - 1} more" if differ[1:] else "")))
    return table(("run", "adapter in the engine, last step", "adapter in the trainer", "equal"), rows)


def ledgers(runs):
    return table(("run", "ledger root", "bitroll verify"), [(name_of(run), run.rows[-1]["ledger_link"], run.verified()) for run in runs])


def times(runs):
    """Milliseconds of a step, mean over a run, and each part's share."""
    rows = []
    for run in runs:
        step, parts = run.mean("step_ms"), [run.mean(c) for c in PARTS]
        spent = [*parts, max(0.0, step - sum(parts))]
        rows.append((name_of(run), (f"{step:,.1f}",), *((f"{v:,.1f} ({v / step:.0%})" if step else f"{v:,.1f}",) for v in spent)))
    return table(("run", "step, ms", *PARTS.values(), "the rest"), rows)


def page(runs, plots):
    def image(name):
        with open(plots[name], "rb") as file:
            data = base64.b64encode(file.read()).decode()
        return f"<img alt='{html.escape(PLOTS[name]['title'])}' src='data:image/svg+xml;base64,{data}'>"
    exact = [r for r in runs if r.arm == "E"]
    differ, compared = (int(sum(r.total(c) for r in exact)) for c in ("mismatch_count", "n_compared"))
    headline = f"<p class='{'bad' if differ else ''}'>{differ:,} of {compared:,} log-probs differ in the exact arm.</p>" if exact else ""
    settings = [f"<h2>Settings of {html.escape(name_of(r))}</h2><pre>{html.escape(r.settings_text)}</pre>" for r in runs if r.settings_text]
    return "\n".join([
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width'>",
        f"<title>bitroll: {html.escape(', '.join(map(name_of, runs)))}</title><style>{STYLE}</style></head><body><h1>LoRA RL with bitroll</h1>",
        headline, summary(runs), *map(image, plots), "<h2>Adapters</h2>", digests(runs), "<h2>Ledgers</h2>", ledgers(runs),
        "<h2>Where the time goes</h2>", times(runs), *settings, "</body></html>", ""])


# ---- events ------------------------------------------------------------------------------------------------------------------


def write_events(run, folder):
    """TensorBoard's, under verl's names where verl has one, else under bitroll/."""
    with SummaryWriter(folder) as writer:
        for row in run.rows:
            for column, value in row.items():
                if column == "step" or column in TEXT_COLUMNS or value is None:
                    continue
                name = VERL.get(column, "bitroll/" + column)
                value = value / 1000 if name.startswith("timing_s/") else value
                one = Summary(value=[Summary.Value(tag=name, simple_value=value)])  # add_scalar would write "mean@1" as "mean_1"
                writer.file_writer.add_summary(one, int(row["step"]))


def report(folders, out):
    """Writes everything; the path of the page."""
    runs = [Run(folder) for folder in folders]
    name_curves(runs)
    plots = write_plots(runs, os.path.join(out, "plots"))
    for i, run in enumerate(runs):
        events = os.path.join(out, "tensorboard")
        write_events(run, events if len(runs) == 1 else os.path.join(events, f"{i}-{os.path.basename(run.folder)}"))
    path = os.path.join(out, "report.html")
    with program.written(path, encoding="utf-8") as file:
        file.write(page(runs, plots))
    return path


def arguments(argv):
    parser = program.Parser(prog="python -m bitroll.rl.report", description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="+")
    parser.add_argument("--out", help="needed with more than one folder")
    options = parser.parse_args(argv)
    if not options.out and len(options.folder) > 1:
        parser.error("--out DIR is needed with more than one folder")
    return options


def run(options):
    if FAULT:
        raise ValueError(FAULT)
    program.say(report(options.folder, options.out or options.folder[0]))


def main(argv=None):
    return program.status_of("report", lambda: run(arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
