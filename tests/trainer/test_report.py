"""A run's report out of a small CSV: zeros that are seen as zeros, a page that needs no other file, events that read back."""
import base64
import contextlib
import csv
import io
import os
import re
import struct
import subprocess
import sys
import unittest

import rig
from bitroll.rl import metrics, report
from tensorboardX.proto import event_pb2

os.environ["BITROLL"] = rig.BITROLL
COLUMNS = ("step", "reward_mean", "mismatch_count", "n_compared", "k3", "heldout_accuracy", "digest_rollout", "digest_trainer", "ledger_link",
           "sync_ms", "rollout_ms", "step_ms", "some_new_column")


def run_folder(name, arm="E", seed=1, steps=4, k3=0.0, cut=False, columns=COLUMNS, note="a <b> & c"):
    folder = os.path.join(rig.PLACE, name)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "run.yaml"), "w", encoding="ascii") as file:
        file.write(f"arm: {arm}\nseed: {seed}\nsteps: {steps}\nnote: {note}\n")
    with open(os.path.join(folder, "metrics.csv"), "w", encoding="ascii", newline="") as file:
        out = csv.writer(file)
        out.writerow(columns)
        for i in range(steps):
            row = dict(step=i, reward_mean=0.25 + 0.125 * i + 0.01 * seed, mismatch_count=7 if k3 else 0, n_compared=64, k3=k3 * (i + 1),
                       heldout_accuracy="" if i else 0.5, digest_rollout=f"{i:032x}", digest_trainer=f"{i:032x}", ledger_link=f"{i:064x}",
                       sync_ms=2.0, rollout_ms=10.0, step_ms=40.0, some_new_column=1.5)
            out.writerow([row[c] for c in columns])
        if cut:
            file.write(",".join(["4"] * len(columns)))  # cut within its last field
    return folder


def events(folder):
    """{name: {step: value}} of a folder's event files: records of length, its checksum, data, its checksum."""
    found = {}
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as file:
            data = file.read()
        while data:
            n = struct.unpack("<Q", data[:8])[0]
            event = event_pb2.Event.FromString(data[12 : 12 + n])
            data = data[16 + n :]
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def text(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def check_plots(test, folder):
    for name in ("reward", "k3", "mismatch", "sync"):
        with open(os.path.join(folder, "plots", name + ".png"), "rb") as file:
            test.assertEqual(file.read(8), b"\x89PNG\r\n\x1a\n")
        test.assertEqual('id="zero"' in text(os.path.join(folder, "plots", name + ".svg")), name in ("k3", "mismatch"), name)


def check_page(test, folder):
    """The page, which loads nothing and shows the four plots."""
    page = text(os.path.join(folder, "report.html"))
    test.assertEqual(len(re.findall(r"src='data:image/svg\+xml;base64,", page)), 4)
    test.assertEqual(re.findall(r"(?:src|href)\s*=\s*['\"](?!data:)|https?://|@import|url\(", page), [])
    drawn = base64.b64decode(re.search(r"base64,([^']+)'", page).group(1)).decode()
    test.assertIn("<svg", drawn)
    return page


class OneRun(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = run_folder("one", cut=True)
        report.report([cls.folder], cls.folder)
        cls.page = text(os.path.join(cls.folder, "report.html"))

    def test_plots(self):
        check_plots(self, self.folder)

    def test_the_page_needs_no_other_file(self):
        check_page(self, self.folder)

    def test_what_the_page_says(self):
        for words in ("0 of 256 log-probs differ in the exact arm", f"{3:032x}", f"{3:064x}", "at every step", "no ledger in this folder",
                      "10.0 (25%)", "2.0 (5%)", "28.0 (70%)", "E seed 1", "a &lt;b&gt; &amp; c"):
            self.assertIn(words, self.page)

    def test_a_line_cut_while_it_was_written_does_not_count(self):
        self.assertEqual(len(report.Run(self.folder).rows), 4)

    def test_events(self):
        found = events(os.path.join(self.folder, "tensorboard"))
        self.assertEqual(sorted(found["critic/rewards/mean"]), [0, 1, 2, 3])
        self.assertAlmostEqual(found["critic/rewards/mean"][2], 0.51, places=6)
        self.assertEqual(set(found["rollout_corr/k3_kl"].values()), {0.0})
        self.assertAlmostEqual(found["timing_s/gen"][1], 0.010, places=6)
        self.assertEqual(found["val-core/arithmetic/acc/mean@1"], {0: 0.5})
        self.assertEqual(set(found["bitroll/some_new_column"].values()), {1.5})
        self.assertFalse([name for name in found if "digest" in name])


class ManyRuns(unittest.TestCase):
    def test_arms_and_seeds(self):
        folders = [run_folder(f"E{s}", seed=s) for s in (1, 2, 3)] + [run_folder("M1", arm="M1", k3=1e-9)]
        out = os.path.join(rig.PLACE, "many")
        page = text(report.report(folders, out))
        self.assertIn("<th>held out, greedy</th>", page)
        self.assertIn("0 of 768 log-probs differ in the exact arm", page)  # a control arm does not count
        self.assertIn("4.000e-09", page)
        self.assertEqual(len(os.listdir(os.path.join(out, "tensorboard"))), 4)
        steps, mean, least, greatest = report.curves([report.Run(f) for f in folders], "reward_mean")["E"]
        self.assertEqual(steps, [0, 1, 2, 3])
        for found, wanted in ((mean, 0.27), (least, 0.26), (greatest, 0.28)):
            self.assertAlmostEqual(found[0], wanted)

    def test_other_settings_are_another_curve(self):
        runs = [report.Run(run_folder(name, seed=seed, note=note)) for name, seed, note in
                (("E_seed1", 1, "one"), ("E_seed2", 2, "one"), ("ragged_seed1", 1, "other"))]
        report.name_curves(runs)
        self.assertEqual([r.curve for r in runs], ["E", "E", "ragged"])
        self.assertEqual(set(report.curves(runs, "reward_mean")), {"E", "ragged"})
        labels = [t.get_text() for t in report.plot(runs, **report.PLOTS["reward"]).axes[0].get_legend().get_texts()]
        self.assertEqual(labels, ["E exact, 2 seeds", "ragged"])

    def test_zero_lies_apart_from_the_smallest_value(self):
        """On the k3 axis, a curve of zeros lies on the line of zero and the smallest other value above it."""
        runs = [report.Run(run_folder("E1")), report.Run(run_folder("M1", arm="M1", k3=3e-13))]
        axes = report.plot(runs, **report.PLOTS["k3"]).axes[0]
        line = [x for x in axes.get_lines() if x.get_gid() == "zero"]
        self.assertEqual([list(x.get_ydata()) for x in line], [[0.0, 0.0]])
        low, high = axes.get_ylim()
        at = [axes.transAxes.inverted().transform(axes.transData.transform((0, y)))[1] for y in (0.0, 3e-13, 1.2e-12)]
        self.assertTrue(low < 0 < high and 0 < at[0] and at[0] + 0.1 < at[1] < at[2] < 1, at)

    def test_sentences(self):
        with self.assertRaisesRegex(ValueError, "there is no column k3"):
            report.Run(run_folder("less", columns=tuple(c for c in COLUMNS if c != "k3")))
        with self.assertRaisesRegex(ValueError, "no step was recorded"):
            report.Run(run_folder("none", steps=0))
        torn = run_folder("torn")
        with open(os.path.join(torn, "metrics.csv"), "a", encoding="ascii") as file:
            file.write("4,1\n")
        with self.assertRaisesRegex(ValueError, "line 6 has too few fields"):
            report.Run(torn)
        for name, data, sentence in (("wide", b"step,k3\n0," + b"1" * 200_000 + b"\n", "no table: field larger than field limit"),
                                     ("mac", b"step,k3\r0,1\r1,1\n", "no table: new-line character seen in unquoted field"),
                                     ("ragged", b"\x89HDF\r\n1,2\n", "line 2 has too many fields: expected one a column"),
                                     ("bytes", b"\0\1\xff\n\0\n", "could not convert string to float"), ("empty", b"", "no step was recorded")):
            path = os.path.join(run_folder("table-" + name), "metrics.csv")
            with open(path, "wb") as file:
                file.write(data)
            with self.subTest(name), self.assertRaisesRegex(ValueError, "^" + re.escape(f"{path}: {sentence}")):
                report.Run(os.path.dirname(path))
            with self.subTest(name), self.assertRaisesRegex(ValueError, "^" + re.escape(path) + ": "):
                metrics.Table(path, 1)  # a run that goes on
        for name, settings, sentence in (("list", "[1]", "run.yaml: expected a mapping, found list"), ("open", "[1", "run.yaml: not YAML")):
            folder = run_folder(name)
            with open(os.path.join(folder, "run.yaml"), "w", encoding="utf-8") as file:
                file.write(settings)
            with contextlib.redirect_stderr(io.StringIO()) as said:
                self.assertEqual(report.main([folder]), 2)
            self.assertIn(sentence, said.getvalue())
        with contextlib.redirect_stderr(io.StringIO()) as said, self.assertRaises(SystemExit):
            report.main(["a", "b"])
        self.assertIn("--out DIR is needed", said.getvalue())

    def test_a_python_whose_matplotlib_is_broken(self):
        place = os.path.join(rig.PLACE, "broken")
        for code, said in (("raise ImportError('numpy.core.multiarray failed to import')", "a library of this Python cannot be loaded (numpy.core."),
                           ("raise ModuleNotFoundError(name='matplotlib')", "this Python has no matplotlib, which is needed here: ")):
            os.makedirs(place, exist_ok=True)
            with open(os.path.join(place, "matplotlib.py"), "w", encoding="ascii") as file:
                file.write(code)
            done = subprocess.run([sys.executable, "-B", "-m", "bitroll.rl.report", run_folder("any")], capture_output=True, text=True,
                                  env=dict(os.environ, PYTHONPATH=os.pathsep.join((place, *sys.path))))
            self.assertEqual((done.returncode, len(done.stderr.splitlines())), (2, 1), done.stderr)
            self.assertIn(f"report: {said}", done.stderr)


if __name__ == "__main__":
    unittest.main()
