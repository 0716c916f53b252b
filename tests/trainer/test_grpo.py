"""Three steps of GRPO: the same bytes three times a step, an adapter that moves, and meters that are not stuck."""
import os
import random
import unittest

import torch

import rig
from bitroll import grpo, lora, mcore, peft
from bitroll.ops import Ops
from bitroll.in_process import Engine, Sample
from bitroll.tensors import Checkpoint

STEPS, PROMPTS, SAMPLES, NEW = 3, 8, 4, 8


def reward(text):
    """How much of a text lies in the lower half of the vocabulary."""
    return sum(token < 128 for token in text.tokens) / len(text.tokens)


class Rig:
    def __init__(self, preset="pico"):
        mcore.initialize("oracle")
        torch.manual_seed(0)
        self.folder, _ = rig.checkpoint(preset)
        self.config = rig.LIBRARY.config(self.folder)
        self.engine = Engine(rig.LIBRARY, self.folder, {"policy": None}, swap_rank=rig.RANK, swap_alpha=rig.ALPHA, max_seqs=16)
        self.ops = Ops(self.config, 4096, 256, rank_max=rig.RANK, n_slot=1, backend="oracle", library=rig.LIBRARY)
        self.settings = lora.Settings(self.ops, rig.RANK, rig.ALPHA)
        self.model = mcore.BitrollModel(self.settings, self.config, Checkpoint(self.folder))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
        prefix = Checkpoint(self.folder).prefix
        self.grpo = grpo.Grpo(self.engine, self.model, self.settings, self.optimizer, reward, prefix=prefix, temperature=0.7)

    def run(self, n, first=0):
        steps = []
        for i in range(first, first + n):
            rng = random.Random(i)
            prompts = [[rng.randrange(3, self.config.n_vocab) for _ in range(rng.randrange(2, 70))] for _ in range(PROMPTS)]
            steps.append(self.grpo.step(i, prompts, SAMPLES, seed=11, max_new=NEW, ignore_eos=1, top_p=0.95))
        return steps

    def close(self):
        self.engine.close()
        self.ops.close()


class Training(unittest.TestCase):
    def test_three_steps(self):
        r = Rig()
        steps = r.run(STEPS)
        for step in steps:
            print(step.line())
            self.assertEqual(step.mismatch, 0)
            self.assertEqual(step.compared, 2 * PROMPTS * SAMPLES * NEW)
            self.assertEqual((step.k1, step.k3), (0.0, 0.0))
            self.assertEqual(step.digest_engine, step.digest_trainer)
        self.assertEqual(len({s.digest_trainer for s in steps}), STEPS)
        r.close()

    def test_a_run_again_is_the_same(self):
        digests = []
        for _ in range(2):
            r = Rig()
            digests.append([s.digest_trainer for s in r.run(2)])
            r.close()
        self.assertEqual(*digests)


class Restart(unittest.TestCase):
    def test_a_run_that_was_cut_ends_as_one_that_was_not(self):
        whole, folder = Rig(), os.path.join(rig.PLACE, "run")
        wanted = [s.digest_trainer for s in whole.run(4)]  # of a step's beginning: the last shows what the optimizer knew
        whole.close()
        begun = Rig()
        begun.run(2)
        begun.grpo.save(folder)
        begun.close()
        resumed = Rig()
        with torch.no_grad():
            for p in resumed.model.parameters():
                if p.requires_grad:
                    p.add_(1.0)  # nothing but the folder may count
        resumed.grpo.load(folder)
        self.assertEqual([s.digest_trainer for s in resumed.run(2, first=2)], wanted[2:])
        resumed.close()

    def test_another_base_is_refused(self):
        r, folder = Rig(), os.path.join(rig.PLACE, "other")
        r.run(1)
        r.grpo.save(folder)
        path = os.path.join(folder, "run.json")
        with open(path, encoding="ascii") as file:
            text = file.read()
        with open(path, "w", encoding="ascii") as file:
            file.write(text.replace(r.engine.weights_digest(), "0" * 32))
        with self.assertRaisesRegex(ValueError, "made on base weights"):
            r.grpo.load(folder)
        r.close()


class Meters(unittest.TestCase):
    def setUp(self):
        self.r = Rig()
        self.r.run(2)
        self.tensors = self.r.grpo.publish()
        self.text = [Sample("x", 0, [5, 6, 7])]
        self.r.engine.generate(self.text, "policy", 3, max_new=NEW, ignore_eos=1, temperature=0.7)

    def tearDown(self):
        self.r.close()

    def differing(self, name="policy"):
        with torch.no_grad():
            found = grpo.bits_of(self.r.grpo.log_probs(self.text)[0])
        wanted = torch.tensor(self.text[0].logprob, dtype=torch.int64).to(torch.int32)
        return int((found != wanted).sum())

    def test_a_bit_of_the_rollout(self):
        self.assertEqual(self.differing(), 0)
        self.text[0].logprob[3] ^= 1
        self.assertEqual(self.differing(), 1)

    def test_a_stale_adapter_is_seen(self):
        self.r.run(1)
        self.r.grpo.publish()  # the trainer went on; the text was sampled before
        self.assertGreater(self.differing(), 0)

    def test_a_step_that_does_not_certify_makes_no_update(self):
        """The engine is given another adapter than the trainer's: the step stops before the optimizer."""
        swap = self.r.engine.swap

        def flipped(name, version, tensors, flags=0):
            key = sorted(tensors)[0]
            one = {**tensors, key: tensors[key].clone()}
            one[key].view(torch.int16).view(-1)[0] ^= 1
            swap(name, version, one, flags)
        self.r.engine.swap = flipped
        before = [p.detach().clone() for p in self.r.model.parameters() if p.requires_grad]
        with self.assertRaises(grpo.Mismatch) as caught:
            self.r.run(1)
        self.assertNotEqual(caught.exception.step.digest_engine, caught.exception.step.digest_trainer)
        self.assertTrue(all(torch.equal(a, b) for a, b in zip(before, (p for p in self.r.model.parameters() if p.requires_grad))))

    def test_a_tensor_of_another_shape_is_refused(self):
        key = sorted(self.tensors)[0]
        with self.assertRaisesRegex(ValueError, "expected torch.bfloat16"):
            self.r.engine.swap("policy", 99, {**self.tensors, key: self.tensors[key][:1]})
        with self.assertRaisesRegex(ValueError, "expected torch.bfloat16"):
            self.r.engine.swap("policy", 99, {**self.tensors, key: self.tensors[key].float()})

    def test_one_bit_of_one_entry_moves_the_live_digest(self):
        low = next(m for m in self.r.model.modules() if isinstance(m, lora.LowRank))
        before = self.r.engine.live_digest("policy")
        with torch.no_grad():
            low.linear_in.weight.view(-1)[0] *= 1.0 + 2.0**-6
        tensors = self.r.grpo.publish()
        self.assertEqual(sum(not torch.equal(tensors[n], self.tensors[n]) for n in tensors), 1)
        self.assertNotEqual(self.r.engine.live_digest("policy"), before)


if __name__ == "__main__":
    unittest.main()
