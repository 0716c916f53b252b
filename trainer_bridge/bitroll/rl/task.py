"""What a run is rewarded for. A task makes prompts, lists of token ids, and judges what was sampled behind one, from the ids alone. Every draw
is a hash of a counter (seed, purpose, step, number): no generator has a state, so a resumed run asks what the run before it would have.

    task.prompts(step, n)          of one step; a prompt's group is its place in the list
    task.held_out(n)               the first n of a fixed list that no step asks, the same for every seed
    task.reward(prompt, tokens)    0.0 .. 1.0
    task.reply(prompt, tokens)     what the environment says to an answer, or None when it has nothing to say"""
import functools
import hashlib

END = 1  # the end-of-sequence token of the presets' vocabularies
DIGIT_0 = 3  # "0" .. "9" are 3 .. 12
PLUS, EQUALS, SEPARATOR, AGAIN = 13, 14, 15, 16
SIGNS = {END: "$", PLUS: "+", EQUALS: "=", SEPARATOR: ";", AGAIN: "?", **{DIGIT_0 + i: str(i) for i in range(10)}}

SMALLEST, LARGEST = 10, 99
HELD_OUT = 512
WORKED_FEW, WORKED_MANY = 3, 8  # worked examples of the odd and the even prompts of a step: 35 and 84 tokens and more
FAMILY = 8  # prompts of a step that begin with the same worked examples


def draw(n, *counter):
    """An integer below n, n far below 2^64."""
    data = " ".join(map(str, counter)).encode()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") % n


def decode(ids):
    """Text to read."""
    return "".join(SIGNS.get(i, f"<{i}>") for i in ids)


def question(a, b):
    return [DIGIT_0 + int(d) for d in str(a)] + [PLUS] + [DIGIT_0 + int(d) for d in str(b)] + [EQUALS]


def answer(a, b):
    """Digits of the sum, the least significant first."""
    return [DIGIT_0 + int(d) for d in reversed(str(a + b))]


@functools.cache
def pairs():
    """(trained on, held out): all pairs of two-digit numbers in the order of a hash, cut behind HELD_OUT."""
    every = [(a, b) for a in range(SMALLEST, LARGEST + 1) for b in range(SMALLEST, LARGEST + 1)]
    every.sort(key=lambda pair: hashlib.sha256(f"{pair[0]}+{pair[1]}".encode()).digest())
    return every[HELD_OUT:], every[:HELD_OUT]


def asked(prompt):
    """(a, b) of a prompt's last question."""
    last = len(prompt) - prompt[::-1].index(SEPARATOR) if SEPARATOR in prompt else 0
    a, b = "".join(SIGNS[i] for i in prompt[last:-1]).split("+")
    return int(a), int(b)


class Arithmetic:
    """`a+b=` behind worked examples: `12+34=64;` and so on. Right is an answer whose digits and end token are all right."""

    def __init__(self, seed):
        self.seed = seed

    @staticmethod
    def examples(n, *counter):
        """n worked examples of pairs that are trained on."""
        known, ids = pairs()[0], []
        for i in range(n):
            a, b = known[draw(len(known), *counter, i)]
            ids += question(a, b) + answer(a, b) + [SEPARATOR]
        return ids

    def prompt(self, pair, number, *counter):
        """The even numbers of a family stand behind all its worked examples, the odd ones behind the first few of them."""
        n = WORKED_FEW if number % 2 else WORKED_MANY
        return self.examples(n, *counter, "family", number // FAMILY) + question(*pair)

    def prompts(self, step, n):
        known = pairs()[0]
        return [self.prompt(known[draw(len(known), self.seed, "ask", step, i)], i, self.seed, "step", step) for i in range(n)]

    def held_out(self, n=HELD_OUT):
        return [self.prompt(pair, i, "held out") for i, pair in enumerate(pairs()[1][:n])]

    def reward(self, prompt, tokens):
        return float(tokens == answer(*asked(prompt)) + [END])

    def reply(self, prompt, tokens):
        """A wrong answer is asked for again."""
        return None if self.reward(prompt, tokens) else [AGAIN]


class LowerHalf:
    """For any checkpoint, trained or not: prompts of random tokens, rewarded by the share of sampled tokens in the lower half of the
    vocabulary. The prompts of a family begin with the same two thirds. prompt_tokens: (shortest, longest)."""

    def __init__(self, seed, n_vocab, prompt_tokens):
        self.seed, self.n_vocab, self.shortest, self.longest = seed, n_vocab, *prompt_tokens

    def tokens(self, n, *counter):
        return [DIGIT_0 + draw(self.n_vocab - DIGIT_0, *counter, i) for i in range(n)]

    def prompt(self, number, *counter):
        n = self.shortest + draw(self.longest - self.shortest + 1, *counter, "length", number)
        n_shared = min(n, self.longest * 2 // 3) - 1 if number % 2 == 0 else 0  # every other prompt stands alone
        return self.tokens(n_shared, *counter, "family", number // FAMILY) + self.tokens(n - n_shared, *counter, "own", number)

    def prompts(self, step, n):
        return [self.prompt(i, self.seed, "step", step) for i in range(n)]

    def held_out(self, n=HELD_OUT):
        return [self.prompt(i, "held out") for i in range(n)]

    def reward(self, prompt, tokens):
        return sum(2 * t < self.n_vocab for t in tokens) / len(tokens)

    def reply(self, prompt, tokens):
        return [self.tokens(1, self.seed, "reply", len(prompt), *tokens)[0]] if self.reward(prompt, tokens) < 0.5 else None
