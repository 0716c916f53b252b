"""How the programs of a run end: what they cannot do is one sentence and a status, and a stdout that takes nothing is not overlooked."""
import contextlib
import errno
import io
import json
import os
import subprocess
import sys
import unittest

import rig
from bitroll import program, tensors
from bitroll.rl import base_model, expand, report, train, train_base

os.environ["BITROLL"] = rig.BITROLL
PROGRAMS = {"base_model": base_model, "expand": expand, "report": report, "train": train, "train_base": train_base}


def ended(name, *arguments):
    """(status, lines of stderr) of the program in this process."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = PROGRAMS[name].main([*arguments])
    return status, said.getvalue().splitlines()


def written(name, data):
    path = os.path.join(rig.PLACE, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
    return path


def checkpoint_file(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


class Sentences(unittest.TestCase):
    def says(self, sentence, name, *arguments):
        with self.subTest(name, arguments=arguments):
            self.assertEqual(ended(name, *arguments), (2, [f"{name}: {sentence}"]))

    def test_what_is_missing_or_in_the_way(self):
        none, out = os.path.join(rig.PLACE, "none"), os.path.join(rig.PLACE, "out")
        taken, model = written("taken", b"a file"), rig.checkpoint("pico")[0]
        self.says(f"{none}/recipe.json: No such file or directory", "base_model", "--from", none, "--out", out)
        self.says(f"init: {taken}/in: cannot make the folder: Not a directory", "base_model", "--out", taken + "/in")
        self.says(f"{none}/config.json: No such file or directory", "expand", "--model", none, "--out", out)
        self.says(f"{taken}: File exists", "expand", "--model", model, "--out", taken)
        self.says(f"{none}/metrics.csv: No such file or directory", "report", none)
        self.says(f"{none}: No such file or directory", "train", "--config", none, "--model", model, "--out", out)
        self.says(f"{taken}: File exists", "train_base", "--out", taken)
        status, lines = ended("train_base", "--preset", "none", "--out", os.path.join(rig.PLACE, "preset"))
        self.assertEqual((status, len(lines)), (2, 1))
        self.assertIn("train_base: init: preset 'none': expected one of pico, ", lines[0])
        self.assertFalse(os.path.exists(out))
        self.assertFalse(os.path.exists(os.path.join(rig.PLACE, "preset")))
        os.mkdir(os.path.join(rig.PLACE, "preset"))
        ended("train_base", "--preset", "none", "--out", os.path.join(rig.PLACE, "preset"))
        self.assertTrue(os.path.exists(os.path.join(rig.PLACE, "preset")))  # the user's own

    def test_numbers_of_a_training_of_a_base(self):
        for option, value in (("--every", "0"), ("--rows", "12"), ("--rank", "x"), ("--noise", "nan"), ("--seed", "-1"), ("--steps", str(1 << 40))):
            with self.subTest(option), self.assertRaises(SystemExit) as end, contextlib.redirect_stderr(io.StringIO()) as said:
                train_base.main(["--out", "out", option, value])
            self.assertEqual(end.exception.code, 2)
            self.assertIn(f"error: argument {option}: ", said.getvalue())

    def test_a_recipe_that_is_none(self):
        for i, (data, said) in enumerate(((b"[]", "expected a JSON object, found list"), (b"{}", "preset is None: expected a text"),
                                          (b'{"preset": "pico", "seed": "1"}', "seed is '1': expected a number"))):
            path = written(f"recipe{i}/recipe.json", data)
            self.says(f"{path}: {said}", "base_model", "--from", os.path.dirname(path), "--out", os.path.join(rig.PLACE, "out"))

    def test_a_checkpoint_that_is_none(self):
        for i, (name, data, said) in enumerate((
                ("config.json", b"3", "expected a JSON object, found int"), ("config.json", b"\xff{", "not JSON: "),
                ("model.safetensors.index.json", b'{"weight_map": [1]}', "expected a weight_map of names of files"),
                ("model.safetensors", b"", "a header of 0 bytes in a file of 0"),
                ("model.safetensors", b"\xff" * 9, "a header of "), ("model.safetensors", checkpoint_file([]), "expected a JSON object, found list"),
                ("model.safetensors", checkpoint_file(b"\xff"), "not JSON: "),
                ("model.safetensors", checkpoint_file({"a": 1}), "a: expected a dtype, a shape and two data_offsets"),
                ("model.safetensors", checkpoint_file({"a": dict(dtype="F8", shape=[0], data_offsets=[0, 0])}), "a: dtype 'F8': expected one of BF16"),
                ("model.safetensors", checkpoint_file({"a": dict(dtype="U8", shape=[-2, -2], data_offsets=[0, 4])}, b"1234"), "a of shape [-2, -2] has"),
                ("model.safetensors", checkpoint_file({"a": dict(dtype="U8", shape=[4], data_offsets=[-4, 0])}), "a of shape [4] has bytes -4 to 0"),
                ("model.safetensors", checkpoint_file({"a.weight_packed": dict(dtype="U8", shape=[16], data_offsets=[0, 16])}, bytes(16)),
                 "a.weight_packed: expected a tensor a.weight_scale"))):
            folder = os.path.join(rig.PLACE, f"model{i}")
            if name != "config.json":
                written(f"model{i}/config.json", b"{}")
            path = written(f"model{i}/{name}", data)
            with self.subTest(name, data=data):
                status, lines = ended("expand", "--model", folder, "--out", os.path.join(folder, "out"))
                self.assertEqual((status, len(lines)), (2, 1))
                self.assertTrue(lines[0].startswith(f"expand: {folder if 'packed' in said else path}: {said}"), lines)
        good = {"a": dict(dtype="U8", shape=[2], data_offsets=[0, 2])}
        self.assertEqual(tensors.read_safetensors(written("good", checkpoint_file(good, b"\5\6")))["a"].tolist(), [5, 6])


class Ends(unittest.TestCase):
    def test_a_stdout_that_is_full(self):
        modules = [f"rl.{name}" for name in PROGRAMS] + ["dump", "names"]
        for module, unbuffered in (*((module, "") for module in modules), ("rl.expand", "1"), ("names", "1")):
            name = module.removeprefix("rl.")
            with self.subTest(name, unbuffered=unbuffered), open("/dev/full", "wb") as full:
                done = subprocess.run([sys.executable, "-W", "ignore", "-m", f"bitroll.{module}", "--help"], stdout=full, stderr=subprocess.PIPE,
                                      text=True, env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), PYTHONUNBUFFERED=unbuffered))
                self.assertEqual((done.returncode, done.stderr.splitlines()[-1:]), (2, [f"{name}: standard output: {os.strerror(errno.ENOSPC)}"]))
                self.assertNotIn("Traceback", done.stderr)

    def test_status(self):
        def fails(error):
            def work():
                raise error
            with contextlib.redirect_stderr(io.StringIO()) as said:
                return program.status_of("p", work), said.getvalue()
        self.assertEqual(program.status_of("p", lambda: None), 0)
        self.assertEqual(program.status_of("p", lambda: 7), 7)
        self.assertEqual(fails(FloatingPointError("not finite")), (1, "p: not finite\n"))
        self.assertEqual(fails(KeyError("no such")), (2, "p: no such\n"))
        self.assertEqual(fails(FileNotFoundError(errno.ENOENT, "none", b"x")), (2, "p: x: none\n"))


if __name__ == "__main__":
    unittest.main()
