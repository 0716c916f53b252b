"""`python -m bitroll.dump` against `bitroll dump --stage-hash`, line by line."""
import contextlib
import io
import json
import os
import subprocess
import sys
import unittest
from unittest import mock

import rig
from bitroll import dump


class Dump(unittest.TestCase):
    def texts(self, texts):
        path = os.path.join(rig.PLACE, "texts.jsonl")
        with open(path, "w", encoding="ascii") as file:
            file.writelines(json.dumps(text) + "\n" for text in texts)
        return path

    def lines(self, texts, *options):
        path = self.texts(texts)
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

    def test_the_adapters_that_the_lines_name(self):
        """They were ignored: every op of such a text differed from the engine's, where nothing is wrong."""
        folder, red = rig.checkpoint("pico")
        config = rig.LIBRARY.config(folder)
        named = [f"red={red}"]
        for name, rank in (("blue", rig.RANK), ("green", 8)):  # one takes the place of red in the model, the other needs a model of its own
            named.append(f"{name}={folder}-{name}")
            rig.bitroll("init", "--lora-only", "--out", folder, "--lora-rank", str(rank), "--lora-seed", "7", "--lora-out", f"{folder}-{name}")
        adapters = [option for one in named for option in ("--adapter", one)]
        ids = rig.sequences(config, (9, 5, 4, 7, 6, 3))
        texts = [{"prompt": ids[i], **({"adapter": name} if name else {})} for i, name in enumerate((None, "red", "blue", "base", "green", "red"))]
        texts[0].update(uid=None, adapter=None, temperature=None)  # as if they were not there
        path, done = self.lines(texts, "--model", folder, *adapters)
        self.assertEqual(done.returncode, 0, done.stderr)
        engine = self.engine(path, "--model", folder, *adapters)
        self.assertEqual(done.stdout.splitlines(), engine)
        _, every = self.lines(texts, "--model", folder, "--adapter", red)
        self.assertEqual(every.stdout.splitlines(), self.engine(path, "--model", folder, *adapters, "--adapter-override", "red"))

    def test_what_it_cannot_do_is_a_sentence(self):
        folder, adapter = rig.checkpoint("pico")
        model, two = ("--model", folder), {"prompt": [5, 6]}
        n_vocab = rig.LIBRARY.config(folder).n_vocab
        for texts, options, said in (([{"prompt": [5]}], (), "texts.jsonl: line 1: 1 token ids: expected two or more"), ([], (), "no text in it"),
                                     ([two, 3], (), 'texts.jsonl: line 2: expected {"prompt": [ids]}, token ids 0 to '),
                                     ([{"uid": "a"}], (), 'texts.jsonl: line 1: expected {"prompt": [ids]}'),
                                     ([{"prompt": [5, n_vocab]}], (), 'texts.jsonl: line 1: expected {"prompt": [ids]}'),
                                     ([{**two, "temperature": "x"}], (), "line 1: uid '0', temperature 'x', adapter 'base': expected text, a number"),
                                     ([{**two, "uid": 5}], (), "texts.jsonl: line 1: uid 5, temperature 1, adapter 'base': expected text, a number"),
                                     ([{**two, "uid": "1"}, two], (), "texts.jsonl: 1#0: 2 texts: expected a uid of each"),
                                     ([two], ("--adapter", "red="), "--adapter red=: expected DIR or NAME=DIR"),
                                     ([two], ("--adapter", f"={adapter}"), "expected DIR or NAME=DIR"),
                                     ([two], ("--adapter", f"base={adapter}"), "and a name other than base"),
                                     ([two], ("--adapter", f"a={adapter}", "--adapter", "b=/none"), "/none/adapter_config.json: No such file"),
                                     ([{**two, "uid": "u", "adapter": "red"}], ("--adapter", f"blue={adapter}"),
                                      "texts.jsonl: u#0: adapter 'red': expected --adapter red=DIR, or one DIR for every text"),
                                     ([two], ("--adapter", adapter, "--adapter", f"a={adapter}"), "every text runs with it: expected no other"),
                                     ([two], ("--adapter", f"a={adapter}", "--adapter", f"a={adapter}"), "expected each name once"),
                                     ([two], ("--adapter", "/none"), "/none/adapter_config.json: No such file or directory")):
            with self.subTest(said):
                self.says(said, *model, *options, "--in", self.texts(texts))
        broken = os.path.join(rig.PLACE, "broken")
        os.mkdir(broken)
        for text, said in (("{", "not JSON: "), ('{"r": "x"}', "r 'x', lora_alpha None: expected two numbers")):
            with open(os.path.join(broken, "adapter_config.json"), "w", encoding="ascii") as file:
                file.write(text)
            self.says(f"{broken}/adapter_config.json: {said}", *model, "--adapter", broken, "--in", self.texts([two]))

    def test_a_rollout_is_no_list_of_texts(self):
        """It said that a byte cannot be decoded, and not of which file."""
        folder, _ = rig.checkpoint("pico")
        path = os.path.join(rig.PLACE, "rollout.h5")
        with open(path, "wb") as file:
            file.write(b"\x89HDF\r\n\x1a\n")
        said = f'{path}: not text: expected a {{"prompt": [ids]}} a line; a rollout (.h5) is for `bitroll dump` alone'
        self.says(said, "--in", path, "--model", folder)

    def says(self, sentence, *options):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            status = dump.main([*options])
        lines = said.getvalue().splitlines()
        self.assertEqual((status, len(lines)), (2, 1), lines)
        self.assertTrue(lines[0].startswith("dump: ") and sentence in lines[0], lines)

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
