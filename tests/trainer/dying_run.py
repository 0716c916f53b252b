"""A training run that dies: `dying_run.py PLACE STEP ARGUMENT..`, the arguments those of bitroll.rl.train. The process kills itself, as a
failing machine would end it, when that step has come to that place."""
import os
import signal
import sys

import torch
from bitroll import bridge, mcore
from bitroll.rl import grpo, resume, train

PLACE, STEP = sys.argv[1], int(sys.argv[2])
begun = []  # numbers of the steps


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def replace(owner, name, made):
    """What `made` makes of the function that is there: it is called from STEP on."""
    plain = getattr(owner, name)
    changed = made(plain)
    setattr(owner, name, lambda *given, **named: (changed if STEP in begun else plain)(*given, **named))


def after(owner, name, at=lambda *given: True):
    def made(plain):
        def changed(*given, **named):
            result = plain(*given, **named)
            if at(*given):
                die()
            return result
        return changed
    replace(owner, name, made)


def begins(step):
    def changed(self, number):
        begun.append(number)
        return step(self, number)
    return changed


def half(roll_out):
    def changed(engine, adapter, episodes, *rest):
        roll_out(engine, adapter, episodes[: len(episodes) // 2], *rest)
        die()
    return changed


grpo.Grpo.step = begins(grpo.Grpo.step)
{
    "rollout": lambda: replace(grpo, "roll_out", half),
    "backward": lambda: after(torch.Tensor, "backward"),
    "prepared": lambda: after(bridge.Remote, "answer", lambda _, name: name == "W_PREPARED"),
    "committed": lambda: after(grpo.Grpo, "publish"),
    "before_checkpoint": lambda: replace(resume, "save", lambda _: lambda *given: die()),
}[PLACE]()
status = train.main(sys.argv[3:])
mcore.shut_down(status)
sys.exit(status)
