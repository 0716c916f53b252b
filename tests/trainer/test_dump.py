"""`python -m bitroll.dump` against `bitroll dump --stage-hash`, line by line."""
import json
import os
import subprocess
import sys
import unittest
from unittest import mock

import rig


class Dump(unittest.TestCase):
    def lines(self, texts, *options):
        path = os.path.join(rig.PLACE, "texts.jsonl")
        with open(path, "w", encoding="ascii") as file:
            file.writelines(json.dumps(text) + "\n" for text in texts)
        command = [sys.executable, "-B", "-m", "bitroll.dump", "--in", path, *options]
        done = subprocess.run(command, capture_output=True, text=True, env=rig.environment())
        return path, done

    def engine(self, path, *options):
        out = rig.bitroll("dump", "--stage-hash", "--backend", "oracle", "--in", path, *options)
        return [line for line in out.splitlines() if "#" in line.split()[0]]

    def test_the_engines_lines(self):
        folder, adapter = rig.checkpoint("nano")
        config = rig.LIBRARY.config(folder)
        ids = rig.sequences(config, (70, 2, 18))
        texts = [{"prompt": ids[0]}, {"prompt": ids[1], "uid": "named", "temperature": 0.7}, {"prompt": ids[2]}]
        path, done = self.lines(texts, "--model", folder, "--adapter", adapter)
        self.assertEqual(done.returncode, 0, done.stderr)
        engine = self.engine(path, "--model", folder, "--adapter", f"a={adapter}", "--adapter-override", "a")
        self.assertEqual(done.stdout.splitlines(), engine)
        self.assertTrue(any(line.startswith("named#0 0 ") for line in engine))
        base = self.engine(path, "--model", folder)
        self.assertNotEqual(base, engine)
        self.assertEqual(self.lines(texts, "--model", folder)[1].stdout.splitlines(), base)

    def test_what_it_cannot_do_is_a_sentence(self):
        folder, _ = rig.checkpoint("nano")
        for texts, options, said in (([{"prompt": [5]}], ("--model", folder), "line 1: 1 token ids: expected two or more"),
                                     ([], ("--model", folder), "no text in it"),
                                     ([{"prompt": [5, 6]}], ("--model", folder, "--adapter", "/none"), "/none")):
            _, done = self.lines(texts, *options)
            self.assertEqual(done.returncode, 2, done.stderr)
            last = done.stderr.splitlines()[-1]  # behind what Megatron-Core warns of
            self.assertTrue(last.startswith("dump: ") and said in last, done.stderr)

    def test_a_package_on_the_callers_path_is_found(self):
        code = "import bitroll, elsewhere; print(bitroll.__file__)"
        place = os.path.join(rig.PLACE, "site")
        os.makedirs(place)
        with open(os.path.join(place, "elsewhere.py"), "w", encoding="ascii"):
            pass
        for theirs in (place, os.pathsep.join(("/none", place))):
            with self.subTest(theirs), mock.patch.dict(os.environ, PYTHONPATH=theirs):
                done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, env=rig.environment())
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertTrue(done.stdout.startswith(os.path.join(rig.TREE, "trainer_bridge", "bitroll")), done.stdout)
        with mock.patch.dict(os.environ):
            os.environ.pop("PYTHONPATH", None)
            self.assertEqual(rig.environment()["PYTHONPATH"], os.path.join(rig.TREE, "trainer_bridge"))  # no empty entry, the current folder


if __name__ == "__main__":
    unittest.main()
