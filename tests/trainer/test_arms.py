"""Control arms: each has one thing wrong on purpose, and the meters say so at the step at which it begins, and not before."""
import os
import subprocess
import types
import unittest

import rl_rig
import torch
from bitroll.rl import arms, expand, metrics
from bitroll.tensors import Checkpoint


class Arms(unittest.TestCase):
    def flagged(self, arm, n):
        """k3 of the steps, which of them are flagged, and the steps."""
        r = rl_rig.Parts(arm=arm, heldout=dict(prompts=0))
        steps = r.run(n)
        r.close()
        self.assertFalse(r.arm.stops)
        return [s.k3 for s in steps], [not s.is_exact for s in steps], steps

    def test_a_merged_adapter(self):
        """While B is zero the merged base is the base, and bf16 experts give the bits of MXFP4 ones."""
        k3, flags, _ = self.flagged("M1", 3)
        self.assertEqual(flags, [False, True, True])
        self.assertEqual(k3[0], 0.0)
        self.assertTrue(k3[1] > 0 and k3[2] > 0)

    def test_linear_maps_of_torch(self):
        k3, flags, steps = self.flagged("M2", 2)
        self.assertEqual(flags, [True, True])
        self.assertTrue(all(k > 0 for k in k3))
        self.assertTrue(all(s.digest_rollout == s.digest_trainer for s in steps))  # the adapters are the same: it is the arithmetic

    def test_a_stale_adapter(self):
        k3, flags, steps = self.flagged("M3", 4)
        self.assertEqual(flags, [False, False, True, True])
        self.assertEqual(k3[:2], [0.0, 0.0])
        self.assertTrue(k3[2] > 0 and k3[3] > 0)
        self.assertEqual([s.digest_rollout for s in steps[2:]], [s.digest_trainer for s in steps[1:3]])

    def test_the_rollouts_adapter_of_a_stale_run_is_kept(self):
        """`bitroll verify` could score none of its steps again: only the trainer's adapter was there."""
        model, out = rl_rig.rig.checkpoint("pico")[0], os.path.join(rl_rig.rig.PLACE, "stale")
        batch, kept = dict(prompts=2, samples=2), os.path.join(out, "adapter_last_rollout")
        status, said, error = rl_rig.train(rl_rig.config("stale", arm="M3", steps=4, batch=batch, heldout=dict(prompts=0)), out)
        self.assertIn(status, (0, 1), error)  # so small a run may miss a bar
        compared = metrics.read(os.path.join(out, "metrics.csv"))[-1]["n_compared"]
        for folder, line in ((kept, f"recomputed  4 sequences of 1 steps: 0 of {compared} log-probs differ"), (out + "/adapter_last_step", None)):
            done = subprocess.run([rl_rig.rig.BITROLL, "verify", os.path.join(out, "ledger.h5"), "--model", model, "--adapter", f"a={folder}"],
                                  capture_output=True, text=True)
            self.assertEqual((done.returncode, [found for found in done.stdout.splitlines() if found.startswith("recomputed")]),
                             (1, [line] if line else []), done.stderr)  # 1: the ledger shows differences
        self.assertIn("leaves in its folder adapter_last_rollout; adapter_last_step is what its trainer ran on", done.stderr)
        rl_rig.train(rl_rig.config("stale", steps=1, batch=batch, heldout=dict(prompts=0)), out + "_not")
        self.assertEqual(self.kept(out + "_not"), ["adapter", "adapter_last_step"])

    @staticmethod
    def kept(out):
        return sorted(name for name in os.listdir(out) if name.startswith("adapter"))

    def test_a_run_that_ends_before_it_is_stale_keeps_one_adapter(self):
        """Its rollout ran on the trainer's: the second folder held those values under the name of others."""
        batch, out = dict(prompts=2, samples=2), os.path.join(rl_rig.rig.PLACE, "short")
        for n, more, names in (("1", (), ["adapter", "adapter_last_step"]), ("2", ("--resume",), ["adapter", "adapter_last_step"]),
                               ("3", ("--resume",), ["adapter", "adapter_last_rollout", "adapter_last_step"])):
            status, _, error = rl_rig.train(rl_rig.config("short", arm="M3", batch=batch, heldout=dict(prompts=0)), out, "--steps", n, *more)
            self.assertIn(status, (0, 1), error)
            self.assertEqual(self.kept(out), names)

    def test_merging(self):
        a, b, w = torch.randn(2, 8).bfloat16(), torch.randn(4, 2).bfloat16(), torch.randn(4, 8).bfloat16()
        swapped, base = {}, types.SimpleNamespace(tensors={"m.weight": w, "other": w})
        engine = types.SimpleNamespace(swap_base=lambda number, tensors: swapped.update(tensors))
        arm = arms.Merged(engine, types.SimpleNamespace(lora=types.SimpleNamespace(s=2.0)), base)
        names = {"base_model.model.m.lora_A.weight": a, "base_model.model.m.lora_B.weight": b}
        self.assertEqual(arm.sync(1, names, 0), 2 * w.nbytes)
        self.assertTrue(torch.equal(swapped["m.weight"], (w.float() + 2.0 * (b.float() @ a.float())).bfloat16()))
        self.assertIs(swapped["other"], w)
        arm.sync(2, {**names, "base_model.model.m.lora_B.weight": b * 0}, 0)
        self.assertTrue(torch.equal(swapped["m.weight"], w))

    def test_a_merged_adapter_needs_experts_in_bf16(self):
        arms.Merged.check(Checkpoint(rl_rig.expanded()))
        folder = rl_rig.rig.checkpoint("pico")[0]
        status, said, error = rl_rig.train(rl_rig.config("merged", arm="M1"), os.path.join(rl_rig.rig.PLACE, "merged"))
        self.assertEqual((status, said), (2, ""), error)
        self.assertIn(f"train: {folder}: its experts are MXFP4, and arm M1 merges adapters into bf16 ones: first `python -m bitroll.rl.expand "
                      f"--model {folder} --out {folder}-bf16`, then --rollout-model {folder}-bf16", error)

    def test_experts_in_bf16(self):
        packed = Checkpoint(rl_rig.rig.checkpoint("pico")[0])
        wide = dict(expand.tensors_of(packed))
        self.assertEqual(len(wide), len(packed.tensors) - sum(name.endswith(expand.SCALE) for name in packed.tensors))
        self.assertFalse([name for name in wide if name.endswith((expand.PACKED, expand.SCALE))])


if __name__ == "__main__":
    unittest.main()
