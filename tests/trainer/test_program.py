"""How the programs of a run end: what they cannot do is one sentence and a status, and a stdout that takes nothing is not overlooked."""
import contextlib
import errno
import io
import json
import os
import shutil
import subprocess
import sys
import unittest
import unittest.mock

import rig
import rl_rig
import torch
from torch.distributed.checkpoint.api import CheckpointException
from bitroll import abi, program, tensors
from bitroll.bridge import Busy
from bitroll.rl import bars, base_model, expand, failures, metrics, policy, report, resume, train, train_base

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
        config, bare = rl_rig.config("plain"), os.path.dirname(written("bare/config.json", b"{}"))
        neither = "expected model.safetensors.index.json or model.safetensors in it, found neither"
        for folder, said in ((none, f"{none}/config.json: No such file or directory"), (bare, f"{bare}: {neither}")):
            self.says(said, "train", "--config", config, "--model", folder, "--out", out)
            self.says(said, "train", "--config", config, "--model", model, "--rollout-model", folder, "--out", out)
        self.says(f"{bare}: {neither}", "expand", "--model", bare, "--out", out)
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
                done = subprocess.run([sys.executable, "-m", f"bitroll.{module}", "--help"], stdout=full, stderr=subprocess.PIPE,
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
        self.assertEqual(fails(KeyboardInterrupt()), (130, "p: stopped by SIGINT\n"))
        self.assertEqual(fails(FileNotFoundError(errno.ENOENT, "none", b"x")), (2, "p: x: none\n"))

    def full(self, path, *arguments, is_part=True):
        """The program stops at the file `path`, whose disk takes nothing; what was there is left."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink("/dev/full", path + ".part" if is_part else path)
        if is_part:
            written(path, b"the old one")
        with self.subTest(path), contextlib.redirect_stdout(io.StringIO()):
            status, lines = ended(*arguments)
            self.assertEqual((status, lines[-1]), (2, f"{arguments[0]}: {path}: {os.strerror(errno.ENOSPC)}"))
            if is_part:
                with open(path, "rb") as file:
                    self.assertEqual(file.read(), b"the old one")
        shutil.rmtree(os.path.dirname(path))

    def test_a_disk_that_is_full(self):
        """The sentence did not say what could not be written: open names a file, but write, flush and close do not."""
        model, out = rig.checkpoint("pico")[0], os.path.join(rig.PLACE, "full")
        config = rl_rig.config("full", steps=1, batch=dict(prompts=1, samples=2), heldout=dict(prompts=0))
        base = "train_base", "--preset", "pico", "--out", out, "--rows", "128", "--rank", "4", "--steps", "1"
        for name in ("model.safetensors", "config.json"):
            self.full(os.path.join(out, name), "expand", "--model", model, "--out", out)
        for name in ("run.yaml", "metrics.csv", "adapter_last_step/adapter_model.safetensors", "adapter/adapter_config.json"):
            self.full(os.path.join(out, name), "train", "--config", config, "--model", model, "--out", out)
            shutil.rmtree(out, ignore_errors=True)
        with unittest.mock.patch.object(train_base, "accuracy", lambda *_: (0.0, 0.0)):
            for name in ("log.csv", "recipe.json"):
                self.full(os.path.join(out, name), *base, is_part=name == "recipe.json")
        parts = dict.fromkeys(("Run", "name_curves", "write_plots", "write_events"), unittest.mock.DEFAULT)
        with unittest.mock.patch.multiple(report, **parts, page=lambda *_: "page"):
            self.full(os.path.join(out, "report.html"), "report", out)
        table = metrics.Table(os.path.join(rig.PLACE, "full.csv"))
        table.close()
        table.file = open("/dev/full", "a", encoding="ascii")  # noqa: SIM115 closed by close()
        for work in (lambda: table.append(dict.fromkeys(metrics.COLUMNS)), table.close):
            with self.assertRaises(OSError) as found:
                work()
            self.assertEqual((found.exception.errno, found.exception.filename), (errno.ENOSPC, table.path))


def too_much(*_, **__):
    return torch.empty(1 << 60)


MUCH = f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {4 << 60} bytes; Error code 12 (Cannot allocate memory)"
FULL = ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.25 GiB is free. Including non-PyTorch "
        "memory, this process has 77.80 GiB memory in use. If reserved but unallocated memory is large try something.")
SAID = "CUDA out of memory; Tried to allocate 2.00 GiB; GPU 0 has a total capacity of 79.10 GiB of which 1.25 GiB is free"  # of FULL
ILLEGAL = "CUDA error: an illegal memory access was encountered\nSearch for it in a book.\nFor debugging consider passing an option.\n"


FAILS_TWICE = f"""
import runpy, sys, torch
from bitroll import mcore
from bitroll.rl import policy
if int(sys.argv.pop(1)):
    def fails(*_):
        raise torch.AcceleratorError({ILLEGAL!r})
    policy.Policy.bits = fails
def fails_again(*_):
    raise RuntimeError("the group")
mcore.dist.destroy_process_group = fails_again
runpy.run_module("bitroll.rl.train", run_name="__main__", alter_sys=True)
"""


class Devices(unittest.TestCase):
    """Too little memory, or a GPU that fails, ended a training with a traceback."""

    def test_too_little_memory_in_a_run(self):
        config, out = rl_rig.config("much", steps=1, heldout=dict(prompts=0)), os.path.join(rig.PLACE, "much")
        arguments = ("--config", config, "--model", rig.checkpoint("pico")[0], "--out", out)
        less = ("memory goes by micro_tokens ([300, 1100]), batch.max_tok (256), lora.r (32), engine.max_seqs (64) and engine.chunk_tokens (256): "
                "expected a smaller one")
        checkpoint = os.path.join(out, "checkpoint")
        for owner, name, where in ((train, "Policy", "the start"), (resume, "masters", f"{checkpoint}: cannot be written"),
                                   (bars, "moved", "the bars"), (policy.Policy, "bits", "step 0, certify"),
                                   (policy.Policy, "accumulate", "step 0, update"), (policy.Policy, "norms", "step 0")):
            with self.subTest(name), unittest.mock.patch.object(owner, name, too_much):
                status, lines = ended("train", *arguments)
                self.assertEqual((status, lines[-1]), (2, f"train: {where}: {MUCH}: {less}"))
                self.assertNotIn("Traceback", "".join(lines))
            shutil.rmtree(out, ignore_errors=True)

    def test_a_run_that_is_stopped(self):
        """Ctrl-C ended in a traceback of 51 lines."""
        def stop(*_, **__):
            raise KeyboardInterrupt

        def stop_in_torch(*_, **__):
            raise CheckpointException("save", {0: (KeyboardInterrupt(), None)})
        begins = "no step was done, the same command begins again"
        goes_on = "the same command with --resume goes on from the last checkpoint"
        config, out = rl_rig.config("stopped", steps=2, batch=dict(prompts=1, samples=2), heldout=dict(prompts=0)), os.path.join(rig.PLACE, "stopped")
        arguments = ("--config", config, "--model", rig.checkpoint("pico")[0], "--out", out)
        for owner, name, act, said in ((train, "open_rollout", stop, f"the start: {begins}"),
                                       (policy.Policy, "accumulate", stop, f"step 0: {begins}"),
                                       (resume.dist_checkpointing, "save", stop_in_torch, f"the start: {begins}"),
                                       (policy.Policy, "update", stop, f"step 0: {goes_on}"), (bars, "moved", stop, f"the end: {goes_on}")):
            with self.subTest(said), unittest.mock.patch.object(owner, name, act), contextlib.redirect_stdout(io.StringIO()):
                status, lines = ended("train", *arguments)
                self.assertEqual((status, lines[-1]), (130, f"train: stopped at {said}"))
                self.assertNotIn("Traceback", "".join(lines))
            self.assertEqual(os.path.exists(out), goes_on in said)
            arguments = (*arguments[:6], "--resume") if goes_on in said else arguments

    def test_a_gpu_that_has_failed_fails_again_at_the_end(self):
        """What torch says when its group is left then came behind the sentence, with a traceback and the status 1."""
        config, out = rl_rig.config("twice", steps=1), os.path.join(rig.PLACE, "twice")
        arguments = ["--config", config, "--model", rig.checkpoint("pico")[0], "--out", out]
        for has_failed in (True, False):
            done = subprocess.run([sys.executable, "-c", FAILS_TWICE, str(int(has_failed)), *arguments], capture_output=True, text=True, timeout=600,
                                  env=rig.environment())
            with self.subTest(has_failed=has_failed):
                if has_failed:
                    self.assertEqual((done.returncode, done.stderr), (2, f"train: step 0, certify: {ILLEGAL.splitlines()[0]}\n"))
                else:  # of a run that was well nothing is hidden
                    self.assertEqual((done.returncode, done.stderr.splitlines()[-1].endswith("RuntimeError: the group")), (1, True), done.stderr)

    def test_a_checkpoint_is_not_blamed(self):
        """Of a GPU that failed in there the sentence was the last line of torch's advice, and said that the checkpoint cannot be read."""
        for error, why, is_memory in ((torch.AcceleratorError(ILLEGAL), ILLEGAL.splitlines()[0], False),
                                      (MemoryError(), "Python is out of memory", True),
                                      (CheckpointException("load", {0: (torch.OutOfMemoryError(FULL), None)}), SAID, True)):
            with self.subTest(why), self.assertRaises(failures.DeviceFailed) as found, resume.told("outside"), resume.told("inside"):
                raise error
            self.assertEqual((str(found.exception), found.exception.is_memory), (f"inside: {why}", is_memory))
        with self.assertRaisesRegex(resume.Failed, "inside: torn"), resume.told("outside"), resume.told("inside"):
            raise RuntimeError("torn")

    def test_too_little_memory_in_a_training_of_a_base(self):
        out = os.path.join(rig.PLACE, "much_base")
        for owner, name, where in ((train_base, "Ops", "the start"), (train_base.Model, "log_probs", "step 1"),
                                   (train_base, "accuracy", "step 1, measurement")):
            with self.subTest(name), unittest.mock.patch.object(owner, name, too_much), contextlib.redirect_stdout(io.StringIO()):
                said = ended("train_base", "--preset", "pico", "--out", out, "--rows", "128", "--rank", "4", "--steps", "1")
            self.assertEqual(said, (2, [f"train_base: {where}: {MUCH}: memory goes by --rows (128) and --rank (4): expected a smaller one"]))
            shutil.rmtree(out)

    def test_what_a_gpu_says(self):
        for error, said in (
                (torch.OutOfMemoryError(FULL), SAID + ": less: expected a smaller one"),
                (torch.OutOfMemoryError(), "OutOfMemoryError: less: expected a smaller one"), (torch.AcceleratorError("\n"), "AcceleratorError"),
                (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
                 "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`: less: expected a smaller one"),
                (RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
                 "DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes: less: expected a smaller one"),
                (RuntimeError("std::bad_alloc"), "std::bad_alloc: less: expected a smaller one"),
                (MemoryError("std::bad_alloc"), "std::bad_alloc: less: expected a smaller one"),
                (torch.AcceleratorError(ILLEGAL), ILLEGAL.splitlines()[0]), (RuntimeError(ILLEGAL), ILLEGAL.splitlines()[0])):
            with self.subTest(said), self.assertRaises(failures.DeviceFailed) as found, failures.told("outside"), failures.told("inside"):
                raise error
            self.assertEqual(found.exception.sentence("less"), f"inside: {said}")

    def test_what_the_engine_and_python_say(self):
        """An engine's sentence did not say at which step, nor what needs less memory; Python's own errors kept their traceback."""
        known = abi.CONSTANTS
        for error, said in (
                (abi.Error(known["BR_E_NOMEM"], "pages: 9 bytes wanted"), "pages: 9 bytes wanted: less: expected a smaller one"),
                (abi.Error(known["BR_E_DEVICE"], "the GPU failed at waiting"), "the GPU failed at waiting"),
                (MemoryError(), "Python is out of memory: less: expected a smaller one"),
                (MemoryError("an array"), "an array: less: expected a smaller one"),
                (OSError(errno.ENOMEM, "No memory", "a.part"), "a.part: No memory: less: expected a smaller one")):
            with self.subTest(said), self.assertRaises(failures.DeviceFailed) as found, failures.told("outside"), failures.told("inside"):
                raise error
            self.assertEqual(found.exception.sentence("less"), f"inside: {said}")
        for error in (abi.Error(known["BR_E_IO"], "CUDA error: of a name"), Busy(known["BR_E_LIMIT"], "this worker serves another trainer"),
                      OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), SystemExit(3)):
            with self.assertRaises(type(error)) as found, failures.told("step 0"):
                raise error
            self.assertIs(found.exception, error)

    def test_a_fault_of_a_program_stays_what_it_is(self):
        for work in (lambda: torch.ones(2, 3) @ torch.ones(2, 3), lambda: torch.ones(2).view(3), lambda: torch.ones(2)[5], lambda: torch.none,
                     lambda: torch.ones("2"), lambda: self.fail("an assertion"), lambda: too_much.none):
            with self.assertRaises(Exception) as plain:
                work()
            with self.assertRaises(type(plain.exception)) as found, failures.told("step 0"):
                work()
            self.assertNotIsInstance(found.exception, failures.DeviceFailed)
        for said in ("CUDA error: device-side assert triggered\nSearch for it.", "CUDA error: invalid argument\nSearch for it.",
                     "CUDA error: invalid configuration argument", "CUDA driver error: invalid argument", "cuDNN error: CUDNN_STATUS_BAD_PARAM",
                     "CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx(handle)`"):
            for error in (torch.AcceleratorError(said), RuntimeError(said)):
                with self.assertRaises(type(error)) as found, failures.told("step 0"):
                    raise error
                self.assertIs(found.exception, error)


WARNS = """
import logging, sys, warnings
from bitroll import quiet
KNOWN, NEWS, PLACE = "Apex is not installed. Falling back to Torch Norm", "Apex is there", "megatron.core.models.backends"
LOG = logging.getLogger("megatron.core.models.gpt.gpt_model")
def say(*texts, module=PLACE):
    for text in texts:
        warnings.warn_explicit(text, UserWarning, "file", 1, module)
with quiet.known():
    say(KNOWN, NEWS)
    say(KNOWN, module="elsewhere")
print("after", file=sys.stderr)
say(KNOWN)
LOG.warning("GPTModel IS DEPRECATED. Truly")
LOG.warning("GPTModel is late")
logging.raiseExceptions = False
LOG.warning("GPTModel of %d layers", "x")
LOG.handle(logging.makeLogRecord(dict(name="elsewhere", msg="GPTModel of another", levelno=30)))
logging.getLogger("elsewhere").warning("GPTModel IS DEPRECATED. Truly")
"""


class Quiet(unittest.TestCase):
    """Ten warnings, most of Megatron-Core, stood before the first line of a run, or -W ignore hid them and everything else."""

    def python(self, *arguments):
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=rig.environment(), timeout=600)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stderr.splitlines()

    def test_a_run_and_its_resumption(self):
        config, out = rl_rig.config("quiet", steps=1, batch=dict(prompts=1, samples=2), heldout=dict(prompts=0)), os.path.join(rig.PLACE, "quiet")
        for n, more in (("1", ()), ("2", ("--resume",))):
            status, _, said = rl_rig.train(config, out, "--steps", n, *more)
            self.assertIn(status, (0, 1))  # so small a run may miss a bar
            self.assertEqual(said, "")

    def test_what_is_not_known_is_heard(self):
        elsewhere, known = (f"file:1: UserWarning: {text}" for text in ("Apex is there", "Apex is not installed. Falling back to Torch Norm"))
        self.assertEqual(self.python("-c", WARNS), [elsewhere, known, "after", known, "GPTModel is late", "GPTModel of another",
                                                    "GPTModel IS DEPRECATED. Truly"])


if __name__ == "__main__":
    unittest.main()
