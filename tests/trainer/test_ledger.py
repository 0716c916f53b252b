"""A run's ledger written from Python, checked by `bitroll verify`: certified steps of the engine's own texts, then a step that differs."""
import os
import subprocess
import unittest

import rig
from bitroll import abi
from bitroll.in_process import Engine, Sample
from bitroll.ledger import Ledger, UNSCORED, n_step_of

NEW = 6


def verify(path, *arguments):
    """(exit code, lines of stdout, stderr)"""
    done = subprocess.run([rig.BITROLL, "verify", path, *arguments], capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines(), done.stderr


class Written(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder, cls.adapter = rig.checkpoint("pico")
        engine = Engine(rig.LIBRARY, cls.folder, {"a": cls.adapter})
        prompts = rig.sequences(rig.LIBRARY.config(cls.folder), [3, 3, 41], seed=2)
        cls.texts = [Sample(f"prompt {i // 2}", i % 2, prompts[i // 2]) for i in range(6)]
        engine.generate(cls.texts, "a", 7, certify=False, temperature=0.7, max_new=NEW, ignore_eos=1)
        cls.digest, base = engine.live_digest("a"), engine.weights_digest()
        cls.run_of = dict(contract=rig.LIBRARY.contract_digest(), base_rollout=base, base_trainer=base, config_text="steps: 2\n")
        cls.bits = [text.logprob for text in cls.texts]
        engine.close()

    def append(self, ledger, step, again=None, update=None):
        return ledger.append(step=step, version=step, adapter_rollout=self.digest, adapter_trainer=self.digest, texts=self.texts,
                             rewards=[0.0, 1.0, 0.5, 0.5, 1.0, 0.0], advantages=[-1.0, 1.0, 0.0, 0.0, 1.0, -1.0], rollout=self.bits,
                             again=again or self.bits, update=update or self.bits, temperature=0.7)

    def path(self, name):
        return os.path.join(rig.PLACE, name)

    def test_certified(self):
        path = self.path("certified.h5")
        with Ledger.create(rig.LIBRARY, path, self.run_of) as ledger:
            records = [self.append(ledger, step) for step in range(2)]
            self.assertEqual(len(ledger), 2)
            root = ledger.root()
        self.assertEqual([(r.n_compared, r.n_differ, r.k1, r.k3, r.first, r.reward_mean) for r in records], [(36, 0, 0.0, 0.0, None, 0.5)] * 2)
        self.assertEqual(records[1].link, root)
        code, lines, _ = verify(path, "--model", self.folder, "--adapter", f"a={self.adapter}", "--backend", "oracle")
        self.assertEqual(lines[-1], f"ledger: 2 steps, 0 of 72 log-probs differ, KL 0 at every step, reward 0.500 -> 0.500, root {root}")
        self.assertIn("recomputed  12 sequences of 2 steps: 0 of 72 log-probs differ", lines)
        self.assertEqual(code, 0)

    def test_resumed(self):
        whole, cut = self.path("whole.h5"), self.path("cut.h5")
        with Ledger.create(rig.LIBRARY, whole, self.run_of) as ledger:
            self.append(ledger, 0)
            self.append(ledger, 1)
        killed = Ledger.create(rig.LIBRARY, cut, self.run_of)
        self.append(killed, 0)
        self.append(killed, 1)  # never closed, as after a kill
        self.assertEqual((n_step_of(rig.LIBRARY, whole), n_step_of(rig.LIBRARY, cut)), (2, 2))
        with self.assertRaisesRegex(abi.Error, "none.h5"):
            n_step_of(rig.LIBRARY, self.path("none.h5"))
        with Ledger.resume(rig.LIBRARY, cut, self.run_of, 1) as ledger:
            self.append(ledger, 1)
        with open(whole, "rb") as a, open(cut, "rb") as b:
            self.assertEqual(a.read(), b.read())
        with self.assertRaisesRegex(abi.Error, "cannot keep 3 steps: it has 2"):
            Ledger.resume(rig.LIBRARY, cut, self.run_of, 3)
        with self.assertRaisesRegex(abi.Error, f"n_step {1 << 64}: expected"):  # C would keep none
            Ledger.resume(rig.LIBRARY, cut, self.run_of, 1 << 64)
        with self.assertRaisesRegex(abi.Error, "its config digest is"):
            Ledger.resume(rig.LIBRARY, cut, dict(self.run_of, config_text="steps: 3\n"), 1)

    def test_differing(self):
        path = self.path("differing.h5")
        again, update = ([list(bits) for bits in self.bits] for _ in range(2))
        again[4][2] ^= 2
        update[4][2] ^= 1
        with Ledger.create(rig.LIBRARY, path, self.run_of) as ledger:
            record = self.append(ledger, 7, again, update)
        self.assertEqual((record.n_differ, record.n_differ_again, record.n_differ_update, record.first), (1, 1, 1, (4, 41 + 2)))
        self.assertGreater(record.k3, 0)
        code, lines, error = verify(path)
        self.assertEqual(code, 1)
        self.assertIn("step 7: 1 of 36 log-probs differ, first at sequence 4 (uid 'prompt 2', sample 0), position 43", error)
        self.assertRegex(lines[-1], r"^ledger: 1 steps, 1 of 36 log-probs differ, KL not 0 at 1 steps, at most ")

    def test_several_turns(self):
        text = Sample("turns", 0, [5, 6])
        text.tokens, text.mask, text.stop = [7, 8, 9, 10], [1, 0, 0, 1], 1
        bits = [[0xBF800000, 0xC0000000]]
        path = self.path("turns.h5")
        one = dict(step=0, version=3, adapter_rollout=self.digest, adapter_trainer=self.digest, texts=[text], rewards=[1.0], advantages=[0.0])
        with Ledger.create(rig.LIBRARY, path, self.run_of) as ledger:
            with self.assertRaisesRegex(ValueError, "4 log-probs of again: expected 2"):
                ledger.append(rollout=bits, again=[[0xBF800000] * 4], update=bits, **one)
            with self.assertRaisesRegex(abi.Error, "7fc00000: expected a number in a scored slot"):
                ledger.append(rollout=bits, again=[[0xBF800000, UNSCORED]], update=bits, **one)
            for name, value, said in (("rollout", 1 << 40, f"{1 << 40}: expected 0 to"), ("again", -1, "-1: expected 0 to"),
                                      ("update", -0.5, "-0.5: expected a whole number")):
                with self.assertRaisesRegex(ValueError, f"^uid 'turns', sample 0: log-prob of {name} {said}"):
                    ledger.append(**{"rollout": bits, "again": bits, "update": bits, name: [[0xBF800000, value]]}, **one)
            for tokens, said in (([7, 8, 9, 1 << 33], f"^token {1 << 33}: expected"), ([7, 8.5, 9, 10], "^token 8.5: expected a whole number")):
                text.tokens = tokens
                with self.assertRaisesRegex(ValueError, said):
                    ledger.append(rollout=bits, again=bits, update=bits, **one)
            text.tokens = [7, 8, 9, 10]
            self.assertEqual(ledger.append(rollout=bits, again=bits, update=bits, **one).n_compared, 2)
        self.assertEqual(verify(path)[0], 0)


if __name__ == "__main__":
    unittest.main()
