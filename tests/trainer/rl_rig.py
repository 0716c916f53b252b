"""What the tests of training runs share: pico, a run's parts in this process, and runs as processes of their own."""
import os
import subprocess
import sys

import rig
import yaml
from bitroll.in_process import Engine
from bitroll.rl import arms, task
from bitroll.rl import settings as run_settings
from bitroll.rl.expand import expand
from bitroll.rl.grpo import Grpo
from bitroll.rl.policy import Policy
from bitroll.tensors import Checkpoint

WORKER = os.path.join(os.path.dirname(os.path.abspath(rig.BITROLL)), "bitroll-worker")
PLAIN = dict(task="lower_half", steps=3, batch=dict(prompts=8, samples=4, prompt_tokens=[3, 60]), sampling=dict(max_new=8),
             heldout=dict(every=2, prompts=4))


def values(**changes):
    """The settings of a small run, some of them changed: section by section."""
    made = {**PLAIN}
    for key, value in changes.items():
        made[key] = {**made.get(key, {}), **value} if isinstance(value, dict) else value
    return made


def expanded():
    """pico with its experts in bf16."""
    folder = rig.checkpoint("pico")[0]
    if not os.path.exists(folder + "-bf16"):
        expand(folder, folder + "-bf16")
    return folder + "-bf16"


class Parts:
    """A run without files: what one step is made of."""

    def __init__(self, **changes):
        self.settings = run_settings.Settings(values(**changes))
        self.folder = rig.checkpoint("pico")[0]
        arm = arms.ARMS[self.settings.arm]
        rollout = expanded() if self.settings.arm == "M1" else self.folder
        self.policy = Policy(rig.LIBRARY, self.folder, self.settings, arm.functions())
        self.engine = Engine(rig.LIBRARY, rollout, {"policy": None}, swap_rank=rig.RANK, swap_alpha=rig.ALPHA, max_seqs=16)
        self.arm = arm(self.engine, self.policy, Checkpoint(rollout))
        n_vocab = self.policy.model.model_config.n_vocab
        self.grpo = Grpo(self.engine, self.policy, self.arm, task.LowerHalf(self.settings.seed, n_vocab, self.settings.batch.prompt_tokens),
                         self.settings)

    def run(self, n, first=0):
        steps = []
        for number in range(first, first + n):
            steps.append(self.grpo.step(number))
            self.grpo.update(steps[-1])
        return steps

    def close(self):
        self.engine.close()
        self.policy.close()


# ---- processes ----------------------------------------------------------------------------------------------------------------


def config(name, **changes):
    path = os.path.join(rig.PLACE, name + ".yaml")
    with open(path, "w", encoding="ascii") as file:
        yaml.safe_dump(values(**changes), file)
    return path


def command(config_path, out, *arguments):
    """Of a trainer, on pico."""
    return [sys.executable, "-m", "bitroll.rl.train", "--config", config_path, "--model", rig.checkpoint("pico")[0], "--out", out,
            *arguments]


def killed(place, step, config_path, out, *arguments):
    """`train`, of a trainer that dying_run kills there."""
    whole = command(config_path, out, *arguments)
    at = whole.index("-m")
    dying = [*whole[:at], os.path.join(os.path.dirname(os.path.abspath(__file__)), "dying_run.py"), place, str(step), *whole[at + 2 :]]
    done = subprocess.run(dying, capture_output=True, text=True, env=rig.environment(), timeout=600)
    return done.returncode, done.stdout, done.stderr


def train(*arguments):
    """(exit status, stdout, stderr) of a trainer that ran to its end."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, env=rig.environment(), timeout=600)
    return done.returncode, done.stdout, done.stderr


def started(*arguments):
    """A trainer that runs on."""
    return subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=rig.environment())


def worker_command(*arguments):
    return [WORKER, "--model", rig.checkpoint("pico")[0], "--adapter", "policy=", "--swap-rank", str(rig.RANK), "--swap-alpha", str(rig.ALPHA),
            "--backend", "oracle", "--requests", "256", *arguments]


class Worker:
    """bitroll-worker at a UNIX socket, for trainer after trainer."""

    def __init__(self, name):
        self.address = f"unix:{os.path.join(rig.PLACE, name)}"
        self.process = subprocess.Popen(worker_command("--socket", self.address[5:]), stdout=subprocess.PIPE, text=True)
        for line in self.process.stdout:
            if "serves at" in line:
                return
        raise RuntimeError(f"bitroll-worker ended with {self.process.wait()}")

    def close(self):
        self.process.kill()
        self.process.communicate()
