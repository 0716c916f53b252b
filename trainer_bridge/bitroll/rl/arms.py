"""How the rollout's weights come to be. E is the product; the others are controls, each with one thing wrong on purpose, that a meter which
works must flag."""
from .. import functions, peft
from ..digests import NOTHING
from ..names import low_ranks
from ..torch_ops import TorchLinear
from .expand import PACKED


class Exact:
    """E: the very values that the trainer's forward reads."""
    name, adapter, stops = "E", "policy", True
    has_adapter = True  # the rollout has one: its digest can be compared, and with it off there is the base

    def __init__(self, engine, policy, rollout_base):
        self.engine, self.policy, self.rollout_base = engine, policy, rollout_base

    @staticmethod
    def check(rollout_base):
        """Can the rollout of this arm run on that checkpoint? Asked before anything is loaded."""

    @staticmethod
    def functions():
        """What computes the rows of the trainer's model."""
        return functions

    def sync(self, number, tensors, flags):
        """The weights that step `number` rolls out with; bytes that were sent."""
        return self.send(number, tensors, flags)

    def send(self, version, tensors, flags):
        self.engine.swap(self.adapter, version, tensors, flags)
        return size_of(tensors)

    def live_digest(self):
        return self.engine.live_digest(self.adapter)

    def other_adapter(self):
        """Tensors of the adapter that the rollout runs on, where it is another than the trainer's; else None."""

    def state(self):
        """What a resumed run needs of the arm, as tensors by name."""
        return {}

    def restore(self, state):
        pass


class Merged(Exact):
    """M1: s B A is added to the base's weights, rounded to bf16, and the rollout runs without an adapter. The engine's checkpoint has its
    experts in bf16 (bitroll.rl.expand)."""
    name, adapter, stops, has_adapter = "M1", "base", False, False

    @staticmethod
    def check(rollout_base):
        if any(name.endswith(PACKED) for name in rollout_base.tensors):
            model = rollout_base.dir.rstrip("/")
            raise ValueError(f"{model}: its experts are MXFP4, and arm M1 merges adapters into bf16 ones: first "
                             f"`python -m bitroll.rl.expand --model {model} --out {model}-bf16`, then --rollout-model {model}-bf16, which is also "
                             "the --model of a bitroll-worker")

    def sync(self, number, tensors, flags):
        if not number:  # version 0 is the base as it was loaded, and B is zero there
            return 0
        maps = ((module, a.float(), b.float()) for module, a, b in low_ranks(tensors))
        whole = {**self.rollout_base.tensors, **peft.merged(self.rollout_base, maps, self.policy.lora.s)}
        self.engine.swap_base(number, whole)
        return size_of(whole)

    def live_digest(self):
        return NOTHING


class TorchOps(Exact):
    """M2: the trainer's linear maps are torch's own, in bf16."""
    name, stops = "M2", False

    @staticmethod
    def functions():
        return TorchLinear()


class Stale(Exact):
    """M3: from step 2 on the rollout runs on the adapter of one step before."""
    name, stops = "M3", False

    def __init__(self, *parts):
        super().__init__(*parts)
        self.before, self.other = {}, None

    def sync(self, number, tensors, flags):
        stale = number >= 2
        self.other = self.before if stale else None
        n_byte = self.send(number - stale, self.before if stale else tensors, flags)
        self.before = {name: t.clone() for name, t in tensors.items()}
        return n_byte

    def other_adapter(self):
        return self.other

    def state(self):
        return self.before

    def restore(self, state):
        self.before = state


ARMS = {arm.name: arm for arm in (Exact, Merged, TorchOps, Stale)}


def size_of(tensors):
    return sum(t.numel() * t.element_size() for t in tensors.values())
