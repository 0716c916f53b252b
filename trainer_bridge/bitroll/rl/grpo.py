"""One step of GRPO with its certificate: every step's log-probs exist three times, and must be the same bytes.

    rollout     what the engine sampled with; certifying, it hands them out only for the digest of
    again       a forward without gradients, in another packing
    update      the forwards whose backward makes the update, in a third packing, taken before the optimizer's step

The policy's old log-prob is the rollout's."""
import contextlib
import time

import torch

from ..digests import digest_of_bits
from ..in_process import INITIAL, RESYNC
from . import failures, objective
from .episodes import Episode, micro_batches, roll_out


class Mismatch(RuntimeError):
    """Log-probs or adapters of the two sides differ; step: what was found."""

    def __init__(self, step):
        found = step.tokens_that_differ()
        where = ""
        if found:
            episode = step.episodes[found[0][0]]
            where = f", the first at '{episode.uid}' sample {episode.sample}, sampled token {found[0][1]}"
        super().__init__(f"step {step.number}: {step.n_differ} of {step.n_compared} log-probs differ{where}; adapter {step.digest_rollout} in the "
                         f"rollout's memory, {step.digest_trainer} in the trainer's; no update was made")
        self.step = step


class Step:
    """What one step found. again, update: log-prob bits of each episode's sampled tokens, of the two forwards; update is of the first
    mini-batch, the first episodes."""

    def __init__(self, number):
        self.number, self.n_compared, self.n_differ, self.k1, self.k3 = number, 0, 0, 0.0, 0.0
        self.statistics, self.ms, self.heldout = {}, {}, None

    @contextlib.contextmanager
    def timed(self, part):
        start = time.perf_counter()
        with failures.told(f"step {self.number}, {part}"):
            yield
        self.ms[part] = self.ms.get(part, 0.0) + (time.perf_counter() - start) * 1e3

    @property
    def rollout(self):
        return [e.logprob for e in self.episodes]

    def tokens_that_differ(self):
        """(episode, which of its sampled tokens) where the three log-probs are not the same bits; behind the first mini-batch, the two."""
        update = self.update + self.rollout[len(self.update) :]
        place = [(i, k) for i, one in enumerate(self.rollout) for k in range(len(one))]
        return [place[at] for at in objective.differing(flat(self.rollout), flat(self.again), flat(update))]


def flat(lists):
    return [v for one in lists for v in one]


class Grpo:
    """engine: in_process.Engine or bridge.Remote; policy: its trainer."""

    def __init__(self, engine, policy, arm, task, settings, resumes=False):
        self.engine, self.policy, self.arm, self.task, self.settings = engine, policy, arm, task, settings
        self.names = list(engine.manifest("policy"))
        self.flags = RESYNC if resumes else 0
        wanted = settings.sampling
        self.sampling = dict(temperature=wanted.temperature, top_p=wanted.top_p, top_k=wanted.top_k, max_new=wanted.max_new)

    def step(self, number):
        """All of a step but its update; the gradients of the update are there."""
        step = Step(number)
        with step.timed("sync"):
            self.publish(number)
        with step.timed("rollout"):
            self.roll_out(step)
        with step.timed("certify"):
            self.certify(step)
        step.base = flat(t.base for e in step.episodes for t in e.turns) if self.arm.has_adapter else None
        step.rewards = torch.tensor([self.reward(e) for e in step.episodes]).view(self.settings.batch.prompts, -1)
        step.advantages = objective.advantages(step.rewards).view(-1).tolist()
        with step.timed("update"):
            self.accumulate(step)
        self.compare(step)
        if number % self.settings.heldout.every == 0 and self.settings.heldout.prompts:
            step.heldout = self.heldout()
        return step

    # ---- the parts of a step -------------------------------------------------------------------------------------------------

    def publish(self, number):
        tensors = self.policy.publish()
        flags = self.flags | (INITIAL if number == 0 else 0)
        self.sync_bytes = self.arm.sync(number, tensors, flags)
        self.flags = 0

    def roll_out(self, step):
        batch, seed = self.settings.batch, self.settings.seed
        prompts = self.task.prompts(step.number, batch.prompts)
        longest = max(map(len, prompts)) + batch.turns * (self.sampling["max_new"] + 1) - 1  # a reply between two turns has one token
        if longest > batch.max_tok:
            raise ValueError(f"step {step.number}: texts may get {longest} tokens long, expected at most batch.max_tok ({batch.max_tok})")
        step.episodes = [Episode(f"step {step.number} prompt {i}", j, i, prompt) for i, prompt in enumerate(prompts) for j in range(batch.samples)]
        sampling = {**self.sampling, "base": self.arm.has_adapter}
        roll_out(self.engine, self.arm.adapter, step.episodes, self.task, batch.turns, seed, sampling)

    def certify(self, step):
        """The digest of the trainer's own bits, turn by turn, for the rollout's."""
        lengths = [e.n_row for e in step.episodes]
        step.again = self.policy.bits(step.episodes, micro_batches(lengths, self.settings.micro_tokens, self.settings.seed, step.number, "again"))
        turns, certificates = [], []
        for e, found in zip(step.episodes, step.again):
            turns += e.turns
            certificates += [digest_of_bits(self.policy.library, part) for part in e.split(found)]
        self.engine.release(turns, certificates)

    def parts(self, step):
        """Numbers of episodes of each mini-batch, whole groups."""
        n, per_group = self.settings.objective.mini_batches, self.settings.batch.samples
        groups = len(step.episodes) // per_group
        cuts = [groups * i // n * per_group for i in range(n + 1)]
        return [range(a, b) for a, b in zip(cuts, cuts[1:])]

    def accumulate(self, step):
        """The first mini-batch, which is all of the batch unless later ones are asked for: those see another policy and certify nothing."""
        self.policy.forget_gradients()
        part = self.parts(step)[0]
        step.update, step.entropy = self.gradients(step, part, "update")

    def gradients(self, step, part, purpose):
        """(bits of the part's episodes, mean entropy); the gradients are added to the masters'."""
        episodes = [step.episodes[i] for i in part]
        old, weights = [e.logprob for e in episodes], [step.advantages[i] for i in part]
        batches = micro_batches([e.n_row for e in episodes], self.settings.micro_tokens, self.settings.seed, step.number, purpose)
        n_tok = sum(map(len, old))
        found, entropy = self.policy.accumulate(episodes, batches, weights, old, n_tok)
        return found, entropy / n_tok

    def compare(self, step):
        """Bits of both forwards against the rollout's, as integers, and what the log-ratios say in float64."""
        rollout, first, update = flat(step.rollout), flat(step.rollout[: len(step.update)]), flat(step.update)
        step.n_compared, step.n_differ = len(rollout), len(step.tokens_that_differ())
        was, now = objective.floats(first), objective.floats(update)
        step.k1, step.k3 = objective.kl(was, now)
        step.statistics = objective.ratio_statistics(was, now, self.settings.objective.clip)
        step.digest_rollout, step.digest_trainer = self.arm.live_digest(), self.policy.digest(self.names)
        same_adapter = not self.arm.has_adapter or step.digest_rollout == step.digest_trainer
        step.is_exact = step.n_differ == 0 and same_adapter
        if step.base is not None:
            step.differ_from_base = len(objective.differing(rollout, step.base)) / len(rollout)
            step.k1_base, step.k3_base = objective.kl(objective.floats(rollout), objective.floats(step.base))

    def heldout(self):
        """Share of the held-out prompts that greedy decoding answers right."""
        prompts = self.task.held_out(self.settings.heldout.prompts)
        episodes = [Episode(f"heldout {i}", 0, i, prompt) for i, prompt in enumerate(prompts)]
        greedy = {**self.sampling, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "certify": False}
        roll_out(self.engine, self.arm.adapter, episodes, self.task, 1, 0, greedy)
        return sum(self.reward(e) == 1.0 for e in episodes) / len(episodes)

    def reward(self, episode):
        """Of the last answer; a second try earns half."""
        return self.task.reward(episode.prompt, episode.turns[-1].tokens) / len(episode.turns)

    # ---- the update ----------------------------------------------------------------------------------------------------------

    def update(self, step):
        """The optimizer's step, and those of later mini-batches, whose ratios are kept and certify nothing."""
        with step.timed("update"):
            step.grad_norm, step.later = self.policy.update(step.number), []
            for i, part in enumerate(self.parts(step)[1:], 1):
                self.policy.publish()
                found, _ = self.gradients(step, part, f"mini-batch {i}")
                was, now = (objective.floats(flat(lists)) for lists in ([step.rollout[j] for j in part], found))
                step.later.append(dict(step=step.number, mini_batch=i, **objective.ratio_statistics(was, now, self.settings.objective.clip),
                                       k3=objective.kl(was, now)[1]))
                self.policy.update(step.number)
