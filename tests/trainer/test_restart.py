"""A trainer killed with SIGKILL at each place of a step and started again ends as one that was never killed: the same adapter, the same rows,
the same root of the ledger. The worker lives on, and a new one does as well; a plain mpirun, which kills the worker with it, is run again."""
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import unittest
import unittest.mock

import rig
import rl_rig
import torch
from bitroll.ledger import Ledger
from bitroll.rl import lock, metrics, resume

STEP = 1  # of three: one checkpoint stands before it
SMALL = dict(batch=dict(prompts=4, samples=4, prompt_tokens=[3, 30]), heldout=dict(prompts=0))


def ended(out):
    """What two runs that are the same have in common."""
    with open(os.path.join(out, "adapter", "adapter_model.safetensors"), "rb") as file:
        adapter = file.read()
    rows = metrics.read(os.path.join(out, "metrics.csv"))
    return adapter, [{c: r[c] for c in metrics.REPEATABLE} for r in rows]


class Killed(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.whole = os.path.join(rig.PLACE, "whole")
        worker = rl_rig.Worker("whole.sock")
        status, said, error = rl_rig.train(rl_rig.config("whole", **SMALL), cls.whole, "--rollout", worker.address)
        worker.close()
        assert status == 0, said + error

    def killed_and_resumed(self, place, new_worker=False, step=STEP):
        out = os.path.join(rig.PLACE, f"{place}-{step}")
        worker = rl_rig.Worker(place + ".sock")
        path = rl_rig.config(place, **SMALL)
        status, said, error = rl_rig.killed(place, step, path, out, "--rollout", worker.address)
        self.assertEqual(status, -signal.SIGKILL, said + error)
        self.assertFalse(os.path.exists(os.path.join(out, "adapter")))
        if new_worker:
            worker.close()
            worker = rl_rig.Worker(place + "-new.sock")
        status, said, error = rl_rig.train(path, out, "--rollout", worker.address, "--resume")
        worker.close()
        self.assertEqual(status, 0, said + error)
        adapter, rows = ended(self.whole)
        self.assertEqual(ended(out)[1], rows)  # the ledger's links among them
        self.assertEqual(ended(out)[0], adapter)

    def test_in_the_rollout(self):
        self.killed_and_resumed("rollout")

    def test_in_the_backward(self):
        self.killed_and_resumed("backward")

    def test_between_prepared_and_commit(self):
        self.killed_and_resumed("prepared")

    def test_after_the_commit(self):
        self.killed_and_resumed("committed")

    def test_after_the_update_before_the_checkpoint(self):
        self.killed_and_resumed("before_checkpoint")

    def test_in_the_first_step(self):
        self.killed_and_resumed("backward", step=0)

    def test_before_the_first_step_has_its_checkpoint(self):
        self.killed_and_resumed("before_checkpoint", step=0)

    def test_worker_lost_as_well(self):
        self.killed_and_resumed("committed", new_worker=True, step=2)

    def test_an_engine_in_this_process_with_other_limits_is_the_same_run(self):
        out = os.path.join(rig.PLACE, "one-process")
        status, said, error = rl_rig.train(rl_rig.config("one-process", **SMALL, engine=dict(max_seqs=5, chunk_tokens=17)), out)
        self.assertEqual(status, 0, said + error)
        self.assertEqual(ended(out), ended(self.whole))  # the root of the ledger among it


class Folder(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.parts = rl_rig.Parts()

    @classmethod
    def tearDownClass(cls):
        cls.parts.close()

    def saved(self, name):
        folder = os.path.join(rig.PLACE, name)
        resume.save(folder, self.parts.policy, 3, {})
        return folder

    def test_a_process_killed_while_it_replaces_the_folder_leaves_one_that_loads(self):
        folder = self.saved("kept")
        os.rename(folder, folder + ".old")  # between the two renames
        os.makedirs(folder + ".part")
        self.assertEqual(resume.load(folder, self.parts.policy), (3, {}))
        self.assertEqual([n for n in os.listdir(rig.PLACE) if n.startswith("kept")], ["kept"])

    def test_an_old_checkpoint_between_the_two_renames_is_not_written_over(self):
        out, _ = self.ledger_of_three("between")
        os.unlink(os.path.join(out, "ledger.h5"))
        self.checkpoint_at(out, 3)
        os.rename(os.path.join(out, "checkpoint"), os.path.join(out, "checkpoint.old"))
        status, said, error = self.two_steps("between")[1]
        self.refused(said, status, error, "checkpoint: there already")

    def test_no_folder_is_no_step(self):
        self.assertIsNone(resume.load(os.path.join(rig.PLACE, "none"), self.parts.policy))

    def test_a_flipped_bit_is_refused(self):
        folder = self.saved("flipped")
        for place, _, files in os.walk(folder):
            for name in sorted(set(files) - {resume.RUN}):
                path = os.path.join(place, name)
                with open(path, "r+b") as file:
                    file.seek(os.path.getsize(path) // 2)
                    byte = file.read(1)[0]
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte ^ 1]))
                with self.subTest(name), self.assertRaisesRegex(ValueError, f"{name} is not what was saved"):
                    resume.load(folder, self.parts.policy)
                with open(path, "r+b") as file:
                    file.seek(os.path.getsize(path) // 2)
                    file.write(bytes([byte]))
        self.assertEqual(resume.load(folder, self.parts.policy), (3, {}))

    def test_another_base_is_refused(self):
        folder = self.saved("other")
        path = os.path.join(folder, resume.RUN)
        with open(path, encoding="ascii") as file:
            run = json.load(file)
        with open(path, "w", encoding="ascii") as file:
            json.dump({**run, "base_digest": "0" * 32}, file)
        with self.assertRaisesRegex(ValueError, "made on base weights 0{32}, these are"):
            resume.load(folder, self.parts.policy)

    def test_no_process_is_started_to_write(self):
        """After MPI has started none may be forked."""
        self.saved("alone")
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            self.assertEqual(file.read(), "")

    def test_settings_of_another_run_are_named(self):
        """Fewer steps than are done are one of them."""
        out, (status, said, error) = self.two_steps("again")
        self.assertEqual(status, 0, said + error)
        for changes, arguments, sentence in (
                (dict(seed=2, lora=dict(r=16), optimizer=dict(betas=[0.9, 0.99])), (),
                 r"again: --resume goes on with the settings that the run began with: lora\.r was 32, is 16; optimizer\.betas was \[0\.9, 0\.95\], "
                 r"is \[0\.9, 0\.99\]; seed was 1, is 2: give those, or begin again in another folder\n"),
                ({}, ("--steps", "1"), "again: 2 steps are done: expected as many or more, not 1\n")):
            with self.subTest(changes=changes):
                status, said, error = self.two_steps("again", "--resume", *arguments, **changes)[1]
                self.refused(said, status, error, sentence)
        os.unlink(os.path.join(out, "run.yaml"))
        status, said, error = self.two_steps("again", "--resume", seed=2)[1]
        self.refused(said, status, error, "ledger.h5: cannot resume: its config digest")

    def two_steps(self, name, *arguments, **changes):
        """(folder, what a trainer of two steps ended with)."""
        out = os.path.join(rig.PLACE, name)
        return out, rl_rig.train(rl_rig.config(name, **{**SMALL, **changes}, steps=2), out, *arguments)

    def refused(self, said, status, error, sentence):
        self.assertEqual(status, 2, said + error)
        self.assertNotIn("Traceback", error)
        self.assertRegex(error, "train: .*" + sentence)

    def test_a_run_is_not_written_over(self):
        out, (status, _, error) = self.two_steps("proved")
        self.assertEqual(status, 0, error)
        with open(os.path.join(out, "ledger.h5"), "rb") as file:
            before = file.read()
        for names in (sorted(os.listdir(out)), sorted(set(os.listdir(out)) - {lock.FILE})):
            if lock.FILE not in names:
                os.unlink(os.path.join(out, lock.FILE))
            status, said, error = self.two_steps("proved", "--seed", "2")[1]
            self.refused(said, status, error, "ledger.h5: there already: expected --resume")
            status, said, error = self.two_steps("proved", "--seed", "2", "--resume")[1]
            self.refused(said, status, error, "--resume goes on with the settings that the run began with: seed was 1, is 2")
            self.assertEqual(sorted(os.listdir(out)), names)
        os.rename(os.path.join(out, "checkpoint"), os.path.join(out, "elsewhere"))
        status, said, error = self.two_steps("proved", "--resume")[1]
        self.refused(said, status, error, "checkpoint: is not there, but ledger.h5 has 2 steps: put it back, or begin again in another folder")
        with open(os.path.join(out, "ledger.h5"), "rb") as file:
            self.assertEqual(file.read(), before)

    def test_a_checkpoint_and_a_ledger_of_two_moments_are_refused(self):
        out, ledger = self.ledger_of_three("moments")
        for n_step, every, sentence in ((4, 1, "is of 4 steps, but ledger.h5 has 3: .* that was written beside it"),
                                        (1, 1, "is of 1 steps, but ledger.h5 has 3, and the next was due at 2: put the last one back"),
                                        (1, 2, ".*and the next was due at 2"), (0, 2, ".*and the next was due at 2")):
            with self.subTest(n_step=n_step, every=every), self.assertRaisesRegex(resume.Failed, "checkpoint: " + sentence):
                self.checkpoint_at(out, n_step)
                resume.check(out, rig.LIBRARY, every)
        for n_step, every in ((3, 1), (2, 1), (2, 2), (3, 4), (0, 3)):  # of a run that ended, or was killed behind its third record
            self.checkpoint_at(out, n_step)
            resume.check(out, rig.LIBRARY, every)
        os.unlink(ledger)
        with self.assertRaisesRegex(resume.Failed, "is of 3 steps, but ledger.h5 has 0"):
            self.checkpoint_at(out, 3)
            resume.check(out, rig.LIBRARY, 1)
        self.checkpoint_at(out, 0)
        resume.check(out, rig.LIBRARY, 1)

    def ledger_of_three(self, name):
        """(folder, its ledger), which was never closed, as after a kill."""
        out = os.path.join(rig.PLACE, name)
        os.makedirs(os.path.join(out, "checkpoint"))
        path, nothing = os.path.join(out, "ledger.h5"), "0" * 32
        ledger = Ledger.create(rig.LIBRARY, path, dict(contract=nothing, base_rollout=nothing, base_trainer=nothing, config_text=""))
        for step in range(3):
            ledger.append(step=step, version=step, adapter_rollout=nothing, adapter_trainer=nothing, texts=[], rewards=[], advantages=[], rollout=[],
                          again=[], update=[])
        return out, path

    def checkpoint_at(self, out, n_step):
        folder = os.path.join(out, "checkpoint")
        with open(os.path.join(folder, resume.RUN), "w", encoding="ascii") as file:
            json.dump(dict(n_step=n_step, base_digest="0" * 32, files=resume.digests(folder)), file)

    def test_two_runs_in_one_folder_are_refused(self):
        """For as long as the first lives: a kill lets go."""
        out = os.path.join(rig.PLACE, "taken")
        with rl_rig.started(rl_rig.config("taken", **SMALL, steps=1000), out) as first:
            next(line for line in first.stdout if line.startswith("step 0"))
            for more in ((), ("--resume",)):
                status, said, error = self.two_steps("taken", *more)[1]
                self.refused(said, status, error, f"taken: another run is at work here, pid {first.pid}")
            self.assertIsNone(first.poll())
            first.kill()
            first.communicate()
        os.close(lock.hold(out))

    def test_a_lock_whose_file_is_gone_is_none(self):
        """That of a start which failed and took its file away while another waited to look at it."""
        folder = os.path.join(rig.PLACE, "gone-lock")
        os.makedirs(folder)
        flock, handles = fcntl.flock, []

        def late(handle, how):
            flock(handle, how)
            handles.append(handle)
            if len(handles) == 1:
                os.unlink(os.path.join(folder, lock.FILE))
        with unittest.mock.patch.object(fcntl, "flock", late):
            handle = lock.hold(folder)
        with self.assertRaisesRegex(lock.Held, f"pid {os.getpid()}"):
            lock.hold(folder)
        os.close(handle)
        self.assertEqual(len(handles), 2)

    def test_no_worker(self):
        path = os.path.join(rig.PLACE, "no-worker.sock")
        config, kept = rl_rig.config("no-worker", **SMALL), os.path.join(rig.PLACE, "kept-above")
        os.mkdir(kept)
        for out in (os.path.join(rig.PLACE, "new-above", "a", "b"), os.path.join(kept, "a", "b")):
            status, said, error = rl_rig.train(config, out, "--rollout", "unix:" + path, "--wait", "0.2")
            self.refused(said, status, error, f"{path}: nobody listened there for 0.2 s: start `bitroll-worker --model ")
        self.assertFalse(os.path.exists(os.path.join(rig.PLACE, "new-above")))
        self.assertEqual(os.listdir(kept), [])  # what stood there stays

    def test_a_folder_that_cannot_be_made(self):
        out = os.path.join(rig.PLACE, "half", "x" * 300)
        status, said, error = rl_rig.train(rl_rig.config("half", **SMALL), out)
        self.refused(said, status, error, "File name too long")
        self.assertFalse(os.path.exists(os.path.dirname(out)))

    def test_a_run_of_one_step_is_done(self):
        status, said, error = rl_rig.train(rl_rig.config("one"), os.path.join(rig.PLACE, "one"), "--steps", "1")
        self.assertEqual(status, 0, said + error)
        self.assertEqual([line.split(": ")[-1] for line in said.splitlines() if line.startswith("not judged")], ["needs 2 steps, the run has 1"] * 2 +
                         ["needs 100 steps, the run has 1"])

    @unittest.skipIf(torch.cuda.is_available(), "there is a GPU")
    def test_a_gpu_that_is_not_there(self):
        out, (status, said, error) = self.two_steps("no-gpu", backend="cuda")
        self.refused(said, status, error, "backend cuda: torch finds no GPU on this machine: give --backend oracle")
        self.assertFalse(os.path.exists(out))

    def test_texts_that_do_not_fit_end_the_run_in_a_sentence(self):
        """A start that fails leaves nothing of its own."""
        kept = os.path.join(rig.PLACE, "long-kept")
        os.makedirs(os.path.join(kept, "checkpoint.part", "notes"))
        with open(os.path.join(kept, "log.txt"), "w", encoding="ascii"):
            pass
        for name in ("long", "long-kept"):
            out, (status, said, error) = self.two_steps(name, batch=dict(prompts=4, samples=4, prompt_tokens=[60, 60], max_tok=64))
            self.refused(said, status, error, r"step 0: texts may get \d+ tokens long, expected at most batch.max_tok \(64\)")
            self.assertEqual(os.listdir(out) if os.path.exists(out) else None, ["log.txt"] if name == "long-kept" else None)

    def one_more_step(self, name, address):
        """The command that was said: what it says."""
        out = os.path.join(rig.PLACE, name)
        n_step = len(metrics.read(os.path.join(out, "metrics.csv")))
        config = rl_rig.config(name, **SMALL, steps=n_step + 1)
        status, said, error = rl_rig.train(config, out, "--rollout", address, "--resume")
        self.assertEqual((status, error), (0, ""), said)
        self.assertRegex(said, rf"(?m)^step {n_step}: ")

    def test_a_worker_lost_in_a_step_ends_the_run_in_a_sentence(self):
        """It said that the peer had closed: not at which step, nor that it was the worker, nor how the run goes on."""
        worker = rl_rig.Worker("lost.sock")
        with rl_rig.started(rl_rig.config("lost", **SMALL, steps=1000), os.path.join(rig.PLACE, "lost"), "--rollout", worker.address) as trainer:
            next(line for line in trainer.stdout if line.startswith("step 0"))
            worker.close()
            said, error = trainer.communicate(timeout=60)
        self.refused(said, trainer.returncode, error, rf"step \d+(, \w+)?: the worker at {worker.address}: .*peer.*: start bitroll-worker again; "
                     r"the same command with --resume goes on from the last checkpoint\n$")
        self.assertEqual(error.count("\n"), 1, error)
        worker = rl_rig.Worker("lost.sock")
        self.one_more_step("lost", worker.address)
        worker.close()

    def test_a_run_that_is_stopped_goes_on(self):
        """Ctrl-C ended in a traceback; and its worker, which serves on, ended with it."""
        worker, before = rl_rig.Worker("stopped.sock"), signal.signal(signal.SIGINT, signal.default_int_handler)  # a child would inherit SIG_IGN
        with rl_rig.started(rl_rig.config("halted", **SMALL, steps=1000), os.path.join(rig.PLACE, "halted"), "--rollout", worker.address) as trainer:
            signal.signal(signal.SIGINT, before)
            next(line for line in trainer.stdout if line.startswith("step 0"))
            trainer.send_signal(signal.SIGINT)
            said, error = trainer.communicate(timeout=60)
        self.assertEqual(trainer.returncode, 130, said + error)
        self.assertRegex(error, r"^train: stopped at step \d+: the same command with --resume goes on from the last checkpoint\n$")
        self.one_more_step("halted", worker.address)
        worker.close()

    def test_a_second_trainer_of_a_worker_is_told_so(self):
        worker = rl_rig.Worker("shared.sock")
        with rl_rig.started(rl_rig.config("first", **SMALL, steps=1000), os.path.join(rig.PLACE, "first"), "--rollout", worker.address) as first:
            next(line for line in first.stdout if line.startswith("step 0"))
            status, said, error = self.two_steps("second", "--rollout", worker.address)[1]
            first.kill()
            first.communicate()
        self.assertEqual((status, said), (7, ""), error)
        self.assertRegex(error, f"train: .*this worker serves another trainer, pid {first.pid}:")
        self.assertFalse(os.path.exists(os.path.join(rig.PLACE, "second", "ledger.h5")))
        worker.close()

    def test_a_damaged_checkpoint_is_named(self):
        for name, cut in (("optimizer.pt", 100), (os.path.join("masters", "__0_0.distcp"), 100), (resume.RUN, 0)):
            with self.subTest(name):
                folder = self.saved("damaged")
                os.truncate(os.path.join(folder, name), cut)
                with self.assertRaisesRegex(resume.Failed, "damaged: cannot be read as a checkpoint of this run: "):
                    resume.load(folder, self.parts.policy)

    def test_a_checkpoint_that_cannot_be_written_is_named(self):
        place = os.path.join(rig.PLACE, "no-folder")
        with open(place, "w", encoding="ascii"):
            pass
        with self.assertRaisesRegex(resume.Failed, "cannot be written: .*Not a directory"):
            resume.save(os.path.join(place, "checkpoint"), self.parts.policy, 1, {})


# ---- under mpirun ------------------------------------------------------------------------------------------------------------

DYING = os.path.join(os.path.dirname(os.path.abspath(__file__)), "dying_run.py")


def under_mpirun(trainer):
    """(exit status, stdout, stderr) of a worker and a trainer as the two ranks of one mpirun that nothing is asked of: where a rank dies, it
    kills the other."""
    either = f'[ "$OMPI_COMM_WORLD_RANK" = 0 ] && exec {shlex.join(rl_rig.worker_command("--mpi", "1"))}; exec {shlex.join(trainer)}'
    job = ["mpirun", "-n", "2", "--oversubscribe", "--bind-to", "none", "sh", "-c", either]
    allowed = {f"{of}_ALLOW_RUN_AS_ROOT{more}": "1" for of in ("OMPI", "PRTE") for more in ("", "_CONFIRM")}
    done = subprocess.run(job, capture_output=True, text=True, env=rig.environment() | allowed, timeout=600)
    return done.returncode, done.stdout, done.stderr


class Mpirun(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        if not hasattr(Killed, "whole"):
            Killed.setUpClass()

    def verified(self, out):
        """Steps and root of a ledger."""
        said = rig.bitroll("verify", os.path.join(out, "ledger.h5")).splitlines()[-1]
        self.assertRegex(said, r"^ledger: \d+ steps, 0 of \d+ log-probs differ, .*, root [0-9a-f]{64}$")
        return int(said.split()[1]), said.split()[-1]

    def killed_and_resumed(self, place):
        out, config = os.path.join(rig.PLACE, f"{place}-mpirun"), rl_rig.config(f"{place}-mpirun", **SMALL)
        plain = rl_rig.command(config, out, "--rollout", "mpi:0")
        status, said, error = under_mpirun([sys.executable, DYING, place, str(STEP), *plain[plain.index("--config") :]])
        self.assertNotEqual(status, 0, said + error)
        self.assertRegex(said, r"(?m)^step 0: ")
        self.assertNotRegex(said, rf"(?m)^step {STEP}: ")
        _, rows = ended(Killed.whole)
        kept = metrics.read(os.path.join(out, "metrics.csv"))
        self.assertEqual([{c: r[c] for c in metrics.REPEATABLE} for r in kept], rows[:STEP])
        self.assertEqual(self.verified(out), (STEP, rows[STEP - 1]["ledger_link"]))
        self.assertFalse(os.path.exists(os.path.join(out, "adapter")))
        status, said, error = under_mpirun([*plain, "--resume"])
        self.assertEqual(status, 0, said + error)
        self.assertRegex(said, rf"(?m)^step {STEP}: ")
        self.assertNotRegex(said, r"(?m)^step 0: ")
        self.assertEqual(self.verified(out), self.verified(Killed.whole))
        self.assertEqual(ended(out), ended(Killed.whole))

    def test_between_prepared_and_commit(self):
        self.killed_and_resumed("prepared")

    def test_after_the_commit(self):
        self.killed_and_resumed("committed")


if __name__ == "__main__":
    unittest.main()
