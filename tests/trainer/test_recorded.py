"""The recorded runs of experiments/rl100: the ledgers that are committed hold and score again to the same bits, and the rows give every number
that its README shows."""
import os
import re
import shutil
import subprocess
import unittest

import h5py
import numpy

import rig
from bitroll.in_process import Engine, Sample
from bitroll.rl import base_model, metrics

os.environ["BITROLL"] = rig.BITROLL
FOLDER = os.path.join(rig.TREE, "experiments", "rl100")
ARRAYS = ("rollout", "again", "update")
E = ("E_seed1", "E_seed2", "E_seed3")
EXACT = (*E, "ragged_seed1", "small600_seed1")
RUNS = (*E, "M1_seed1", "M2_seed1", "M3_seed1", *EXACT[3:])
LEDGERS = ("E_seed1", "ragged_seed1", "small600_seed1")
TITLE = ("run", "steps", "log-probs that differ", "largest k3", "first at step", "reward, step 0", "mean of the last 10", "held out, greedy",
         "ledger root")


def rows_of(name):
    return metrics.read(os.path.join(FOLDER, "results", name + ".csv"))


def ledger_of(name):
    return os.path.join(FOLDER, "results", name + "_ledger.h5")


def text_of_readme():
    with open(os.path.join(FOLDER, "README.md"), encoding="utf-8") as file:
        return file.read()


def sentence(text):
    """Is it in the README, wherever its lines break?"""
    return text in " ".join(text_of_readme().split())


def table():
    """{run: {title of a column: cell}} of the README's table of results."""
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in text_of_readme().splitlines() if line.startswith("|")]
    begin = lines.index(list(TITLE))
    found = {}
    for cells in lines[begin + 2 :]:
        if len(cells) != len(TITLE):
            break
        run = re.fullmatch(r"(\w+)(?: seed (\d))?", cells[0])
        found[f"{run[1]}_seed{run[2] or 1}"] = dict(zip(TITLE, cells))
    return found


def share(rows, column):
    return sum(float(r[column]) for r in rows) / len(rows)


def cells_of(rows):
    """What the table must say of these rows, but for the first column."""
    n_differ, n_compared = (sum(int(r[c]) for r in rows) for c in ("mismatch_count", "n_compared"))
    k3, first = max(float(r["k3"]) for r in rows), next((r["step"] for r in rows if int(r["mismatch_count"])), "-")
    begin, end = metrics.ends([float(r["reward_mean"]) for r in rows])
    heldout = [float(r["heldout_accuracy"]) for r in rows if r["heldout_accuracy"]]
    return [str(len(rows)), f"{n_differ:,} of {n_compared:,}", f"{k3:.3e}" if k3 else "0", first, f"{begin:.3f}", f"{end:.3f}",
            f"{heldout[0]:.3f} -> {heldout[-1]:.3f}" if heldout else "-", rows[-1]["ledger_link"]]


class Rows(unittest.TestCase):
    def test_the_table_of_the_readme(self):
        found = table()
        self.assertEqual(tuple(found), RUNS)
        for name, cells in found.items():
            with self.subTest(name):
                rows = rows_of(name)
                self.assertEqual([r["step"] for r in rows], [str(i) for i in range(len(rows))])
                self.assertEqual(list(cells.values())[1:], cells_of(rows))

    def test_the_exact_arm(self):
        for name in EXACT:
            with self.subTest(name):
                rows = rows_of(name)
                self.assertEqual({(r["mismatch_count"], float(r["k1"]), float(r["k3"])) for r in rows}, {("0", 0.0, 0.0)})
                self.assertEqual([r["digest_rollout"] for r in rows], [r["digest_trainer"] for r in rows])
                self.assertEqual([a["step"] for a, b in zip(rows[1:], rows) if a["digest_trainer"] == b["digest_trainer"]], [])
                self.assertEqual(float(rows[0]["differ_from_base_share"]), 0.0)

    def test_bars_of_the_runs_of_e(self):
        for name in E:
            with self.subTest(name):
                rows = rows_of(name)
                self.assertEqual(float(rows[-1]["differ_from_base_share"]), 1.0)
                first, last = metrics.ends([float(r["reward_mean"]) for r in rows])
                self.assertGreaterEqual(last - first, 0.3)
                self.assertLessEqual(share(rows, "zero_spread_share"), 0.6)
        said = "{:.1f}, {:.1f} and {:.1f} %".format(*(100 * share(rows_of(name), "zero_spread_share") for name in E))
        self.assertTrue(sentence(f"groups without spread {said}"), said)

    def test_what_the_readme_says_of_the_two_others(self):
        ragged, small = (rows_of(name) for name in EXACT[3:])
        groups = (100 * share(ragged, "zero_spread_share"), 32 * float(ragged[0]["zero_spread_share"]))
        based = 100 * float(ragged[-1]["differ_from_base_share"])
        for text in (f"{groups[0]:.1f} % of the groups without spread", f"at step 0 {groups[1]:.0f} of 32 have no spread",
                     f"{based:.2f} % of the log-probs of its last step other than the base's",
                     f"at its last step all {int(small[-1]['n_compared']):,} log-probs differ from the base's"):
            self.assertTrue(sentence(text), text)
        self.assertEqual(float(small[-1]["differ_from_base_share"]), 1.0)

    def test_the_control_arms_are_flagged(self):
        for name, cells in table().items():
            if name not in EXACT:
                first = int(cells["first at step"])
                with self.subTest(name):
                    rows = rows_of(name)
                    differing = [int(r["mismatch_count"]) > 0 and float(r["k3"]) > 0 for r in rows]
                    self.assertEqual(differing, [step >= first for step in range(len(rows))])


class Ledger(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.base = os.path.join(rig.PLACE, "base")
        base_model.build(base_model.COMMITTED, cls.base)

    def flipped(self, name, slot):
        """A copy of E's ledger; slot: which sampled token of step 0 has another lowest bit in the array."""
        path = os.path.join(rig.PLACE, name + ".h5")
        shutil.copyfile(ledger_of("E_seed1"), path)
        with h5py.File(path, "r+") as file:
            at = int(numpy.flatnonzero(file["tokens/mask"][: file["seq/offset"][1]])[slot])
            bits = file["tokens/" + name][:].view(numpy.uint32)
            bits[at] ^= 1
            file["tokens/" + name][:] = bits.view(numpy.float32)
        return path, at

    def scored_again(self, path, step=0, base=None, stride=1):
        """(the oracle's bits over the base of the sampled tokens of each stride-th text of a step, {array: the ledger's bits of them})."""
        texts, chosen = [], []
        with h5py.File(path) as file:
            first, end = file["step/seq_begin"][step : step + 2].tolist()
            temperature = set(file["seq/temperature"][first:end].tolist())
            for i in range(first, end, stride):
                rows, length = slice(*file["seq/offset"][i : i + 2].tolist()), int(file["seq/prompt_len"][i])
                ids = file["tokens/id"][rows].tolist()
                texts.append(Sample(f"text {i}", 0, ids[:length]))
                texts[-1].tokens = ids[length:]
                chosen.append((rows, length, file["tokens/mask"][rows] == 1))
            held = {name: numpy.concatenate([file["tokens/" + name][rows].view(numpy.uint32)[mask] for rows, _, mask in chosen]) for name in ARRAYS}
        engine = Engine(rig.LIBRARY, base or self.base, {})
        scored = engine.score(texts, "base", *temperature)
        engine.close()
        # What the environment says between two turns has a score too, which no array of the ledger holds.
        found = [numpy.array(bits, numpy.uint32)[mask[length:]] for bits, (_, length, mask) in zip(scored, chosen, strict=True)]
        return numpy.concatenate(found), held

    def differing(self, path, **kw):
        """({array: log-probs of step 0 that are other bits than the oracle's over the base}, how many there are)."""
        found, held = self.scored_again(path, **kw)
        return {name: int((found != bits).sum()) for name, bits in held.items()}, len(found)

    def test_they_verify_and_their_links_are_those_of_the_rows(self):
        for name in LEDGERS:
            with self.subTest(name):
                rows, path = rows_of(name), ledger_of(name)
                n = sum(int(r["n_compared"]) for r in rows)
                begin, end = metrics.ends([float(r["reward_mean"]) for r in rows])
                self.assertEqual(rig.bitroll("verify", path).splitlines()[-1],
                                 f"ledger: {len(rows)} steps, 0 of {n} log-probs differ, KL 0 at every step, reward {begin:.3f} -> {end:.3f}, root "
                                 + rows[-1]["ledger_link"])
                with h5py.File(path) as file:
                    links = [bytes(link).hex() for link in file["step/link"][:]]
                    self.assertEqual(file["step/n_compared"][:].tolist(), [int(r["n_compared"]) for r in rows])
                    digests = [f"{hi:016x}{lo:016x}" for lo, hi in file["step/adapter_trainer"][:].tolist()]
                self.assertEqual(links, [r["ledger_link"] for r in rows])
                self.assertEqual(digests, [r["digest_trainer"] for r in rows])

    def test_step_0_scored_again_by_the_oracle(self):
        """B is zero there: the base without an adapter gives the same bits. Of the texts of ragged some have two turns."""
        for name in LEDGERS[:2]:
            with self.subTest(name):
                n = int(rows_of(name)[0]["n_compared"])
                self.assertEqual(self.differing(ledger_of(name)), (dict.fromkeys(ARRAYS, 0), n))

    def test_a_text_of_each_prompt_of_small600_scored_again(self):
        """Eight samples a prompt, 16 tokens each: one of them of each prompt of step 0."""
        small = os.path.join(rig.PLACE, "small")
        rig.bitroll("init", "--preset", "small", "--seed", "1", "--out", small)
        n = int(rows_of("small600_seed1")[0]["n_compared"]) // 8
        self.assertEqual(self.differing(ledger_of("small600_seed1"), base=small, stride=8), (dict.fromkeys(ARRAYS, 0), n))

    def test_what_of_ragged_is_the_bases_at_the_last_step(self):
        """Certain tokens: the share that the rows tell, and each of them next to 0."""
        row, path = rows_of("ragged_seed1")[-1], ledger_of("ragged_seed1")
        found, held = self.scored_again(path, int(row["step"]))
        same = found[found == held["rollout"]].view(numpy.float32)
        self.assertEqual(f"{1 - len(same) / len(found):.9g}", row["differ_from_base_share"])
        self.assertGreater(same.min(), -1e-6)
        said = f"of the {len(found)} log-probs {len(same)} are the base's: {int((same == 0).sum())} are 0, the others above -1e-6"
        self.assertTrue(sentence(said), said)

    def test_of_ragged_some_texts_have_two_turns(self):
        """A right second answer is worth half."""
        with h5py.File(ledger_of("ragged_seed1")) as file:
            offset, prompt, mask, reward = (file[name][:] for name in ("seq/offset", "seq/prompt_len", "tokens/mask", "seq/reward"))
        n_other = numpy.diff(offset) - prompt - numpy.add.reduceat(mask, offset[:-1], dtype=numpy.int64)
        self.assertTrue((reward[n_other > 0] < 1).all() and (reward[n_other == 0] == 1).all())
        said = (f"{int((n_other > 0).sum())} of its {len(prompt):,} texts have a second turn, those whose first answer was wrong; "
                f"{int((reward == 0.5).sum())} of the second answers are right")
        self.assertTrue(sentence(said), said)

    def test_of_small600_the_prompts(self):
        with h5py.File(ledger_of("small600_seed1")) as file:
            prompt = file["seq/prompt_len"][:]
        self.assertTrue(sentence(f"prompts of {prompt.min()} to {prompt.max()} tokens on the preset"))

    def test_a_flipped_bit_of_a_copy_is_found_twice(self):
        for slot, name in enumerate(ARRAYS):
            with self.subTest(name):
                path, at = self.flipped(name, slot)
                done = subprocess.run([rig.BITROLL, "verify", path], capture_output=True, text=True)
                self.assertEqual(done.returncode, 1, done.stdout)
                self.assertIn(f"step 0, sequence 0 (uid 'step 0 prompt 0', sample 0), position {at}: /tokens/{name}: bit 0 was flipped", done.stderr)
        self.assertEqual(self.differing(path)[0], {**dict.fromkeys(ARRAYS, 0), name: 1})


if __name__ == "__main__":
    unittest.main()
