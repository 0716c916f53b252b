"""Texts of one or more turns. The policy's tokens are sampled by the engine; between two turns the environment may put tokens of its own,
which carry no log-prob and are not trained on."""
import random

from ..in_process import Sample


class Episode:
    """prompt, and behind it `tokens`, of which mask tells the sampled ones (1). turns: the engine's Samples, in order; a later turn's prompt
    is the whole text before it."""

    def __init__(self, uid, sample, group, prompt):
        self.uid, self.sample, self.group, self.prompt = uid, sample, group, list(prompt)
        self.turns, self.tokens, self.mask = [], [], []

    def next_turn(self):
        uid = self.uid if not self.turns else f"{self.uid} turn {len(self.turns)}"
        self.turns.append(Sample(uid, self.sample, self.prompt + self.tokens))
        return self.turns[-1]

    def end_turn(self):
        tokens = self.turns[-1].tokens
        self.tokens, self.mask = self.tokens + tokens, self.mask + [1] * len(tokens)

    def reply(self, tokens):
        self.tokens, self.mask = self.tokens + tokens, self.mask + [0] * len(tokens)

    @property
    def n_row(self):
        """Rows of a forward over the whole text: the last token predicts nothing."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def logprob(self):
        return [b for turn in self.turns for b in turn.logprob]

    @property
    def stop(self):
        return self.turns[-1].stop

    @property
    def version_begin(self):
        return self.turns[0].version_begin

    @property
    def version_end(self):
        return self.turns[-1].version_end

    def split(self, values):
        """One list of values of the sampled tokens, cut into those of each turn."""
        parts, at = [], 0
        for turn in self.turns:
            parts.append(values[at : at + len(turn.tokens)])
            at += len(turn.tokens)
        return parts


def roll_out(engine, adapter, episodes, task, n_turn, seed, sampling):
    """Samples every turn of the episodes. What the task replies to an answer opens the next turn; None ends the text."""
    going = episodes
    for turn in range(n_turn):
        engine.generate([e.next_turn() for e in going], adapter, seed, **sampling)
        for e in going:
            e.end_turn()
        if turn + 1 < n_turn:
            answered = [(e, task.reply(e.prompt, e.turns[-1].tokens)) for e in going]
            going = [e for e, reply in answered if reply is not None]
            for e, reply in answered:
                if reply is not None:
                    e.reply(reply)


def micro_batches(lengths, tokens, *counter):
    """Numbers of texts in batches, drawn from a counter such as (seed, step, purpose): the texts in a drawn order, each batch up to a drawn
    number of rows between the two of `tokens`, and at least one text."""
    rng = random.Random(" ".join(map(str, counter)))
    order, batches, room = list(range(len(lengths))), [], 0
    rng.shuffle(order)
    for i in order:
        if lengths[i] > room:
            batches.append([])
            room = rng.randint(*tokens)
        batches[-1].append(i)
        room -= lengths[i]
    return batches
