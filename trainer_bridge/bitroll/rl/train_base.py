"""Makes the base of the arithmetic runs: a random checkpoint that learns the sums from examples whose labels are noisy.

    python -m bitroll.rl.train_base --out DIR [--preset nano] [--seed 1] [--noise 0.75] [--steps 400] [--backend oracle|cuda]

A share of the examples, the noise, has one of its two low digits replaced by a random digit, as a target only. What such a base samples is
right at a rate that the noise sets, not the moment at which training ended, and reinforcement has something to find. A first part of the
steps, `--clean`, teaches right answers: the sums are learned much sooner from them, the noise soon after. Only the maps outside
the routed experts train, through adapters of this trainer, which are merged in the end; the experts stay MXFP4, embedding and head random.
DIR holds log.csv and, as of the last measurement, recipe.json and overlay.safetensors, of which base_model makes the folder DIR/model."""
import csv
import json
import math
import os
import shutil
import sys
import time

import torch

from .. import abi, lora, peft, program, refusals
from ..in_process import Engine, Sample
from ..model import Model
from ..ops import Ops
from ..rows import Rows
from ..tensors import Checkpoint, write_safetensors
from . import base_model, failures, resume
from .task import DIGIT_0, END, HELD_OUT, SEPARATOR, Arithmetic, answer, draw, pairs, question

LONGEST = 128  # rows of one text
COLUMNS = ("step", "loss", "greedy", "sampled", "seconds")


def noisy(digits, noise, *counter):
    """The answer as it is taught."""
    taught = list(digits)
    if draw(1 << 32, *counter, "noise") < noise * (1 << 32):
        taught[draw(2, *counter, "which")] = DIGIT_0 + draw(10, *counter, "digit")
    return taught


def text(n_example, noise, *counter):
    """(inputs, targets, which targets count): n_example worked examples with right answers, as prompts have them. Every answer is taught,
    ended by END, in the place of what follows it in the text."""
    known, ids, targets, counted = pairs()[0], [], [], []
    for i in range(n_example):
        a, b = known[draw(len(known), *counter, i)]
        ask, right = question(a, b), answer(a, b)
        ids += ask + right + [SEPARATOR]
        targets += ask[1:] + noisy(right, noise, *counter, i) + [END, END]  # the separator's own row counts for nothing
        counted += [False] * (len(ask) - 1) + [True] * (len(right) + 1) + [False]
    return ids[:-1], targets[:-1], counted[:-1]


def batch(n_row, noise, device, *counter):
    """Texts of 9 and of 4 examples in turn, as many as n_row rows hold: (first rows, inputs, targets, counted)."""
    cu, parts = [0], ([], [], [])
    while True:
        one = text(4 if len(cu) % 2 else 9, noise, *counter, len(cu))
        if cu[-1] + len(one[0]) > n_row:
            break
        cu.append(cu[-1] + len(one[0]))
        for part, more in zip(parts, one):
            part.extend(more)
    inputs, targets = (torch.tensor(p, dtype=torch.int32, device=device) for p in parts[:2])
    return cu, inputs, targets, torch.tensor(parts[2], device=device)


def masters(model, prefix):
    """(checkpoint module, A, B), in float64, of every map that trained."""
    for module, low, expert in peft.adapters(model, prefix):
        if expert is None:
            yield module, low.a().detach().double(), low.b().detach().double()


class Trainer:
    """One model under training."""

    def __init__(self, options, library, folder):
        self.options, self.config, self.checkpoint = options, library.config(folder), Checkpoint(folder)
        torch.manual_seed(options.seed)
        self.ops = Ops(self.config, options.rows, LONGEST, rank_max=options.rank, n_slot=1, backend=options.backend, library=library)
        self.settings = lora.Settings(self.ops, options.rank, 2.0 * options.rank)
        self.model = Model(self.settings, self.config, self.checkpoint)
        for name, p in self.model.named_parameters():
            if ".experts." in name:
                p.requires_grad_(False)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
        lora.publish(self.model)

    def step(self, number):
        o = self.options
        warm, through = min(1.0, (number + 1) / 20), number / o.steps
        self.optimizer.param_groups[0]["lr"] = o.lr * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * through)))
        noise = o.noise if number >= o.clean * o.steps else 0.0
        cu, inputs, targets, counted = batch(o.rows, noise, self.ops.device, o.seed, "base", number)
        rows = Rows(self.ops, cu)
        logprob = self.model.log_probs(rows, inputs, targets, torch.ones(len(inputs), device=self.ops.device))[0]
        rows.check_faults()
        loss = -logprob[counted].mean()
        self.optimizer.zero_grad()
        loss.backward()
        lora.clip_gradients(self.trained, 1.0, number)
        self.optimizer.step()
        lora.publish(self.model)
        return float(loss.detach())


def accuracy(library, folder, backend, seed, n):
    """(greedy on held-out sums, sampled at temperature 1 on prompts as runs ask them): shares of right answers."""
    task, shares = Arithmetic(seed), []
    engine = Engine(library, folder, {}, backend=backend)
    for prompts, temperature in ((task.held_out(n), 0.0), (task.prompts(0, n), 1.0)):
        texts = [Sample(f"prompt {i}", 0, prompt) for i, prompt in enumerate(prompts)]
        engine.generate(texts, "base", seed, temperature=temperature, max_new=6)
        shares.append(sum(task.reward(t.prompt, t.tokens) for t in texts) / n)
    engine.close()
    return shares


class Run:
    """The folder that a training leaves."""

    def __init__(self, options, library):
        self.options, self.library, self.out = options, library, options.out
        self.start, missing = os.path.join(self.out, "random"), resume.missing(self.out)
        os.makedirs(self.out, exist_ok=True)
        try:
            base_model.init(options.preset, options.seed, self.start)
        except BaseException:
            resume.remove_empty(missing)
            raise
        with failures.told("the start"):
            self.trainer = Trainer(options, library, self.start)

    def keep(self, step):
        """The base as it is after so many steps, merged, digested, built again from what is kept."""
        o, part = self.options, os.path.join(self.out, "model.part")
        t = self.trainer
        tensors = peft.merged(t.checkpoint, masters(t.model, t.checkpoint.prefix), t.settings.s)
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(self.start, part)
        base_model.overlay(part, tensors)
        recipe = dict(preset=o.preset, seed=o.seed, weights_digest=base_model.bitroll("digest", part)["weights_digest"],
                      training=dict(noise=o.noise, clean=o.clean, steps=o.steps, step=step, rows=o.rows, rank=o.rank, lr=o.lr, backend=o.backend))
        write_safetensors(os.path.join(self.out, "overlay.safetensors"), sorted(tensors.items()))
        with program.written(os.path.join(self.out, "recipe.json"), encoding="utf-8") as file:
            json.dump(recipe, file, indent=2)
            file.write("\n")
        model = os.path.join(self.out, "model")
        shutil.rmtree(model, ignore_errors=True)
        os.rename(part, model)
        return model

    def train(self):
        o, started = self.options, time.monotonic()
        path = os.path.join(self.out, "log.csv")
        with program.named(path), open(path, "w", encoding="ascii", newline="") as file:
            log = csv.writer(file)
            log.writerow(COLUMNS)
            losses = []
            for step in range(1, o.steps + 1):
                with failures.told(f"step {step}"):
                    losses.append(self.trainer.step(step - 1))
                if step % o.every and step != o.steps:
                    continue
                with failures.told(f"step {step}, measurement"):
                    greedy, sampled = accuracy(self.library, self.keep(step), o.backend, o.seed, o.prompts)
                row = step, sum(losses) / len(losses), greedy, sampled, time.monotonic() - started
                log.writerow([row[0], *(f"{v:.4f}" for v in row[1:])])
                file.flush()
                program.say("step {}: loss {:.4f}, greedy {:.3f}, sampled {:.3f}, {:.0f} s".format(*row))
                losses.clear()


def arguments(argv):
    parser = program.Parser(prog="python -m bitroll.rl.train_base", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", required=True)
    add("--preset", default="nano")
    add("--seed", type=program.whole(0, (1 << 63) - 1), default=1, help="of the random checkpoint and of everything drawn")
    add("--noise", type=program.number(0, 1), default=0.75, help="share of examples that are taught with one wrong low digit")
    add("--clean", type=program.number(0, 1), default=0.5, help="share of the steps, the first ones, without noise")
    add("--steps", type=program.whole(1), default=400)
    add("--rows", type=program.whole(LONGEST), default=2048, help="rows of a step")
    add("--rank", type=program.whole(1), default=32)
    add("--lr", type=program.number(0, 1), default=2e-3)
    add("--backend", choices=("oracle", "cuda"), default="oracle")
    add("--every", type=program.whole(1), default=100, help="steps between two measurements, each of which keeps the base")
    add("--prompts", type=program.whole(1), default=HELD_OUT, help="prompts of a measurement, greedy and sampled each")
    return parser.parse_args(argv)


def run(options):
    refusals.machine(options.backend)
    try:
        Run(options, abi.Library()).train()
    except failures.DeviceFailed as error:
        return program.failed("train_base", error.sentence(f"memory goes by --rows ({options.rows}) and --rank ({options.rank})"))
    return 0


def main(argv=None):
    return program.status_of("train_base", lambda: run(arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
