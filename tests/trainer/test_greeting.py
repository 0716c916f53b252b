"""What a trainer finds at the other end: nobody, or a worker of another base, other adapters, another tokenizer. Each is a sentence, and the worker
serves the next one."""
import contextlib
import ctypes
import io
import os
import shutil
import subprocess
import time
import unittest
from unittest import mock

import rig
from bitroll import abi, connection, wire
from bitroll.bridge import Remote
from test_bridge import SETTINGS, WORKER, rigged


class Greeting(unittest.TestCase):
    def test_nobody_there(self):
        folder, _ = rig.checkpoint("pico")
        path, begin = os.path.join(rig.PLACE, "nobody.sock"), time.monotonic()
        with mock.patch.object(connection, "SAY_MS", 50), contextlib.redirect_stderr(io.StringIO()) as said, self.assertRaises(abi.Error) as caught:
            Remote(rig.LIBRARY, folder, "unix:" + path, SETTINGS, connect_ms=500)
        self.assertLess(time.monotonic() - begin, 5)
        self.assertEqual(caught.exception.status, abi.CONSTANTS["BR_E_NOT_FOUND"])
        self.assertIn(f"{path}: nobody listened there for 0.5 s: start `bitroll-worker --model {folder} --socket {path} --adapter policy= "
                      f"--swap-rank {rig.RANK} --swap-alpha 64`", str(caught.exception))
        self.assertEqual(said.getvalue(), f"bitroll: waiting up to 0 s more for a bitroll-worker that listens at {path}\n")
        with self.assertRaisesRegex(ValueError, "expected unix:PATH or mpi:RANK"):
            Remote(rig.LIBRARY, folder, "/no/form")

    def test_another_base(self):
        other, _ = rig.checkpoint("pico", seed=2)
        with rigged() as r:
            with self.assertRaises(abi.Error) as caught:
                r.remote(folder=other)
            self.assertEqual(caught.exception.status, abi.CONSTANTS["BR_E_MISMATCH"])
            for part in ("base weights", rig.LIBRARY.weights_digest(other), r.engine.weights_digest()):
                self.assertIn(part, str(caught.exception))
            r.remote()  # it serves the next one

    def test_other_adapters(self):
        """At the greeting, from a worker that serves the next one."""
        folder, _ = rig.checkpoint("pico")
        for name, options, sentence in (
                ("none.sock", [], "the worker has no adapter that can be swapped: start bitroll-worker with such as --adapter policy= --swap-rank 32 "
                                  "--swap-alpha 64"),
                ("rank.sock", ["--adapter", "policy=", "--swap-rank", "16"], "the trainer's adapters have rank 32 and alpha 64, the worker's rank "
                 "16 and alpha 32: start bitroll-worker with --swap-rank 32 --swap-alpha 64, or set r: 16 and lora_alpha: 32 in the trainer's "
                 "settings")):
            path = os.path.join(rig.PLACE, name)
            worker = subprocess.Popen([WORKER, "--model", folder, "--socket", path, "--backend", "oracle", *options], stdout=subprocess.DEVNULL)
            self.addCleanup(worker.wait)
            self.addCleanup(worker.kill)
            with self.assertRaises(abi.Error) as caught:
                Remote(rig.LIBRARY, folder, "unix:" + path, SETTINGS, wait_ms=20000)
            self.assertEqual(caught.exception.status, abi.CONSTANTS["BR_E_MISMATCH"])
            self.assertIn(sentence, str(caught.exception))
            self.assertIsNone(worker.poll())

    def test_too_few_requests(self):
        with rigged("--requests", "4") as r:
            self.assertEqual(r.remote(requests=4).n_request, 4)
            r.lose(r.remotes[0])
            with self.assertRaises(abi.Error) as caught:
                r.remote(requests=5)
            self.assertEqual((caught.exception.status, str(caught.exception)), (
                abi.CONSTANTS["BR_E_LIMIT"], "the worker holds 4 requests at once, 5 are needed here: start bitroll-worker with --requests 5 or more"))
            self.assertEqual(r.remote(requests=4).n_request, 4)  # it serves the next one

    def test_an_error_before_the_first_credit(self):
        """What it is about was looked up in tables that were not there yet: an AttributeError in place of the worker's sentence."""
        text = b"a disk is full"
        raw = (ctypes.c_char * len(text)).from_buffer_copy(text)

        def early(remote, _):
            error = wire.made("error")
            error.text.p, error.text.n = ctypes.addressof(raw), len(text)
            remote.take_error(0, error)
        with rigged() as r:
            with mock.patch.object(connection.Connection, "first_credit", early), self.assertRaisesRegex(abi.Error, "^a disk is full$"):
                r.remote()
            r.remote()

    def test_another_tokenizer(self):
        other = os.path.join(rig.PLACE, "other-tokenizer")
        shutil.copytree(rig.checkpoint("pico")[0], other)
        with open(os.path.join(other, "tokenizer.json"), "w", encoding="ascii") as file:
            file.write("{}")
        with rigged() as r, self.assertRaisesRegex(abi.Error, "differ in: tokenizer"):
            r.remote(folder=other)


if __name__ == "__main__":
    unittest.main()
