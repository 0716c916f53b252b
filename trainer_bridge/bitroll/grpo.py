"""GRPO on one process's engine and trainer, with a certificate: every step's log-probs exist three times, and must be the same bytes.

    rollout     what the engine sampled with
    again       a forward without gradients, in another packing
    update      the forward whose backward makes the update, taken before the optimizer's step

The policy's old log-prob is the rollout's. Torch arithmetic here makes advantages, losses and updates; none of it reaches a logit of the
same step."""
import math

import torch

from . import peft, resume
from .lora import publish
from .mcore import pack
from .in_process import INITIAL, RESYNC, Sample, adapter_digest


class Mismatch(RuntimeError):
    """Log-probs or adapters of the two sides differ; step: what was found."""

    def __init__(self, step):
        super().__init__(step.line())
        self.step = step


class Step:
    """What one step's certificate says. mismatch: log-probs of `again` and `update` whose bits are not the rollout's."""

    def __init__(self, number):
        self.number, self.mismatch, self.compared = number, 0, 0
        self.reward_mean = self.k1 = self.k3 = self.zero_spread = 0.0
        self.digest_engine = self.digest_trainer = None

    def line(self):
        return (f"step {self.number}: reward {self.reward_mean:.3f}, {self.mismatch} of {self.compared} log-probs differ, k1 {self.k1:.3e}, "
                f"k3 {self.k3:.3e}, zero-spread groups {self.zero_spread:.2f}, adapter {self.digest_trainer}")


def advantages(rewards, eps=1e-6):
    """(reward - mean) / (std + eps) within each group, rows of rewards; a group without spread gives 0."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, unbiased=False, keepdim=True) + eps)


def kl(rollout, train):
    """k1 and k3 in float64, train against rollout, over sampled tokens."""
    d = train.double() - rollout.double()
    return float((-d).mean()), float((d.exp() - 1 - d).mean())


def packed(texts, device):
    """Rows of whole texts: (lengths, inputs, targets, which rows predict a sampled token)."""
    lengths, inputs, targets, sampled = [], [], [], []
    for text in texts:
        ids = text.prompt + text.tokens
        lengths.append(len(ids) - 1)
        inputs += ids[:-1]
        targets += ids[1:]
        sampled += [False] * (len(text.prompt) - 1) + [True] * len(text.tokens)
    return lengths, *(torch.tensor(v, dtype=torch.int32, device=device) for v in (inputs, targets)), torch.tensor(sampled, device=device)


def bits_of(values):
    return values.detach().contiguous().view(torch.int32).cpu()


class Grpo:
    """engine: a in_process.Engine with one adapter `name` that begins empty; model: a mcore.BitrollModel over the same checkpoint. A step
    whose certificate fails raises Mismatch and makes no update."""

    def __init__(self, engine, model, settings, optimizer, reward, name="policy", prefix="", temperature=1.0, clip=(0.8, 1.28), max_norm=1.0):
        self.engine, self.model, self.settings, self.optimizer, self.reward = engine, model, settings, optimizer, reward
        self.name, self.prefix, self.temperature, self.clip, self.max_norm, self.version = name, prefix, temperature, clip, max_norm, -1
        self.names, self.resync = list(engine.manifest(name)), 0

    def publish(self):
        """Masters rounded once; the very tensors that the trainer's forwards read go to the engine."""
        publish(self.model)
        tensors = dict(peft.exported(self.model, self.prefix))
        self.version += 1
        self.engine.swap(self.name, self.version, tensors, self.resync or (INITIAL if self.version == 0 else 0))
        self.resync = 0
        return tensors

    def save(self, folder):
        """After a step: all that a run goes on from."""
        resume.save(folder, self.model, self.optimizer, self.version, self.engine.weights_digest())

    def load(self, folder):
        """In place of the steps that `folder` was saved after; whatever the engine runs on, its next version is the run's."""
        self.version = resume.load(folder, self.model, self.optimizer, self.engine.weights_digest())
        self.resync = RESYNC

    def log_probs(self, texts):
        """(log-probs, temperature-1 ones, entropies) of the sampled tokens, text after text."""
        device = self.model.ops.device
        lengths, inputs, targets, sampled = packed(texts, device)
        temperature = torch.full((len(inputs),), self.temperature, device=device)
        found = self.model.log_probs(inputs, pack(lengths), targets, temperature)
        self.model.current.rows.check_faults()
        return [out[sampled] for out in found]

    def step(self, number, prompts, n_sample, seed, **sampling):
        record = Step(number)
        tensors = self.publish()
        texts = [Sample(f"step {number} prompt {i}", j, prompt) for i, prompt in enumerate(prompts) for j in range(n_sample)]
        self.engine.generate(texts, self.name, seed, temperature=self.temperature, **sampling)
        rollout = torch.tensor([b for t in texts for b in t.logprob], dtype=torch.int64).to(torch.int32)
        rewards = torch.tensor([self.reward(t) for t in texts]).view(len(prompts), n_sample)
        record.reward_mean, record.zero_spread = float(rewards.mean()), float((rewards.std(1, unbiased=False) == 0).float().mean())
        with torch.no_grad():  # in turn from both ends: another packing than the update's
            cut = max(1, len(texts) // 3)
            again = torch.cat([self.log_probs(part)[0] for part in (texts[:cut], texts[cut:])])
        update = self.log_probs(texts)[0]
        for other in (again, update):
            record.compared += len(rollout)
            record.mismatch += int((bits_of(other) != rollout).sum())
        record.k1, record.k3 = kl(rollout.view(torch.float32), update.detach().cpu())
        record.digest_engine = self.engine.live_digest(self.name)
        record.digest_trainer = adapter_digest(self.engine.library, self.names, tensors, self.settings)
        if record.mismatch or record.digest_engine != record.digest_trainer:
            raise Mismatch(record)  # before the optimizer's step
        self.update(texts, rewards, rollout, update)
        return record

    def update(self, texts, rewards, rollout, logprob):
        """One step of the optimizer on the clipped objective, mean over sampled tokens, from the log-probs of one forward."""
        advantage = advantages(rewards).view(-1)
        weight = torch.cat([advantage[i].expand(len(t.tokens)) for i, t in enumerate(texts)])
        old, weight = rollout.view(torch.float32).to(logprob.device), weight.to(logprob.device)
        ratio = (logprob - old).clamp(-20, 20).exp()
        loss = -torch.minimum(ratio * weight, ratio.clamp(*self.clip) * weight).mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], self.max_norm)
        if not math.isfinite(float(norm)):
            raise FloatingPointError(f"the gradient's norm is {float(norm)}")
        self.optimizer.step()
