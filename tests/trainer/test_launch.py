"""Worker and trainer under launch.sh: over MPI the engine's bytes, and whatever ends one of them, or what started them, ends both. With
arguments this file is the trainer of the job."""
import itertools
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import unittest

import rig
from bitroll import abi
from bitroll.bridge import Remote
from test_bridge import DEAD_MS, OPTIONS, SETTINGS, WORKER, check_round, here, samples

LAUNCH = os.path.join(rig.TREE, "trainer_bridge", "launch.sh")
LINE = "x" * 200_000 + " a line of the trainer"


def launch_command(what, folder, wanted, *options, worker=()):
    return [LAUNCH, *options, WORKER, "--model", folder, *OPTIONS, *worker, "--", sys.executable, "-B", __file__, "trainer", what, wanted]


def launched(what, folder, wanted, *options, worker=()):
    """(status, standard output, standard error) of an MPI job whose trainer is this file, on a checkpoint `wanted`."""
    command = launch_command(what, folder, wanted, *options, worker=worker)
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)  # a hang is a failure, not a wait
    return done.returncode, done.stdout, done.stderr


# ---- experiments/rl100/rl100.sh --------------------------------------------------------------------------------------------

# In place of Python, bitroll and bitroll-worker. A run's name stands in a file with its status, whether it came to its end, its rows and the status
# of its ledger's verification.
STUBS = {
    "python": """case "$*" in *rl.train*) ;; *cuda.is_available*) exit "$(cat "$(dirname "$0")/gpu" 2>/dev/null || echo 0)" ;; *) exit 0 ;; esac
while [ "$1" != --out ]; do shift; done
read -r status is_done rows verified <"$(dirname "$0")/plan/$(basename "$2")"
[ "$is_done" = 0 ] || mkdir "$2/adapter"
[ "$rows" = 0 ] || seq 0 "$rows" >"$2/metrics.csv"
[ "$rows" = 0 ] || echo "$verified" >"$2/ledger.h5"
exit "$status"
""",
    "bitroll": 'case $1 in verify) [ -e "$2" ] || exit 2; exit "$(cat "$2")" ;; esac\n',
    "bitroll-worker": ""}
RUNS = (  # status, done, rows, verify; what is said
    ("E", 1, "0 1 3 0", None), ("E", 2, "1 1 3 0", "status 1, see "), ("E", 3, "0 1 3 1", "bitroll verify ended with 1, see "),
    ("ragged", 1, "2 0 0 0", "status 2, see "), ("M1", 1, "1 1 3 1", None), ("M2", 1, "0 1 3 1", None), ("M3", 1, "0 1 2 0", None),
    ("M1", 2, "0 1 3 0", "a control arm whose ledger shows no difference, see "),
    ("M2", 2, "1 0 2 1", "did not come to its last step: status 1"), ("M3", 2, "2 1 3 1", "did not come to its last step: status 2"))


class Rl100(unittest.TestCase):
    def put_stand_ins(self, place):
        for name, text in STUBS.items():
            path = os.path.join(place, name)
            with open(path, "w", encoding="ascii") as file:
                file.write("#!/bin/sh\n" + text)
            os.chmod(path, 0o755)

    def rl100(self, runs):
        """(status, what failed, by name)."""
        with tempfile.TemporaryDirectory() as place:
            self.put_stand_ins(place)
            os.mkdir(os.path.join(place, "plan"))
            for name, seed, plan, _ in runs:
                with open(os.path.join(place, "plan", f"{name}_seed{seed}"), "w", encoding="ascii") as file:
                    file.write(plan + "\n")
            command = [os.path.join(rig.TREE, "experiments", "rl100", "rl100.sh"), os.path.join(place, "out"), *(f"{r[0]}:{r[1]}" for r in runs)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=100,
                                  env={**os.environ, "PYTHON": os.path.join(place, "python"), "BUILD": place, "BASE": place})
            failed = dict(re.findall(r"(?m)^rl100: failed: (\w+): (.*)$", done.stderr))
            return done.returncode, failed, done.stdout + done.stderr

    def test_runs_that_failed_are_named(self):
        status, failed, said = self.rl100(RUNS)
        self.assertEqual(status, 1, said)
        wanted = {f"{name}_seed{seed}": why for name, seed, _, why in RUNS if why}
        self.assertEqual(failed.keys(), wanted.keys(), said)
        for name, why in wanted.items():
            self.assertIn(why, failed[name])

    def test_control_arms_that_ended_as_designed_are_no_failure(self):
        status, failed, said = self.rl100([run for run in RUNS if not run[3]])
        self.assertEqual((status, failed), (0, {}), said)

    def test_a_gpu_that_is_not_there_is_said_before_anything_starts(self):
        with tempfile.TemporaryDirectory() as place:
            self.put_stand_ins(place)
            out = os.path.join(place, "out")
            for backend, found, said in (("cuda", 3, "BACKEND is cuda, and torch finds no GPU on this machine: BACKEND=oracle runs without one"),
                                         ("", 3, "BACKEND is cuda, and torch finds no GPU on this machine: BACKEND=oracle runs without one"),
                                         ("cuda", 1, f"{place}/python ended with 1 when it imported torch: expected PYTHON, "),
                                         ("gpu", 0, "BACKEND is 'gpu': expected cuda or oracle"), ("oracle", 3, "failed: ")):
                with open(os.path.join(place, "gpu"), "w", encoding="ascii") as file:
                    file.write(str(found))
                done = subprocess.run([os.path.join(rig.TREE, "experiments", "rl100", "rl100.sh"), out, "E:1"], capture_output=True, text=True,
                                      timeout=100, env={**os.environ, "PYTHON": os.path.join(place, "python"), "BUILD": place, "BASE": place,
                                                        "BACKEND": backend})
                with self.subTest(backend=backend, found=found):
                    starts = backend == "oracle"  # and has no plan here
                    self.assertEqual((done.returncode, done.stdout == "", os.path.exists(out)), (1 if starts else 2, not starts, starts), done.stderr)
                    self.assertTrue(done.stderr.startswith(f"rl100: {said}"), done.stderr)
                    self.assertTrue(starts or done.stderr.count("\n") == 1, done.stderr)

    def test_a_backend_that_is_none_is_said_before_an_environment_is_made(self):
        """And by base.sh, which began six bases that each ended at once, and called a Python without torch a machine without a GPU."""
        with tempfile.TemporaryDirectory() as place:
            self.put_stand_ins(place)
            with open(os.path.join(place, "gpu"), "w", encoding="ascii") as file:
                file.write("1")
            out, python = os.path.join(place, "out"), os.path.join(place, "python")
            no_place = {k: v for k, v in os.environ.items() if k != "PYTHON"} | {"XDG_CACHE_HOME": "/dev/null/none"}
            for name, arguments, more, said in (
                    ("rl100", ["E:1"], {"BACKEND": "gpu"}, "rl100: BACKEND is 'gpu': expected cuda or oracle"),
                    ("base", ["gpu"], {}, "base.sh: BACKEND is 'gpu': expected cuda or oracle"),
                    ("base", [], {"PYTHON": python}, f"base.sh: {python} ended with 1 when it imported torch: expected PYTHON, an interpreter with torch")):
                with self.subTest(said):
                    done = subprocess.run([os.path.join(rig.TREE, "experiments", "rl100", name + ".sh"), out, *arguments], capture_output=True, text=True,
                                          timeout=100, env=no_place | more)
                    self.assertEqual((done.returncode, done.stdout, done.stderr, os.path.exists(out)), (2, "", said + "\n", False))

    def test_runs_that_cannot_be_meant_start_nothing(self):
        with tempfile.TemporaryDirectory() as place:
            for runs, said in (("out E:1 M1:1 E:1", "'E:1' is named twice: two runs cannot share a folder"),
                               ("out E:1 Q:1", "'Q:1': there is no Q.yaml: expected one of E.yaml "), ("out E", "'E': expected NAME:SEED, "),
                               ("out E:one", "'E:one': expected NAME:SEED, "), ("out E:01", "'E:01': expected NAME:SEED, "),
                               ("out E:2147483648", "'E:2147483648': expected NAME:SEED, "), ("out ../rl100/E:1", "'../rl100/E:1': expected NAME:SEED, "),
                               ("E:1 M1:1", "'E:1': expected OUT, a folder, before the runs"), ("--help", "expected OUT [NAME:SEED..]")):
                done = subprocess.run([os.path.join(rig.TREE, "experiments", "rl100", "rl100.sh"), *runs.split()], cwd=place,
                                      capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHON": "false", "BUILD": place})
                self.assertEqual((done.returncode, done.stdout, done.stderr.count("\n")), (2, "", 1), done.stderr)
                self.assertTrue(done.stderr.startswith(f"rl100: {said}"), done.stderr)
                self.assertEqual(os.listdir(place), [])


class Mpi(unittest.TestCase):
    def test_the_engines_bytes(self):
        folder, _ = rig.checkpoint("pico")
        status, out, err = launched("round", folder, folder)
        self.assertEqual(status, 0, out[:2000] + err)
        self.assertIn(LINE, out.splitlines())
        self.assertRegex(out, r"launch: mpirun \(Open MPI\) .*\n(.*\n)*launch: rank 0 is the worker, pid \d+")
        self.assertRegex(out, r"launch: rank 1 is the trainer, pid \d+")
        self.assertEqual(out.splitlines()[-1], "ok over MPI")

    def test_a_killed_worker(self):
        folder, _ = rig.checkpoint("pico")
        status, out, err = launched("kill-worker", folder, folder)
        self.assertEqual(status, 6, out + err)
        self.assertIn("nothing was heard of the peer for", out)
        self.assertIn("the worker ended with status 137, the trainer with 1", err)

    def test_a_killed_trainer(self):
        folder, _ = rig.checkpoint("pico")
        status, out, err = launched("kill-trainer", folder, folder)
        self.assertEqual(status, 3, out + err)
        self.assertIn("the worker ended with status 3, the trainer with 137", err)

    def test_a_trainer_that_stands_still(self):
        folder, _ = rig.checkpoint("pico")
        status, out, err = launched("stop-trainer", folder, folder, "--grace", "1")
        self.assertEqual(status, 3, out + err)
        self.assertIn("the worker ended with status 3, the trainer with 124", err)

    def test_another_base(self):
        folder, other = rig.checkpoint("pico")[0], rig.checkpoint("pico", seed=2)[0]
        status, out, err = launched("round", folder, other)
        self.assertEqual(status, 5, out + err)
        self.assertIn("differ in: base weights", err)

    def test_a_trainer_that_never_speaks(self):
        folder, _ = rig.checkpoint("pico")
        for what, wanted in (("nothing", 6), ("fail", 9)):
            status, out, err = launched(what, folder, folder, "--grace", "1")
            self.assertEqual((status, out.splitlines()[-1]), (wanted, "no word"), out + err)
            self.assertIn("the worker still ran", err)

    def test_a_worker_that_cannot_start(self):
        folder, _ = rig.checkpoint("pico")
        for other, options in ((folder, ["--no-such-option"]), (folder + "-none", [])):  # before MPI has started, and after
            status, out, err = launched("round", other, folder, "--grace", "1", worker=options)
            self.assertEqual(status, 2, out + err)
            self.assertIn("the trainer still ran", err)
            self.assertIn("the worker ended with status 2", err)

    def test_whoever_started_the_two_is_killed(self):
        """No process of the run outlives its launcher or mpirun, and a trainer that is deaf to SIGTERM has the grace and no more."""
        folder, _ = rig.checkpoint("pico")
        for what, whom, number in (*itertools.product(("early", "wait", "deaf"), ("launch", "mpirun"), (signal.SIGKILL,)),
                                   ("early", "launch", signal.SIGTERM), ("wait", "launch", signal.SIGTERM)):
            with self.subTest(what=what, whom=whom, number=number):
                self.check_killed(folder, what, whom, number)

    def check_killed(self, folder, what, whom, number):
        scratch = tempfile.mkdtemp(dir=rig.PLACE)
        launch = subprocess.Popen(launch_command(what, folder, folder, "--grace", "1"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  env={**os.environ, "TMPDIR": scratch})
        pids = dict(launch=launch.pid)
        while len(pids) < 3 or line != f"{what}\n":
            line = launch.stdout.readline()
            self.assertTrue(line, "the run ended")
            found = re.search(r"rank . is the (\w+), pid (\d+)", line)
            pids.update({found[1]: int(found[2])} if found else {})
        pids.update({"watcher of the " + side: parent_of(pids[side]) for side in ("trainer", "worker")})
        pids.update(mpirun=parent_of(pids["watcher of the trainer"]))
        ends = {name: os.pidfd_open(pid) for name, pid in pids.items()}
        os.kill(pids[whom], number)
        for name, end in ends.items():
            self.assertTrue(select.select([end], [], [], 30)[0], name + " still runs")
            os.close(end)
        launch.communicate(timeout=30)
        self.assertIn(launch.returncode, (-signal.SIGKILL,) if (whom, number) == ("launch", signal.SIGKILL) else (3, 6))
        self.assertEqual([name for name in os.listdir(scratch) if name.startswith("tmp.")], [])


def parent_of(pid):
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("PPid:"))


def wait(what):
    print(what, flush=True)
    while True:
        signal.pause()


def train(what, folder):
    if what in ("early", "deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN if what == "deaf" else signal.SIG_DFL)
    if what == "early":
        wait(what)
    if what in ("nothing", "fail"):
        print("no word")
        sys.exit(9 if what == "fail" else 0)
    remote = Remote(rig.LIBRARY, folder, "mpi:0", SETTINGS, wait_ms=30000, dead_ms=DEAD_MS)
    if what == "kill-worker":
        os.kill(remote.hello.pid, signal.SIGKILL)
        try:
            remote.generate(samples(4), "base", 7)
        except abi.Error as error:
            print(error)
            remote.close()
            sys.exit(1)
    if what in ("wait", "deaf"):
        wait(what)
    if what == "kill-trainer":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop-trainer":
        os.kill(os.getpid(), signal.SIGSTOP)
    engine = here(folder)
    check_round(unittest.TestCase(), remote, engine)
    print(LINE)
    remote.close()
    engine.close()
    print("ok over MPI")


if __name__ == "__main__":
    if sys.argv[1:2] == ["trainer"]:
        train(*sys.argv[2:])
    else:
        unittest.main()
