"""The engine in this process: what it refuses, and that it serves on afterwards."""
import unittest

import rig
from bitroll import abi
from bitroll.in_process import Engine, Sample


def texts(n, *prompt):
    return [Sample(f"text {i}", 0, prompt or [5, 6, 7 + i]) for i in range(n)]


class Refusals(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.engine = Engine(rig.LIBRARY, rig.checkpoint("pico")[0], {}, max_seqs=2)

    @classmethod
    def tearDownClass(cls):
        cls.engine.close()

    def sampled(self):
        found = texts(5)
        self.engine.generate(found, "base", 7, certify=False, max_new=4, ignore_eos=1)
        self.engine.generate([], "base", 7)
        return [(t.tokens, t.logprob) for t in found]

    def test_it_serves_on(self):
        before = self.sampled()
        with self.assertRaisesRegex(abi.Error, "token 1000000 at position 0"):
            self.engine.generate(texts(3) + texts(1, 10**6) + texts(2), "base", 7, certify=False, max_new=4)
        self.assertEqual(self.sampled(), before)
        with self.assertRaises(abi.Error):
            self.engine.generate(texts(2), "nobody", 7, certify=False, max_new=4)
        self.assertEqual(self.sampled(), before)

    def test_what_no_request_can_say(self):
        twice = texts(1) * 2
        for found, seed, fields, said in (
                ([Sample("a", 0, [])], 7, {}, "a: a prompt of 0"), ([Sample("a", 0, [-1])], 7, {}, "a: a prompt of 1"),
                ([Sample("a", 1 << 24, [4])], 7, {}, "sample 16777216: expected 0 to 16777215"), (texts(1), 1 << 64, {}, "seed "),
                (texts(1), 7, dict(max_new=0), "max_new 0: expected 1"), (texts(1), 7, dict(n_stop=17), "n_stop 17: expected 0 to 16"),
                ([Sample("", 0, [4])], 7, {}, "uid ''"), ([Sample("a\0b", 0, [4])], 7, {}, "none of them 0"), (twice, 7, {}, "a text comes twice")):
            with self.subTest(said), self.assertRaisesRegex(ValueError, said):
                self.engine.generate(found, "base", seed, **fields)
        with self.assertRaisesRegex(ValueError, "a: a prompt of 0"):
            text = Sample("a", 0, [])
            text.tokens = [3]
            self.engine.score([text], None, 1.0)

    def test_scores_of_the_base_do_not_certify_it(self):
        with self.assertRaisesRegex(ValueError, "not scored under it before their release"):
            self.engine.generate(texts(1), "base", 7, base=True)

    def test_a_closed_engine(self):
        engine = Engine(rig.LIBRARY, rig.checkpoint("pico")[0], {})
        engine.close()
        with self.assertRaisesRegex(ValueError, "closed"):
            engine.generate(texts(1), "base", 7)


if __name__ == "__main__":
    unittest.main()
