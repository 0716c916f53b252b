"""The policy that is trained: a Megatron-Core model over a frozen base, f32 masters of its adapters, their optimizer, and what is published
of them. Forwards go over whole texts, packed in micro-batches."""
import math

import torch

from .. import lora, mcore, peft
from ..digests import adapter_digest
from ..ops import Ops
from ..tensors import Checkpoint
from .objective import bits, clipped, floats


def packed(episodes, device):
    """Rows of whole texts: (lengths, inputs, targets, which rows predict a sampled token)."""
    lengths, inputs, targets, sampled = [], [], [], []
    for e in episodes:
        ids = e.prompt + e.tokens
        lengths.append(len(ids) - 1)
        inputs += ids[:-1]
        targets += ids[1:]
        sampled += [False] * (len(e.prompt) - 1) + [bool(m) for m in e.mask]
    return lengths, *(torch.tensor(v, dtype=torch.int32, device=device) for v in (inputs, targets)), torch.tensor(sampled, device=device)


class Policy:
    """settings: of the run. functions: what computes the model's rows."""

    def __init__(self, library, model_dir, settings, functions):
        mcore.initialize(settings.backend)
        torch.manual_seed(settings.seed)  # of the masters' start
        if settings.backend == "oracle":
            torch.set_num_threads(1)  # its sums then have one order, and its idle threads take no core from the oracle's
        config, checkpoint = library.config(model_dir), Checkpoint(model_dir)
        n_row = max(settings.micro_tokens[1], settings.batch.max_tok)
        self.ops = Ops(config, n_row, settings.batch.max_tok, rank_max=settings.lora["r"], n_slot=1, backend=settings.backend,
                       n_thread=settings.threads, library=library)
        self.lora = lora.Settings(self.ops, settings.lora["r"], settings.lora["lora_alpha"])
        self.model = mcore.BitrollModel(self.lora, config, checkpoint, fn=functions)
        self.library, self.checkpoint, self.prefix = library, checkpoint, checkpoint.prefix
        self.temperature, self.clip, self.wanted = settings.sampling.temperature, settings.objective.clip, settings.optimizer
        self.masters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.masters, lr=settings.optimizer.lr, betas=tuple(settings.optimizer.betas), weight_decay=0.0)
        self.base_digest = library.weights_digest(model_dir)

    def close(self):
        self.ops.close()

    # ---- what is published ---------------------------------------------------------------------------------------------------

    def publish(self):
        """Masters rounded once into what forwards read; the values that they read, by PEFT's names."""
        lora.publish(self.model)
        return self.live()

    def live(self):
        return dict(peft.exported(self.model, self.prefix))

    def digest(self, names):
        """Of the adapter that forwards read, now. names: of its tensors, in the order of the engine's manifest."""
        return adapter_digest(self.library, names, self.live(), self.lora)

    # ---- forwards ------------------------------------------------------------------------------------------------------------

    def log_probs(self, episodes):
        """(log-probs, entropies) of the sampled tokens, text after text."""
        device = self.ops.device
        lengths, inputs, targets, sampled = packed(episodes, device)
        temperature = torch.full((len(inputs),), self.temperature, device=device)
        logprob, _, entropy = self.model.log_probs(inputs, mcore.pack(lengths), targets, temperature)
        self.model.current.rows.check_faults()
        return logprob[sampled], entropy[sampled]

    def bits(self, episodes, batches):
        """Bits of the sampled tokens' log-probs of each episode, from forwards without gradients. batches: numbers of episodes."""
        found = [None] * len(episodes)
        with torch.no_grad():
            for batch in batches:
                self.keep(found, episodes, batch, self.log_probs([episodes[i] for i in batch])[0])
        return found

    @staticmethod
    def keep(found, episodes, batch, logprob):
        """One forward's log-probs, handed to their episodes."""
        at, values = 0, bits(logprob)
        for i in batch:
            n = sum(episodes[i].mask)
            found[i] = values[at : at + n]
            at += n

    def accumulate(self, episodes, batches, weights, old, n_tok):
        """Gradients of the clipped objective, the mean over n_tok tokens however they are cut into micro-batches. weights: of an episode's
        tokens; old: bits of their log-probs when they were sampled. (Bits of each episode's log-probs, entropy summed over tokens.)"""
        found, entropy_sum = [None] * len(episodes), 0.0
        for batch in batches:
            logprob, entropy = self.log_probs([episodes[i] for i in batch])
            self.keep(found, episodes, batch, logprob)
            rows = [(weights[i], b) for i in batch for b in old[i]]
            weight = torch.tensor([w for w, _ in rows], dtype=torch.float32, device=logprob.device)
            was = floats([b for _, b in rows]).to(logprob.device)
            (clipped(logprob, was, weight, self.clip)[0].sum() / n_tok).backward()
            entropy_sum += float(entropy.detach().double().sum())
        return found, entropy_sum

    # ---- updates -------------------------------------------------------------------------------------------------------------

    def forget_gradients(self):
        self.optimizer.zero_grad()

    def update(self, number):
        """One step of the optimizer, at the rate of the run's step `number`; the gradient's norm before it is clipped."""
        rate = self.wanted.lr * min(1.0, (number + 1) / max(1, self.wanted.warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = lora.clip_gradients(self.masters, self.wanted.clip_norm, number)
        self.optimizer.step()
        self.forget_gradients()
        return norm

    def norms(self):
        """{kind of map: square root of the sum of |s B A|^2 over its maps}, of what forwards read; from Gram matrices of the rank's size."""
        squares, live, seen = {}, peft.live(self.model), set()
        for name, low, _ in peft.adapters(self.model):
            if low in seen:  # all experts of a map at once
                continue
            seen.add(low)
            a, b = (t.double() for t in live[low])
            square = ((b.transpose(1, 2) @ b) * (a @ a.transpose(1, 2))).sum() * self.lora.s**2
            kind = name.split(".")[-1]
            squares[kind] = squares.get(kind, 0.0) + float(square)
        return {kind: math.sqrt(v) for kind, v in sorted(squares.items())}
