"""GRPO: the same bytes three times a step, over the bridge and in one process; runs that repeat; and each planted fault with its catcher."""
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import types
import unittest
import unittest.mock

import rig
import rl_rig
import test_peft_loader
import test_report
import torch
from bitroll import abi, lora
from bitroll.blocks import Router
from bitroll.in_process import RESYNC, Engine
from bitroll.rl import metrics, objective, train
from bitroll.rl.grpo import Step, flat

LAUNCH = os.path.join(rig.TREE, "trainer_bridge", "launch.sh")
STEP = re.compile(r"step (?P<step>\d+): reward (?P<reward>\d\.\d{3})(?:, held-out \(greedy\) (?P<heldout>\d\.\d{3}))?, "
                  r"KL (?P<k3>\d\.\d{3}e[-+]\d\d), (?P<n_differ>\d+) of (?P<n_compared>\d+) log-probs differ, "
                  r"adapter (?P<rollout>[0-9a-f]{8}) rollout (?P<trainer>[0-9a-f]{8}) trainer; "
                  r"sync \d+, rollout \d+, certify \d+, update \d+, step \d+ ms")


def exact(step):
    return (step.n_differ, step.k1, step.k3, step.digest_rollout) == (0, 0.0, 0.0, step.digest_trainer)


class Processes(unittest.TestCase):
    """8 prompts x 4 samples, three steps: worker and trainer under one mpirun, as `./run demo-rl` has them, and what they leave."""

    @classmethod
    def setUpClass(cls):
        cls.out = os.path.join(rig.PLACE, "mpi")
        job = [LAUNCH, *rl_rig.worker_command(), "--", *rl_rig.command(rl_rig.config("mpi"), cls.out, "--rollout", "mpi:0")]
        done = subprocess.run(job, capture_output=True, text=True, env=rig.environment(), timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        cls.said, cls.rows = done.stdout, metrics.read(os.path.join(cls.out, "metrics.csv"))
        cls.n_compared = sum(int(r["n_compared"]) for r in cls.rows)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.out)

    def test_the_ranks_are_named(self):
        version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout.splitlines()[0]
        self.assertRegex(self.said, rf"(?m)^launch: {re.escape(version)}: the worker is rank 0, the trainer rank 1$")
        pids = re.findall(r"(?m)^launch: rank (\d) is the (\w+), pid (\d+): ", self.said)
        self.assertEqual(sorted(pid[:2] for pid in pids), [("0", "worker"), ("1", "trainer")])
        self.assertNotEqual(pids[0][2], pids[1][2])

    def test_no_log_prob_differs(self):
        self.assertEqual([r["mismatch_count"] for r in self.rows], ["0"] * 3)
        self.assertTrue(all(int(r["n_compared"]) > 200 for r in self.rows))
        self.assertTrue(all(r["digest_rollout"] == r["digest_trainer"] for r in self.rows))
        ledger = f"ledger: 3 steps, 0 of {self.n_compared} log-probs differ, KL 0 at every step, reward "
        self.assertRegex(self.said.splitlines()[-1], rf"^{ledger}0\.\d{{3}} -> 0\.\d{{3}}$")
        self.assertTrue(rig.bitroll("verify", os.path.join(self.out, "ledger.h5")).splitlines()[-1].startswith(ledger))

    def test_a_line_a_step(self):
        """It says what its row of metrics.csv says."""
        lines = [STEP.fullmatch(line) for line in self.said.splitlines() if line.startswith("step ")]
        self.assertTrue(all(lines), self.said)
        self.assertEqual([line["step"] for line in lines], ["0", "1", "2"])
        for line, row in zip(lines, self.rows):
            self.assertEqual((line["reward"], line["k3"]), (f"{float(row['reward_mean']):.3f}", "0.000e+00"))
            self.assertEqual((line["n_differ"], line["n_compared"]), ("0", row["n_compared"]))
            self.assertEqual((line["rollout"], line["trainer"]), (row["digest_rollout"][:8], row["digest_trainer"][:8]))
            self.assertEqual(line["heldout"], f"{float(row['heldout_accuracy']):.3f}" if row["heldout_accuracy"] else None)
        self.assertEqual([line["heldout"] is None for line in lines], [False, True, False])

    def test_the_report(self):
        command = [sys.executable, "-m", "bitroll.rl.report", self.out]
        done = subprocess.run(command, capture_output=True, text=True, env=rig.environment() | dict(BITROLL=rig.BITROLL))
        self.assertEqual((done.returncode, done.stdout), (0, os.path.join(self.out, "report.html") + "\n"), done.stderr)
        test_report.check_plots(self, self.out)
        page = test_report.check_page(self, self.out)
        last = self.rows[-1]
        for words in (f"0 of {self.n_compared:,} log-probs differ in the exact arm", "root " + last["ledger_link"], last["digest_trainer"]):
            self.assertIn(words, page)
        found = test_report.events(os.path.join(self.out, "tensorboard"))
        self.assertEqual(found["rollout_corr/k3_kl"], {0: 0.0, 1: 0.0, 2: 0.0})
        for step, row in enumerate(self.rows):
            self.assertAlmostEqual(found["critic/rewards/mean"][step], float(row["reward_mean"]), places=6)

    def test_the_adapter_loads_into_peft(self):
        """The policy after the last update: its B are not zero, and are those of the file."""
        folder = os.path.join(self.out, "adapter")
        wanted, layers = test_peft_loader.written(folder), test_peft_loader.loaded(folder)
        self.assertGreater(len(wanted), 100)
        test_peft_loader.check_values(self, layers, wanted)
        self.assertTrue(any(b.abs().max() > 0 for _, b in wanted.values()))


class Steps(unittest.TestCase):
    def test_ragged_prompts_two_turns_and_a_filter(self):
        r = rl_rig.Parts(batch=dict(turns=2), sampling=dict(temperature=0.7, top_p=0.95))
        steps = r.run(2)
        self.assertTrue(all(map(exact, steps)))
        turns = [len(e.turns) for e in steps[1].episodes]
        self.assertEqual(set(turns), {1, 2})
        for e in steps[1].episodes:
            self.assertEqual(len(e.logprob), sum(e.mask))
            self.assertEqual(e.mask.count(0), len(e.turns) - 1)
        self.assertEqual(steps[1].n_compared, sum(sum(e.mask) for e in steps[1].episodes))
        r.close()

    def test_a_run_again_is_the_same(self):
        found = []
        for _ in range(2):
            r = rl_rig.Parts()
            found.append([(s.digest_trainer, s.rollout, s.grad_norm) for s in r.run(2)])
            r.close()
        self.assertEqual(*found)
        self.assertNotEqual(found[0][0][0], found[0][1][0])

    def test_a_later_mini_batch_is_logged_and_not_certified(self):
        r = rl_rig.Parts(objective=dict(mini_batches=2))
        step = r.run(1)[0]
        self.assertTrue(exact(step))
        self.assertEqual(len(step.update), 16)
        self.assertEqual(step.n_compared, len(flat(step.rollout)))
        self.assertEqual(len(step.later), 1)
        self.assertNotEqual((step.later[0]["ratio_min"], step.later[0]["ratio_max"]), (1.0, 1.0))  # the policy has moved
        r.close()

    def test_gradients_of_micro_batches_are_those_of_the_batch(self):
        gradients = []
        for tokens in ([60, 100], [4000, 4000]):
            r = rl_rig.Parts(micro_tokens=tokens)
            self.assertTrue(exact(r.grpo.step(0)))
            gradients.append([p.grad for p in r.policy.masters])
            r.close()
        for few, whole in zip(*gradients):
            self.assertLess(float((few - whole).norm()), 1e-2 * float(whole.norm()) + 1e-9)
        self.assertGreater(sum(float(whole.norm()) > 0 for whole in gradients[1]), 20)

    def test_advantages(self):
        a = objective.advantages(torch.tensor([[0.0, 1.0], [1.0, 1.0]]))
        self.assertEqual(a[1].tolist(), [0.0, 0.0])
        self.assertAlmostEqual(float(a[0, 1]), 1.0, places=4)
        self.assertEqual(objective.zero_spread(torch.tensor([[0.0, 1.0], [1.0, 1.0]])), 0.5)

    def test_clipping(self):
        loss, ratio = objective.clipped(torch.tensor([1.0, 1.0, -1.0]), torch.zeros(3), torch.tensor([1.0, -1.0, -1.0]), [0.8, 1.28])
        self.assertEqual([round(float(v), 4) for v in loss], [-1.28, 2.7183, 0.8])
        self.assertAlmostEqual(float(ratio[0]), 2.7183, places=4)

    def test_a_token_is_a_mismatch_once(self):
        step = Step(0)
        step.episodes = [types.SimpleNamespace(logprob=bits) for bits in ([1, 2, 3, 4, 5], [6], [7, 8])]
        step.again = [[1, 9, 3, 9, 9], [6], [7, 9]]
        step.update = [[1, 2, 9, 9, 0], [9]]  # of the first mini-batch: two episodes
        self.assertEqual(step.tokens_that_differ(), [(0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (2, 1)])

    def test_nan_is_never_equal(self):
        self.assertEqual(objective.differing([0x7FC00000, 1], [0x7FC00000, 1]), [0])
        with self.assertRaisesRegex(ValueError, "1 log-probs against 2"):
            objective.differing([1], [1], [1, 2])


class Planted(unittest.TestCase):
    """Each fault, and what catches it."""

    def setUp(self):
        self.r = rl_rig.Parts()
        self.r.run(1)

    def tearDown(self):
        self.r.close()

    def flipped(self, flip):
        """A step whose log-probs are changed on their way to the trainer. flip(turns)."""
        release = self.r.engine.release

        def changed(texts, certificates):
            release(texts, certificates)
            flip(texts)
        self.r.engine.release = changed
        return self.r.grpo.step(1)

    def test_one_bit_in_flight_is_caught_by_the_comparison_of_bits(self):
        def one(texts):
            texts[5].logprob[3] ^= 1
        step = self.flipped(one)
        self.assertEqual(step.tokens_that_differ(), [(5, 3)])
        self.assertEqual((step.n_differ, step.n_compared, step.is_exact), (1, len(flat(step.rollout)), False))

    def test_all_bits_in_flight_are_caught_by_the_comparison_of_bits(self):
        def every(texts):
            for text in texts:
                text.logprob[:] = [b ^ 0xFFFFFFFF for b in text.logprob]
        step = self.flipped(every)
        n = len(flat(step.rollout))
        self.assertEqual((step.n_differ, step.n_compared), (n, n))

    def test_a_zeroed_forward_is_caught_by_the_comparison_of_bits(self):
        log_probs = self.r.policy.log_probs
        self.r.policy.log_probs = lambda episodes: tuple(out * 0.0 for out in log_probs(episodes))
        step = self.r.grpo.step(1)
        n = len(flat(step.rollout))
        self.assertEqual((step.n_differ, step.n_compared), (n, n))

    def test_a_bit_that_nobody_routed_to_is_caught_by_the_digest_of_the_live_memory(self):
        """Every log-prob is right, and yet the step does not certify."""
        chosen = set()

        def see(router, _, out):
            layer = int(router.name.split(".")[1])
            chosen.update((layer, e) for e in out[0].flatten().tolist())
        routers = [m for m in self.r.policy.model.modules() if isinstance(m, Router)]
        hooks = [m.register_forward_hook(see) for m in routers]
        n_expert = self.r.policy.model.model_config.n_expert
        self.r.settings.batch.prompts, self.r.settings.batch.samples = 1, 2
        self.r.grpo.sampling["max_new"] = 2
        self.r.grpo.task.longest = self.r.grpo.task.shortest = 1
        self.r.settings.heldout.prompts = 0
        self.r.grpo.step(1)  # which experts such a step needs
        idle = sorted({(int(m.name.split(".")[1]), e) for m in routers for e in range(n_expert)} - chosen)
        self.assertTrue(idle)
        entry = f"layers.{idle[0][0]}.block_sparse_moe.experts.{idle[0][1]}.w2.lora_A"
        swap = self.r.engine.swap

        def flipping(name, version, tensors, *rest, **named):
            key = next(k for k in sorted(tensors) if entry in k)
            changed = {**tensors, key: tensors[key].clone()}
            changed[key].view(torch.int16).view(-1)[0] ^= 1
            return swap(name, version, changed, *rest, **named)
        self.r.engine.swap = flipping
        self.r.grpo.flags = RESYNC
        step = self.r.grpo.step(1)
        for hook in hooks:
            hook.remove()
        self.assertEqual((step.n_differ, step.is_exact), (0, False))
        self.assertNotEqual(step.digest_rollout, step.digest_trainer)

    def test_one_bit_of_a_published_entry_moves_the_digest(self):
        low = next(m for m in self.r.policy.model.modules() if isinstance(m, lora.LowRank))
        was = self.r.policy.publish()
        before = self.r.policy.digest(self.r.grpo.names)
        with torch.no_grad():
            low.linear_in.weight.view(-1)[0] *= 1.0 + 2.0**-6
        now = self.r.policy.publish()
        self.assertEqual(sum(not torch.equal(now[n], was[n]) for n in now), 1)
        self.assertNotEqual(self.r.policy.digest(self.r.grpo.names), before)

    def test_a_step_that_does_not_certify_ends_the_run_without_an_update(self):
        release, calls = Engine.release, []

        def second_step(engine, texts, certificates):
            release(engine, texts, certificates)
            calls.append(texts)
            texts[0].logprob[0] ^= len(calls) == 2
        out = os.path.join(rig.PLACE, "stopped")
        arguments = rl_rig.command(rl_rig.config("stopped", heldout=dict(prompts=0)), out)[3:]
        with unittest.mock.patch.object(Engine, "release", second_step), contextlib.redirect_stderr(io.StringIO()) as said:
            self.assertEqual(train.main(arguments), 1)
        where = "the first at 'step 1 prompt 0' sample 0, sampled token 0"
        self.assertRegex(said.getvalue(), f"step 1: 1 of [0-9]+ log-probs differ, {where}; .*no update")
        with open(os.path.join(out, "checkpoint", "run.json"), encoding="ascii") as file:
            self.assertEqual(json.load(file)["n_step"], 1)
        self.assertEqual(len(metrics.read(os.path.join(out, "metrics.csv"))), 1)

    def test_an_engine_that_is_gone_ends_the_run_with_a_sentence(self):
        def gone(*arguments, **sampling):
            raise abi.Error(abi.CONSTANTS["BR_E_IO"], "the worker is gone")
        arguments = rl_rig.command(rl_rig.config("gone"), os.path.join(rig.PLACE, "gone"))[3:]
        with unittest.mock.patch.object(Engine, "generate", gone), contextlib.redirect_stderr(io.StringIO()) as said:
            self.assertEqual(train.main(arguments), 2)
        self.assertEqual(said.getvalue().splitlines()[-1], "train: the worker is gone")
        self.assertFalse(os.path.exists(os.path.join(rig.PLACE, "gone")))  # it may begin again


if __name__ == "__main__":
    unittest.main()
