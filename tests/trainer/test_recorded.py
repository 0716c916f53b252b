"""The recorded runs of experiments/rl100: the ledger that is committed holds and scores again to the same bits, and the rows give every number
that the table of its README shows."""
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
LEDGER = os.path.join(FOLDER, "results", "E_seed1_ledger.h5")
ARRAYS = ("rollout", "again", "update")
RUNS = ("E_seed1", "E_seed2", "E_seed3", "M1_seed1", "M2_seed1", "M3_seed1")
EXACT = RUNS[:3]
TITLE = ("run", "steps", "log-probs that differ", "largest k3", "first at step", "reward, step 0", "mean of the last 10", "held out, greedy",
         "ledger root")


def rows_of(name):
    return metrics.read(os.path.join(FOLDER, "results", name + ".csv"))


def text_of_readme():
    with open(os.path.join(FOLDER, "README.md"), encoding="utf-8") as file:
        return file.read()


def table():
    """{run: {title of a column: cell}} of the README's table of results."""
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in text_of_readme().splitlines() if line.startswith("|")]
    begin = lines.index(list(TITLE))
    found = {}
    for cells in lines[begin + 2 :]:
        if len(cells) != len(TITLE):
            break
        run = re.fullmatch(r"(\w+)(?: seed (\d))?(?:, cut off)?", cells[0])
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
            f"{heldout[0]:.3f} -> {heldout[-1]:.3f}", rows[-1]["ledger_link"]]


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
                based = [float(r["differ_from_base_share"]) for r in rows]
                self.assertEqual((based[0], based[-1]), (0.0, 1.0))
                first, last = metrics.ends([float(r["reward_mean"]) for r in rows])
                self.assertGreaterEqual(last - first, 0.3)
                self.assertLessEqual(share(rows, "zero_spread_share"), 0.6)
        said = "{:.1f}, {:.1f} and {:.1f} %".format(*(100 * share(rows_of(name), "zero_spread_share") for name in EXACT))
        self.assertIn(f"groups without spread {said}", " ".join(text_of_readme().split()))

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
        """A copy of the ledger; slot: which sampled token of step 0 has another lowest bit in the array."""
        path = os.path.join(rig.PLACE, name + ".h5")
        shutil.copyfile(LEDGER, path)
        with h5py.File(path, "r+") as file:
            at = int(numpy.flatnonzero(file["tokens/mask"][: file["seq/offset"][1]])[slot])
            bits = file["tokens/" + name][:].view(numpy.uint32)
            bits[at] ^= 1
            file["tokens/" + name][:] = bits.view(numpy.float32)
        return path, at

    def scored_again(self, path):
        """({array: log-probs of step 0 that are other bits than the oracle's over the base}, how many there are)."""
        with h5py.File(path) as file:
            offset, prompt = (file["seq/" + name][:] for name in ("offset", "prompt_len"))
            n_seq = int(file["step/seq_begin"][1])
            ids, mask = (file["tokens/" + name][: offset[n_seq]] for name in ("id", "mask"))
            held = {name: file["tokens/" + name][: offset[n_seq]].view(numpy.uint32)[mask == 1].tolist() for name in ARRAYS}
            self.assertEqual(set(file["seq/temperature"][:n_seq].tolist()), {1.0})
        texts = []
        for i in range(n_seq):
            one = ids[offset[i] : offset[i + 1]].tolist()
            texts.append(Sample(f"text {i}", 0, one[: prompt[i]]))
            texts[-1].tokens = one[prompt[i] :]
        engine = Engine(rig.LIBRARY, self.base, {})
        found = [b for bits in engine.score(texts, "base", 1.0) for b in bits]
        engine.close()
        return {name: sum(a != b for a, b in zip(found, bits, strict=True)) for name, bits in held.items()}, len(found)

    def test_it_verifies_and_its_links_are_those_of_the_rows(self):
        rows = rows_of("E_seed1")
        said = rig.bitroll("verify", LEDGER).splitlines()[-1]
        self.assertRegex(said, r"^ledger: 100 steps, 0 of 92691 log-probs differ, KL 0 at every step, reward 0\.363 -> 0\.982, root "
                               + rows[-1]["ledger_link"] + "$")
        with h5py.File(LEDGER) as file:
            links = [bytes(link).hex() for link in file["step/link"][:]]
            self.assertEqual(file["step/n_compared"][:].tolist(), [int(r["n_compared"]) for r in rows])
            digests = [f"{hi:016x}{lo:016x}" for lo, hi in file["step/adapter_trainer"][:].tolist()]
        self.assertEqual(links, [r["ledger_link"] for r in rows])
        self.assertEqual(digests, [r["digest_trainer"] for r in rows])

    def test_step_0_scored_again_by_the_oracle(self):
        """B is zero there: the base without an adapter gives the same bits."""
        n = int(rows_of("E_seed1")[0]["n_compared"])
        self.assertEqual(self.scored_again(LEDGER), (dict.fromkeys(ARRAYS, 0), n))

    def test_a_flipped_bit_of_a_copy_is_found_twice(self):
        for slot, name in enumerate(ARRAYS):
            with self.subTest(name):
                path, at = self.flipped(name, slot)
                done = subprocess.run([rig.BITROLL, "verify", path], capture_output=True, text=True)
                self.assertEqual(done.returncode, 1, done.stdout)
                self.assertIn(f"step 0, sequence 0 (uid 'step 0 prompt 0', sample 0), position {at}: /tokens/{name}: bit 0 was flipped", done.stderr)
        self.assertEqual(self.scored_again(path)[0], {**dict.fromkeys(ARRAYS, 0), name: 1})


if __name__ == "__main__":
    unittest.main()
