"""A training run: `python -m bitroll.rl.train --config F.yaml --model CHECKPOINT --out DIR`. A line a step; the last line says what the
ledger says. Leaves in DIR the settings (run.yaml), metrics.csv, ledger.h5, checkpoint/, adapter/ (the policy after the last update) and
adapter_last_step/ (the one that the trainer's last step of the ledger ran on: what `bitroll verify --adapter` wants; of arm M3, from step 2 on,
it wants adapter_last_rollout/, which lies beside it). A start that fails before it has recorded a step leaves DIR as it found it.

Exit status: 0 done; 1 a step of the exact arm did not certify, a gradient was not finite, or a bar was missed; 2 usage or environment, a
worker that is gone and memory that does not suffice among them; 7 the worker serves another trainer; 130 stopped by SIGINT, as Ctrl-C sends it."""
import contextlib
import os
import sys

from .. import abi, mcore, peft, program, refusals
from ..bridge import Busy, Remote
from ..in_process import Engine
from ..ledger import Ledger
from ..tensors import Checkpoint
from . import arms, bars, failures, lock, metrics, resume, settings as run_settings
from .grpo import Grpo, Mismatch
from .policy import Policy
from .task import Arithmetic, LowerHalf


def arguments(argv):
    p = program.Parser(prog="python -m bitroll.rl.train", description="GRPO on adapters, with a certificate of every log-prob")
    p.add_argument("--config", required=True, help="settings of the run, YAML")
    p.add_argument("--model", required=True, help="checkpoint folder of the base")
    p.add_argument("--rollout-model", help="the rollout's checkpoint folder, where it is another one [--model]")
    p.add_argument("--out", required=True, help="folder of the run")
    p.add_argument("--arm", choices=sorted(arms.ARMS))
    p.add_argument("--seed", type=int)
    p.add_argument("--steps", type=int)
    p.add_argument("--backend", choices=("oracle", "cuda"))
    p.add_argument("--resume", action="store_true", help="go on after the last checkpoint of --out")
    p.add_argument("--rollout", metavar="ADDRESS", help="of a bitroll-worker, unix:PATH or mpi:RANK [an engine in this process]")
    p.add_argument("--wait", type=program.number(0, 1e6), default=60.0, metavar="SECONDS", help="for a bitroll-worker to listen at unix:PATH [60]")
    return p.parse_args(argv)


def requests_of(settings):
    """What a worker must hold at once: each turn of a step waits there for its certificate, and beside them turns are scored under the base."""
    batch = settings.batch
    return batch.prompts * batch.samples * batch.turns + arms.ARMS[settings.arm].has_adapter


def open_rollout(args, settings, policy):
    """The rollout engine: a worker's, or one in this process."""
    model = args.rollout_model or args.model
    if args.rollout:
        return Remote(policy.library, model, args.rollout, policy.lora, connect_ms=1000 * args.wait, requests=requests_of(settings))
    return Engine(policy.library, model, {"policy": None}, swap_rank=settings.lora["r"], swap_alpha=settings.lora["lora_alpha"],
                  backend=settings.backend, max_seqs=settings.engine.max_seqs, chunk_tokens=settings.engine.chunk_tokens, n_thread=settings.threads)


def task_of(settings, policy):
    if settings.task == "arithmetic":
        return Arithmetic(settings.seed)
    return LowerHalf(settings.seed, policy.model.model_config.n_vocab, settings.batch.prompt_tokens)


class Run:
    """A run's folder and its parts."""

    def __init__(self, args, settings):
        self.settings, self.out, self.at = settings, args.out, "the start"
        library, arm = abi.Library(), arms.ARMS[settings.arm]
        with contextlib.ExitStack() as opened:  # of a run that does not come to stand, too, a worker is told that it ends
            opened.callback(resume.remove_empty, resume.missing(self.out))
            os.makedirs(self.out, exist_ok=True)
            had_lock = os.path.exists(self.path(lock.FILE))
            opened.callback(os.close, lock.hold(self.out))
            opened.callback(resume.forget, self.out, [name for name in os.listdir(self.out) if had_lock or name != lock.FILE], library)
            self.check_folder(library, args.resume)
            rollout_base = Checkpoint(args.rollout_model or args.model)
            arm.check(rollout_base)
            self.policy = opened.enter_context(contextlib.closing(Policy(library, args.model, settings, arm.functions())))
            self.engine = opened.enter_context(contextlib.closing(open_rollout(args, settings, self.policy)))
            opened.push(self.leave_worker)
            self.arm = arm(self.engine, self.policy, rollout_base)
            self.n_step = self.begin_from_checkpoint()
            if settings.steps < self.n_step:
                raise ValueError(f"{self.out}: {self.n_step} steps are done: expected as many or more, not {settings.steps}")
            self.grpo = Grpo(self.engine, self.policy, self.arm, task_of(settings, self.policy), settings, args.resume)
            self.ledger = opened.enter_context(self.open_ledger(library))
            self.table = opened.enter_context(contextlib.closing(metrics.Table(self.path(resume.TABLE), self.n_step)))
            with program.written(self.path(resume.ECHO), encoding="utf-8") as file:
                file.write(settings.echo)
            self.opened = opened.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return self.opened.__exit__(*error)

    def leave_worker(self, kind, *_):
        """Of a run that was stopped to go on later, one at a socket is not told that it ends: it serves the next trainer."""
        if kind is KeyboardInterrupt and isinstance(self.engine, Remote):
            self.engine.close(is_done=False)

    def check_folder(self, library, resumes):
        """What a run has proved is not written over by another, nor by itself without need."""
        resume.recover(self.path(resume.CHECKPOINT))
        for path in (self.path(resume.LEDGER), self.path(resume.CHECKPOINT)):
            if os.path.exists(path) and not resumes:
                raise ValueError(f"{path}: there already: expected --resume, or a folder that holds no run")
        others = run_settings.differing(self.path(resume.ECHO), self.settings) if os.path.exists(self.path(resume.LEDGER)) else []
        if others:
            raise ValueError(f"{self.out}: --resume goes on with the settings that the run began with: {'; '.join(others)}: give those, or begin "
                             "again in another folder")
        resume.check(self.out, library, self.settings.checkpoint_every)

    def begin_from_checkpoint(self):
        """Steps that are done. The start is one too: a ledger without a checkpoint then says that one was lost."""
        saved = resume.load(self.path(resume.CHECKPOINT), self.policy)
        if saved is None:
            saved = 0, self.arm.state()
            resume.save(self.path(resume.CHECKPOINT), self.policy, *saved)
        n_step, kept = saved
        self.arm.restore(kept)
        return n_step

    def open_ledger(self, library):
        """Where none was written before the run was killed, it begins as any."""
        run = dict(contract=self.engine.contract_digest(), base_rollout=self.engine.weights_digest(), base_trainer=self.policy.base_digest,
                   config_text=self.settings.text)
        path = self.path(resume.LEDGER)
        return Ledger.resume(library, path, run, self.n_step) if self.n_step or os.path.exists(path) else Ledger.create(library, path, run)

    def path(self, name):
        return os.path.join(self.out, name)

    def step(self, number):
        """One step, on disk when it returns: record and row first, so that a checkpoint never stands without them."""
        step, is_last = self.grpo.step(number), number + 1 == self.settings.steps
        link = self.record(step)
        stops = self.arm.stops and not step.is_exact
        norms = self.policy.norms()  # before the update: of the adapter that the row is about
        if is_last or stops:
            peft.save(self.policy.model, self.policy.lora, self.path("adapter_last_step"), self.policy.prefix)
            other = self.arm.other_adapter()
            if other:
                peft.write(other, self.policy.lora, self.path("adapter_last_rollout"))
        if stops:
            raise Mismatch(step)
        self.grpo.update(step)
        step.ms["step"] = sum(step.ms.values())
        self.table.append(metrics.row(step, link, norms, self.grpo.sync_bytes, self.settings.backend))
        if is_last or (number + 1) % self.settings.checkpoint_every == 0:
            resume.save(self.path(resume.CHECKPOINT), self.policy, number + 1, self.arm.state())
        program.say(line_of(step))

    def record(self, step):
        """The step in the ledger, which counts for itself; its link. Of a batch in several mini-batches it holds the first."""
        n = len(step.update)
        made = self.ledger.append(
            step=step.number, version=step.number, adapter_rollout=step.digest_rollout, adapter_trainer=step.digest_trainer,
            texts=step.episodes[:n], rewards=step.rewards.view(-1).tolist()[:n], advantages=step.advantages[:n], rollout=step.rollout[:n],
            again=step.again[:n], update=step.update, temperature=self.settings.sampling.temperature)
        if self.settings.objective.mini_batches == 1 and (made.n_compared, made.n_differ) != (step.n_compared, step.n_differ):
            raise RuntimeError(f"step {step.number}: the ledger counts {made.n_differ} of {made.n_compared} log-probs that differ, the trainer "
                               f"{step.n_differ} of {step.n_compared}")
        return made.link

    def steps(self):
        for number in range(self.n_step, self.settings.steps):
            self.at = f"step {number}"
            with failures.told(self.at):
                self.step(number)
        self.at = "the end"
        with failures.told("behind the last step"):
            self.policy.publish()
            peft.save(self.policy.model, self.policy.lora, self.path("adapter"), self.policy.prefix)

    def bars(self):
        """Prints what the run must show; whether it does."""
        with failures.told("the bars"):
            moved = bars.moved(self.policy.model)
        found = bars.lines(metrics.read(self.path(resume.TABLE)), *moved, self.settings.sampling)
        for bar in found:
            program.say(bars.line(*bar))
        return bars.met(found)


def line_of(step):
    ms, flag = step.ms, "" if step.is_exact else "  FLAGGED"
    later = "".join(f", mini-batch {i} ratio {m['ratio_min']:.4f} to {m['ratio_max']:.4f} (not certified)" for i, m in enumerate(step.later, 1))
    heldout = "" if step.heldout is None else f", held-out (greedy) {step.heldout:.3f}"
    return (f"step {step.number}: reward {float(step.rewards.mean()):.3f}{heldout}, KL {step.k3:.3e}, {step.n_differ} of {step.n_compared} log-probs "
            f"differ, adapter {step.digest_rollout[:8]} rollout {step.digest_trainer[:8]} trainer{later}; "
            + ", ".join(f"{part} {ms[part]:.0f}" for part in ms) + f" ms{flag}")


def last_line(rows):
    """Of metrics.csv: what is compared, by how much it differs, the reward of step 0 and the mean of the last steps."""
    n_differ, n_compared = (sum(int(r[c]) for r in rows) for c in ("mismatch_count", "n_compared"))
    k3 = max(float(r["k3"]) for r in rows)
    first, last = metrics.ends([float(r["reward_mean"]) for r in rows])
    kl = "KL 0 at every step" if all(float(r["k1"]) == 0 == float(r["k3"]) for r in rows) else f"KL up to {k3:.3e}"
    return f"ledger: {len(rows)} steps, {n_differ} of {n_compared} log-probs differ, {kl}, reward {first:.3f} -> {last:.3f}"


def needs_memory(args, settings):
    """The settings that a run's memory goes by, with their values."""
    found = [f"micro_tokens ({settings.micro_tokens})", f"batch.max_tok ({settings.batch.max_tok})", f"lora.r ({settings.lora['r']})"]
    if not args.rollout:  # the engine's share is in the same memory
        found += [f"engine.max_seqs ({settings.engine.max_seqs})", f"engine.chunk_tokens ({settings.engine.chunk_tokens})"]
    return "memory goes by " + ", ".join(found[:-1]) + " and " + found[-1]


def goes_on(args):
    """What to do with a run that could not come to its end, through no fault of its own."""
    if resume.stands(args.out):
        return "the same command with --resume goes on from the last checkpoint"
    return "no step was done, the same command begins again"


def train(args):
    """The exit status of a run that came to its end, or whose failure has one of its own."""
    settings = run_settings.load(args.config, arm=args.arm, seed=args.seed, steps=args.steps, backend=args.backend)
    refusals.machine(settings.backend)
    run = None
    try:
        with failures.told("the start"):
            run = Run(args, settings)
        with run:
            run.steps()
            met = run.bars()
    except Mismatch as found:
        return program.failed("train", found, 1)
    except Busy as error:
        return program.failed("train", error, 7)
    except KeyboardInterrupt:
        return program.failed("train", f"stopped at {run.at if run else 'the start'}: {goes_on(args)}", program.INTERRUPTED)
    except failures.WorkerLost as error:
        return program.failed("train", f"{error}: start bitroll-worker again; {goes_on(args)}")
    except failures.DeviceFailed as error:
        return program.failed("train", error.sentence(needs_memory(args, settings)))
    program.say(last_line(metrics.read(run.path(resume.TABLE))))
    return 0 if met else 1


def main(argv=None):
    return program.status_of("train", lambda: train(arguments(argv)))


if __name__ == "__main__":
    status = main()
    mcore.shut_down(status)
    sys.exit(status)
