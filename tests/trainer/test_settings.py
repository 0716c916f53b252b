"""Settings of a run: every key known, typed and in range, and each refusal one sentence that names the key; micro-batches and metrics."""
import csv
import os
import tempfile
import unittest
from unittest import mock

import rig  # noqa: F401 puts the package on the path
from bitroll.refusals import Refused
from bitroll.rl import bars, metrics, train
from bitroll.rl import settings as run_settings
from bitroll.rl.episodes import Episode, micro_batches


def sampling_of(**changed):
    return run_settings.Settings({"sampling": changed}).sampling


PLAIN = sampling_of()  # temperature 1, no filter


class Settings(unittest.TestCase):
    def test_defaults_are_the_issue_s(self):
        s = run_settings.Settings({})
        self.assertEqual((s.arm, s.lora["r"], s.lora["lora_alpha"], s.objective.clip), ("E", 32, 64.0, [0.8, 1.28]))
        self.assertEqual((s.optimizer.lr, s.optimizer.betas, s.optimizer.warmup_steps, s.optimizer.clip_norm), (1e-3, [0.9, 0.95], 5, 1.0))
        self.assertEqual((s.micro_tokens, s.objective.mini_batches), ([300, 1100], 1))

    def test_what_a_worker_must_hold_is_asked_for_at_the_greeting(self):
        for changed, n in (({}, 49), (dict(arm="M1"), 48), (dict(arm="M3", batch=dict(prompts=3, samples=5, turns=2)), 31)):
            args = mock.Mock(rollout="unix:none", wait=1.0)
            with mock.patch.object(train, "Remote") as remote:
                train.open_rollout(args, run_settings.Settings(changed), mock.Mock())
            self.assertEqual(remote.call_args.kwargs["requests"], n)

    def test_what_is_wrong_is_named(self):
        for found, sentence in (
                ({"stepps": 3}, "stepps: no such key, expected one of arm, seed"),
                ({"optimizer": {"beta": 1}}, "optimizer.beta: no such key"),
                ({"steps": "3"}, "steps: expected an integer of 1 to 1000000, found '3'"),
                ({"steps": True}, "steps: expected an integer"),
                ({"steps": 0}, "steps: expected an integer of 1"),
                ({"sampling": {"top_p": 0.0}}, "sampling.top_p: expected a number"),
                ({"sampling": {"temperature": float("nan")}}, "sampling.temperature: expected a number"),
                ({"sampling": []}, "sampling: expected a mapping"),
                ({"objective": {"clip": [1.28, 0.8]}}, "objective.clip: the first is above the second"),
                ({"objective": {"clip": 0.2}}, "objective.clip: expected two numbers"),
                ({"arm": "M4"}, "arm: expected one of E, M1, M2, M3, found 'M4'"),
                ({"batch": {"prompts": 2}, "objective": {"mini_batches": 3}}, "objective.mini_batches: expected at most batch.prompts"),
                ({"batch": {"max_tok": 8}, "sampling": {"max_new": 8}}, "sampling.max_new: expected less than"),
                ({"lora": {"rank": 8}}, "lora.rank: expected it left out, the rank is r"),
                ({"lora": {"target_modules": ["q_proj"]}}, "lora.target_modules: expected it left out")):
            with self.subTest(sentence), self.assertRaisesRegex(run_settings.Invalid, "^" + sentence):
                run_settings.Settings(found)

    def test_refusals_reach_the_settings(self):
        for found, sentence in (({"lora": {"lora_dropout": 0.1}}, "lora_dropout"), ({"lora": {"use_dora": True}}, "DoRA"),
                                ({"lora": {1: 2, "alpha_of": 3}}, "1 is 2"),
                                ({"lora": {"init_lora_weights": "pissa"}}, "init_lora_weights"),
                                ({"parallel": {"tensor": 2}}, "tensor parallel size 2")):
            with self.subTest(sentence), self.assertRaisesRegex(Refused, sentence):
                run_settings.Settings(found)

    def test_what_is_chained_says_what_a_step_is_and_not_when_the_run_ends(self):
        plain = run_settings.Settings({"steps": 4})
        self.assertEqual(plain.text, run_settings.Settings({"steps": 9}).text)
        self.assertNotEqual(plain.text, run_settings.Settings({"seed": 2}).text)
        self.assertEqual(plain.text, run_settings.Settings({"engine": {"max_seqs": 5, "chunk_tokens": 7}}).text)
        self.assertEqual(run_settings.Settings(run_settings.yaml.safe_load(plain.echo)).text, plain.text)

    def test_a_file(self):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write("seed: 3\nsteps: 7\n")
            file.flush()
            s = run_settings.load(file.name, steps=2, arm=None)
            self.assertEqual((s.seed, s.steps, s.arm), (3, 2, "E"))
            file.write("a: [\n")
            file.flush()
            with self.assertRaisesRegex(run_settings.Invalid, "not YAML"):
                run_settings.load(file.name)

    def test_files_that_say_something_else_than_they_seem_to(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "f.yaml")

            def load(text):
                with open(path, "wb") as file:
                    file.write(text)
                return run_settings.load(path)
            for text, sentence in ((b"steps: 3\nsteps: 5\n", "a key stands twice in the mapping that begins in line 1"),
                                   (b"false\n", "expected a mapping, found bool"), (b"[]\n", "expected a mapping, found list"),
                                   (b"a: " + b"[" * 5000, "not YAML: maximum recursion"), (b"\xff\xfe", "not YAML: .*decode"),
                                   (b"steps: " + b"9" * 5000, "not YAML: "), (b"seed: !!int ''\n", "not YAML: "),
                                   (b"seed: !!timestamp x\n", "not YAML: "), (b"seed: !!bool x\n", "not YAML: ")):
                with self.subTest(sentence), self.assertRaisesRegex(run_settings.Invalid, path + ": " + ".*" + sentence):
                    load(text)
            self.assertEqual(load(b"optimizer: {lr: 1e-3}\n").optimizer.lr, 1e-3)  # to YAML 1.1 that is a text
            self.assertEqual(load(b"optimizer: &o {lr: 0.5}\n").optimizer.lr, 0.5)
            self.assertEqual(load(b"").steps, 20)


class Batches(unittest.TestCase):
    def test_every_text_once_and_no_batch_over_its_room(self):
        lengths = [30 + 7 * (i % 11) for i in range(100)] + [2000]
        for step in range(5):
            batches = micro_batches(lengths, [300, 1100], 1, step, "update")
            self.assertEqual(sorted(i for b in batches for i in b), list(range(101)))
            self.assertTrue(all(sum(lengths[i] for i in b) <= 1100 or len(b) == 1 for b in batches))

    def test_they_are_of_the_counter_alone(self):
        lengths = [50] * 40
        first = micro_batches(lengths, [300, 1100], 1, 0, "update")
        self.assertEqual(first, micro_batches(lengths, [300, 1100], 1, 0, "update"))
        others = [micro_batches(lengths, [300, 1100], *c) for c in ((2, 0, "update"), (1, 1, "update"), (1, 0, "again"))]
        self.assertTrue(all(other != first for other in others))

    def test_an_episode_s_turns(self):
        e = Episode("u", 0, 0, [5, 6])
        e.next_turn().tokens = [7, 8]
        e.end_turn()
        e.reply([9])
        second = e.next_turn()
        self.assertEqual((second.uid, second.prompt), ("u turn 1", [5, 6, 7, 8, 9]))
        second.tokens = [10]
        e.end_turn()
        self.assertEqual((e.tokens, e.mask, e.n_row), ([7, 8, 9, 10], [1, 1, 0, 1], 5))
        self.assertEqual(e.split(["a", "b", "c"]), [["a", "b"], ["c"]])


class Metrics(unittest.TestCase):
    def test_rows_behind_a_checkpoint_are_cut(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "metrics.csv")
            table = metrics.Table(path)
            for step in range(3):
                table.append(dict.fromkeys(metrics.COLUMNS, 0.5) | dict(step=step, heldout_accuracy=None))
            table.close()
            with open(path, "a", encoding="ascii") as file:
                file.write("3,0.5,0.")  # a process that died in the middle
            metrics.Table(path, 2).close()
            self.assertEqual([r["step"] for r in metrics.read(path)], ["0", "1"])
            self.assertEqual(metrics.read(path)[1]["heldout_accuracy"], "")
            with self.assertRaisesRegex(ValueError, "expected rows of steps 0 to 3, found 2 rows"):
                metrics.Table(path, 4)
            with open(path, encoding="ascii") as file:
                self.assertEqual(next(csv.reader(file)), list(metrics.COLUMNS))

    def test_bars_can_be_missed(self):
        def met(rows, kinds, share):
            return [is_met for _, is_met in bars.lines([dict(step=str(i), differ_from_base_share=d, digest_trainer=digest, zero_spread_share=z,
                                                             reward_mean="0.4") for i, (d, digest, z) in enumerate(rows)], kinds, share, PLAIN)]
        self.assertEqual(met([("0", "a", "0.5"), ("1", "b", "0.5")], dict(w1=True), 1.0), [True] * 6 + [None])
        self.assertEqual(met([("0.1", "a", "0.7"), ("0.9", "a", "0.7")], dict(w1=True, w2=False), 0.8), [False] * 6 + [None])
        self.assertEqual(met([("", "a", "0.5"), ("", "b", "0.5")], dict(w1=True), 1.0), [True] * 4 + [None])

    def test_a_long_run_must_have_learned(self):
        def learned(first, last, n_step=100):
            rows = [dict(step=str(i), differ_from_base_share="", digest_trainer=str(i), zero_spread_share="0.5",
                         reward_mean=str(first if i == 0 else last)) for i in range(n_step)]
            return bars.lines(rows, dict(w1=True), 1.0, PLAIN)[-1][1]
        self.assertEqual([learned(0.36, last) for last in (0.66, 0.65, 0.3)], [True, False, False])
        self.assertEqual([learned(0.8, last) for last in (0.91, 0.89)], [True, False])
        self.assertIsNone(learned(0.36, 0.3, 99))

    def test_one_step_misses_no_bar_that_needs_two(self):
        row = dict(step="0", differ_from_base_share="0", digest_trainer="a", zero_spread_share="0.5", reward_mean="0.4")
        found = bars.lines([row], dict(w1=True), 1.0, PLAIN)
        self.assertEqual([is_met for _, is_met in found], [True, None, None, True, True, True, None])
        self.assertEqual([text.endswith("needs 2 steps, the run has 1") for text, _ in found], [False, True, True, False, False, False, False])
        marks = ["ok", "not judged", "not judged", "ok", "ok", "ok", "not judged"]
        self.assertEqual([bars.line(*bar) for bar in found], [f"{mark:10} {text}" for mark, (text, _) in zip(marks, found)])
        self.assertEqual(bars.line("a bar", False), "MISS       a bar")
        self.assertTrue(bars.met(found))
        self.assertFalse(bars.met(bars.lines([row], dict(w1=False), 1.0, PLAIN)))

    def test_bars_of_temperature_1_without_a_filter(self):
        """Rows that miss both of them: other sampling cannot tell, and says how the run samples; every other bar is judged as before."""
        rows = [dict(step=str(i), differ_from_base_share="0.5" if i else "0", digest_trainer=str(i), zero_spread_share="0.9", reward_mean="0.4")
                for i in range(2)]

        def found(sampling, n_row=2):
            return bars.lines(rows[:n_row], dict(w1=True), 1.0, sampling)
        self.assertEqual([is_met for _, is_met in found(PLAIN)], [True, False, True, True, True, False, None])
        for changed in (dict(temperature=0.7), dict(top_p=0.95), dict(top_k=20)):
            with self.subTest(**changed):
                lines = found(sampling_of(**changed))
                self.assertEqual([is_met for _, is_met in lines], [True, None, True, True, True, None, None])
                said = [text for text, _ in lines if "without a filter, the run samples at temperature" in text]
                self.assertEqual(said, [lines[1][0], lines[5][0]])
                self.assertTrue(bars.met(lines))
        self.assertEqual(found(sampling_of(temperature=0.7, top_p=0.95))[5][0], "groups without spread: 90.0 %, expected at most 60: expected of "
                         "temperature 1 without a filter, the run samples at temperature 0.7, top-p 0.95, top-k 0")
        self.assertIn("needs 2 steps, the run has 1: expected of temperature 1", found(sampling_of(temperature=0.7), 1)[1][0])


if __name__ == "__main__":
    unittest.main()
