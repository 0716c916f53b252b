"""trainer_bridge/environment.sh on an environment that is there: everything is imported once, and again when something has changed."""
import hashlib
import os
import subprocess
import tempfile
import time
import unittest

import rig

SCRIPT = os.path.join(rig.TREE, "trainer_bridge", "environment.sh")
# In place of the interpreter: counts what is imported, which the file `fault` lets fail.
STUB = """#!/bin/sh
LD_LIBRARY_PATH=%s${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
place=$(dirname "$0")/..
case "$*" in
*-c*) cat "$place/version" ;;
*) echo imported >>"$place/calls"
   [ ! -e "$place/fault" ] && echo "$(cat "$place/version"), torch 1" ;;
esac
"""


def touch(*path, text=""):
    os.makedirs(os.path.dirname(os.path.join(*path)), exist_ok=True)
    with open(os.path.join(*path), "w", encoding="ascii") as file:
        file.write(text)
    return os.path.join(*path)


class Warm(unittest.TestCase):
    def setUp(self):
        self.cache = tempfile.mkdtemp(dir=rig.PLACE)
        with open(os.path.join(rig.TREE, "trainer_bridge", "requirements.lock"), "rb") as file:
            self.place = os.path.join(self.cache, "bitroll", "python-" + hashlib.sha256(file.read()).hexdigest()[:16])
        self.toolkit = os.path.join(self.cache, "toolkit")
        for name in ("libcublas.so.13", "libcudnn.so.9"):
            touch(self.toolkit, name)
        touch(self.place, "version", text="python 3.12.1")
        self.module = touch(self.place, "lib", "a", "deep", "module.py")
        self.python = touch(self.place, "bin", "bitroll-python", text=STUB % self.toolkit)
        os.chmod(self.python, 0o755)

    def call(self, status=0, **more):
        """How many imports there have been after this call."""
        done = subprocess.run([SCRIPT], capture_output=True, text=True, timeout=60, env={**os.environ, "XDG_CACHE_HOME": self.cache, **more})
        self.assertEqual((done.returncode, done.stdout), (status, "" if status else self.python + "\n"), done.stderr)
        self.said = done.stderr
        with open(os.path.join(self.place, "calls"), encoding="ascii") as file:
            return len(file.readlines())

    def test_what_worked_is_not_imported_again(self):
        self.assertEqual([self.call(), self.call(), self.call()], [1, 1, 1])
        self.assertEqual(self.said, "python 3.12.1, torch 1\n")

    def test_what_has_changed_is_imported_again(self):
        n = self.call()
        for change in (lambda: touch(self.module), lambda: os.unlink(self.module), lambda: touch(self.place, "lib", "b", "new.py"),
                       lambda: touch(self.place, "version", text="python 3.12.2"), lambda: os.unlink(os.path.join(self.toolkit, "libcudnn.so.9"))):
            time.sleep(0.02)  # a tick of the file system's clock
            change()
            n += 1
            self.assertEqual(self.call(), n)
        self.assertEqual(self.call(), n + 1)  # the toolkit is still gone

    def test_what_does_not_work_is_said_each_time(self):
        fault = touch(self.place, "fault")
        self.assertEqual([self.call(2), self.call(2)], [1, 2])
        self.assertIn("environment: the environment does not work: ", self.said)
        os.unlink(fault)
        self.assertEqual([self.call(), self.call()], [3, 3])
        time.sleep(0.02)
        touch(self.place, "fault")
        touch(self.module)
        self.assertEqual([self.call(2), self.call(2)], [4, 5])

    def test_a_cache_that_takes_nothing(self):
        """It works, as it is; the call ended with the words of mv or cat."""
        mv = touch(self.cache, "fakes", "mv", text="#!/bin/sh\necho mv: Read-only file system >&2\nexit 1\n")
        os.chmod(mv, 0o755)
        path = os.path.dirname(mv) + os.pathsep + os.environ["PATH"]
        self.assertEqual([self.call(PATH=path), self.call(PATH=path)], [1, 2])
        self.assertEqual(self.said, "python 3.12.1, torch 1\n")
        touch(self.place, "works", "a", "folder")
        self.assertEqual([self.call(), self.call()], [3, 4])
        self.assertEqual(self.said, "python 3.12.1, torch 1\n")
        self.assertEqual([name for name in os.listdir(self.place) if name.startswith("works.")], [])


# In place of Python 3.12, of pip and of the environment's own interpreter.
PYTHON_STUB = """#!/bin/sh
case "$*" in
"-m venv "*) echo made >>"%s"; mkdir -p "$3/bin" "$3/lib" && cp "$0" "$3/bin/python" ;;
*"-m pip"*) sleep 1 ;;
*-c*) echo "python 3.12.1" ;;
*) echo "python 3.12.1, torch 1" ;;
esac
"""


class Cold(unittest.TestCase):
    def test_two_at_once_make_one(self):
        """The second removed what the first had just named, or put its own inside of it."""
        cache = tempfile.mkdtemp(dir=rig.PLACE)
        calls, fakes = os.path.join(cache, "calls"), os.path.join(cache, "toolkit", "bin")
        for name, text in (("python3.12", PYTHON_STUB % calls), ("nvcc", "#!/bin/sh\n"), ("df", "#!/bin/sh\necho\necho - - - 99999999\n")):
            os.chmod(touch(fakes, name, text=text), 0o755)
        for name in ("libcublas.so.13", "libcudnn.so.9"):
            touch(cache, "toolkit", "lib64", name)
        environment = {**os.environ, "XDG_CACHE_HOME": cache, "PATH": fakes + os.pathsep + os.environ["PATH"]}
        both = [subprocess.Popen([SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
        said = [one.communicate(timeout=60) for one in both]
        self.assertEqual([one.returncode for one in both], [0, 0], said)
        self.assertEqual([err for _, err in said], ["python 3.12.1, torch 1\n"] * 2)
        self.assertEqual(len({out for out, _ in said}), 1)
        with open(calls, encoding="ascii") as file:
            self.assertEqual(file.read(), "made\n")
        place = os.path.dirname(os.path.dirname(said[0][0].strip()))
        self.assertEqual(sorted(os.listdir(place)), ["bin", "lib", "works"])
        self.assertEqual(sorted(os.listdir(os.path.dirname(place))), ["lock", os.path.basename(place)])


if __name__ == "__main__":
    unittest.main()
