"""The making of a base: what is taught, what is merged, and that what is kept gives the same checkpoint again."""
import argparse
import csv
import os
import shutil
import unittest

import torch

import rig
from bitroll import lora, peft
from bitroll.model import Model
from bitroll.rl import base_model, train_base
from bitroll.rl.task import DIGIT_0, END, SEPARATOR, answer, decode
from bitroll.rows import Rows
from bitroll.tensors import Checkpoint

os.environ["BITROLL"] = rig.BITROLL


def options(name, **other):
    made = dict(out=os.path.join(rig.PLACE, name), preset="pico", seed=3, noise=0.75, clean=0.5, steps=2, rows=256, rank=8, lr=1e-2, backend="oracle",
                every=1, prompts=4)
    return argparse.Namespace(**{**made, **other})


class Texts(unittest.TestCase):
    def test_inputs_are_right_and_targets_are_noisy(self):
        wrong = {0.0: 0, 0.75: 0, 1.0: 0}
        for noise in wrong:
            for i in range(200):
                inputs, targets, counted = train_base.text(3, noise, 5, i)
                self.assertEqual(len(inputs), len(targets))
                worked = decode(inputs + [SEPARATOR]).split(";")[:-1]
                at = 0
                for example in worked:
                    ask, digits = example.split("=")
                    a, b = map(int, ask.split("+"))
                    self.assertEqual([DIGIT_0 + int(d) for d in digits], answer(a, b))
                    rows = slice(at + len(ask), at + len(ask) + len(digits) + 1)  # from "=" on
                    taught, end = targets[rows][:-1], targets[rows][-1]
                    self.assertEqual((counted[rows], end), ([True] * (len(digits) + 1), END))
                    self.assertFalse(any(counted[at : at + len(ask)]))
                    differ = [k for k, pair in enumerate(zip(taught, answer(a, b))) if pair[0] != pair[1]]
                    self.assertTrue(not differ or differ in ([0], [1]))
                    wrong[noise] += bool(differ)
                    at += len(example) + 1
        self.assertEqual(wrong[0.0], 0)
        self.assertAlmostEqual(wrong[0.75] / 600, 0.75 * 0.9, delta=0.06)  # one random digit in ten is the right one
        self.assertAlmostEqual(wrong[1.0] / 600, 0.9, delta=0.05)

    def test_a_batch_fills_its_rows(self):
        cu, inputs, targets, counted = train_base.batch(512, 0.5, "cpu", 1)
        self.assertTrue(512 - 96 < cu[-1] <= 512)
        self.assertEqual({len(inputs), len(targets), len(counted)}, {cu[-1]})
        self.assertTrue(torch.equal(inputs, train_base.batch(512, 0.5, "cpu", 1)[1]))
        self.assertFalse(torch.equal(inputs[:64], train_base.batch(512, 0.5, "cpu", 2)[1][:64]))


class Committed(unittest.TestCase):
    def test_it_is_built_and_knows_the_sums(self):
        folder = os.path.join(rig.PLACE, "committed")
        base_model.build(base_model.COMMITTED, folder)
        kept = os.listdir(base_model.COMMITTED)
        self.assertLess(sum(os.path.getsize(os.path.join(base_model.COMMITTED, name)) for name in kept), 6 << 20)
        greedy, sampled = train_base.accuracy(rig.LIBRARY, folder, "oracle", 1, 32)
        self.assertGreaterEqual(greedy, 0.9)
        self.assertTrue(0.1 < sampled < 0.7, sampled)  # of 32: what runs start from is 0.30 to 0.45


class Merged(unittest.TestCase):
    def test_merged_is_base_and_adapter(self):
        """Log-probs over the merged base are near those over base and adapter, next to how far these are from the base's. A random adapter,
        but for the experts, which are not merged."""
        adapted = rig.Rig("pico")
        with torch.no_grad():
            for name, p in adapted.model.named_parameters():
                if "linear_out" in name:
                    p.mul_(0.0 if ".experts." in name else 10.0)  # far above what rounding the merged weights does
        lora.publish(adapted.model)
        folder = os.path.join(rig.PLACE, "merged")
        shutil.copytree(adapted.folder, folder)
        base_model.overlay(folder, peft.merged(adapted.checkpoint, train_base.masters(adapted.model, adapted.checkpoint.prefix), adapted.settings.s))
        token = torch.arange(3, 203, dtype=torch.int32)

        def log_probs(model):
            with torch.no_grad():
                return model.log_probs(Rows(adapted.ops, [0, 100, 200]), token, token.flip(0), torch.ones(len(token)))[0].double()
        wanted = log_probs(adapted.model)
        near, far = (log_probs(Model(lora.Settings(adapted.ops), adapted.config, Checkpoint(f))) for f in (folder, adapted.folder))
        near, far = float((near - wanted).abs().mean()), float((far - wanted).abs().mean())
        adapted.close()
        self.assertLess(near, 0.1 * far)


class Base(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.options = options("base")
        cls.run_ = train_base.Run(cls.options, rig.LIBRARY)
        cls.run_.train()

    def test_what_is_kept_gives_the_checkpoint_again(self):
        again = os.path.join(rig.PLACE, "again")
        digest = base_model.build(self.options.out, again)
        self.assertEqual(digest, base_model.bitroll("digest", os.path.join(self.options.out, "model"))["weights_digest"])
        start, made = Checkpoint(self.run_.start), Checkpoint(again)
        changed = {name for name, t in start.tensors.items() if not torch.equal(t.view(torch.uint8), made.tensors[name].view(torch.uint8))}
        self.assertTrue(changed)
        self.assertFalse([name for name in changed if ".experts." in name or "embed" in name or "lm_head" in name])
        with open(os.path.join(self.options.out, "log.csv"), encoding="ascii", newline="") as file:
            self.assertEqual([row["step"] for row in csv.DictReader(file)], ["1", "2"])

    def test_a_changed_overlay_is_refused(self):
        kept = os.path.join(rig.PLACE, "kept")
        os.makedirs(kept)
        for name in ("recipe.json", "overlay.safetensors"):
            with open(os.path.join(self.options.out, name), "rb") as source, open(os.path.join(kept, name), "wb") as target:
                data = bytearray(source.read())
                data[-1] ^= name.endswith("tensors")
                target.write(data)
        with self.assertRaisesRegex(ValueError, "expected [0-9a-f]{32}"):
            base_model.build(kept, os.path.join(rig.PLACE, "damaged"))

    def test_an_overlay_of_another_shape_is_refused(self):
        name = min(self.run_.trainer.checkpoint.tensors)
        with self.assertRaisesRegex(ValueError, "the checkpoint has"):
            base_model.overlay(self.run_.start, {name: torch.zeros(3)})
        with self.assertRaisesRegex(KeyError, "there is no tensor"):
            base_model.overlay(self.run_.start, {"nothing.weight": torch.zeros(3)})

    def test_the_same_training_the_same_base(self):
        again = options("twice", steps=1)
        train_base.Run(again, rig.LIBRARY).train()
        once = options("once", steps=1)
        train_base.Run(once, rig.LIBRARY).train()
        digests = {base_model.bitroll("digest", os.path.join(o.out, "model"))["weights_digest"] for o in (again, once)}
        self.assertEqual(len(digests), 1)


if __name__ == "__main__":
    unittest.main()
