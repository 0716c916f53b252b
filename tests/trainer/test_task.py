"""Prompts and rewards: drawn from counters, long enough, sharing what they should, and never asking a held-out sum."""
import unittest

import rig  # noqa: F401  puts the package on the path
from bitroll.rl.task import AGAIN, DIGIT_0, END, HELD_OUT, SEPARATOR, Arithmetic, LowerHalf, answer, asked, decode, pairs, question


def sums(prompt):
    """(a, b) of every example and of the question."""
    found, text = [], decode(prompt)
    for part in text.split(";"):
        a, b = part.split("=")[0].split("+")
        found.append((int(a), int(b)))
    return found


class Prompts(unittest.TestCase):
    def test_ids_are_fixed(self):
        self.assertEqual(question(12, 90) + answer(12, 90) + [END], [4, 5, 13, 12, 3, 14, 5, 3, 4, 1])
        self.assertEqual(decode(question(12, 90) + answer(12, 90) + [SEPARATOR, AGAIN, END, 99]), "12+90=201;?$<99>")
        self.assertEqual(decode(Arithmetic(1).prompts(0, 2)[1]), "89+93=281;20+32=25;89+16=501;76+66=")

    def test_lengths(self):
        for step in range(8):
            for i, prompt in enumerate(Arithmetic(3).prompts(step, 32)):
                low, high = (25, 40) if i % 2 else (70, 100)
                self.assertTrue(low <= len(prompt) <= high, (i, len(prompt)))

    def test_worked_examples_are_right(self):
        for prompt in Arithmetic(3).prompts(1, 16):
            *worked, _ = decode(prompt).split(";")
            for example in worked:
                a, b = example.split("=")[0].split("+")
                self.assertEqual(example.split("=")[1], str(int(a) + int(b))[::-1])

    def test_a_family_shares_its_beginning(self):
        prompts = Arithmetic(3).prompts(2, 16)
        begins = [tuple(p[:27 if i % 2 else 64]) for i, p in enumerate(prompts)]
        self.assertEqual(len(set(begins[0:8:2])), 1)
        self.assertEqual(len(set(begins[1:8:2])), 1)
        self.assertEqual(begins[0][:27], begins[1])
        self.assertNotEqual(begins[0], begins[8])

    def test_the_same_counter_the_same_prompts(self):
        self.assertEqual(Arithmetic(3).prompts(5, 12), Arithmetic(3).prompts(5, 12))
        self.assertEqual(Arithmetic(3).prompts(5, 12)[:4], Arithmetic(3).prompts(5, 4))
        self.assertNotEqual(Arithmetic(3).prompts(5, 4), Arithmetic(3).prompts(6, 4))
        self.assertNotEqual(Arithmetic(3).prompts(5, 4), Arithmetic(4).prompts(5, 4))

    def test_held_out_sums_are_never_shown(self):
        held = set(pairs()[1])
        self.assertEqual((len(held), len(pairs()[0])), (HELD_OUT, 8100 - HELD_OUT))
        self.assertEqual(Arithmetic(1).held_out(), Arithmetic(2).held_out())
        self.assertEqual({asked(p) for p in Arithmetic(1).held_out()}, held)
        for step in range(8):
            for prompt in Arithmetic(1).prompts(step, 32) + [p[:-6] for p in Arithmetic(1).held_out(64)]:
                self.assertFalse(held & set(sums(prompt + question(11, 11) if prompt[-1] == SEPARATOR else prompt)))


class Rewards(unittest.TestCase):
    def test_only_the_whole_answer_counts(self):
        task, prompt = Arithmetic(1), question(10, 11) + answer(10, 11) + [SEPARATOR] + question(58, 47)
        right = [DIGIT_0 + d for d in (5, 0, 1)]
        self.assertEqual(task.reward(prompt, right + [END]), 1.0)
        for wrong in (right, right[::-1] + [END], right[:2] + [END], right + [SEPARATOR], [], [END]):
            self.assertEqual(task.reward(prompt, wrong), 0.0, wrong)
        self.assertIsNone(task.reply(prompt, right + [END]))
        self.assertEqual(task.reply(prompt, right), [AGAIN])

    def test_lower_half(self):
        task = LowerHalf(7, 100, (8, 600))
        prompts = task.prompts(0, 16)
        self.assertTrue(all(8 <= len(p) <= 600 and all(3 <= t < 100 for t in p) for p in prompts))
        self.assertEqual(prompts, LowerHalf(7, 100, (8, 600)).prompts(0, 16))
        self.assertNotEqual(prompts, task.prompts(1, 16))
        self.assertEqual(task.reward(prompts[0], [49, 50, 3, 99]), 0.5)
        shared = LowerHalf(7, 100, (600, 600)).prompts(0, 4)
        self.assertEqual({len(p) for p in shared}, {600})
        self.assertEqual(shared[0][:399], shared[2][:399])
        self.assertNotEqual(shared[0][:64], shared[1][:64])


if __name__ == "__main__":
    unittest.main()
