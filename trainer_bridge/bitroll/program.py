"""How a program of this package ends: what went wrong is one sentence on stderr, and an exit status."""
import argparse
import contextlib
import errno
import os
import stat
import sys

from .errors import Error

NOT_FINITE, FAILED, INTERRUPTED = 1, 2, 130
STDOUT = "standard output"


def say(text, end="\n"):
    """On stdout by now; one that takes nothing, a full disk or a reader that is gone, is an error that names it."""
    try:
        print(text, end=end, flush=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, STDOUT) from None


@contextlib.contextmanager
def named(path):
    """Around what is done with a file: a write, a flush and a close on a full disk say why they failed, and not where."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, path) from error


@contextlib.contextmanager
def written(path, mode="w", **how):
    """A file to write, as open has it: it takes the place of the one at `path` when it is whole and on the disk, or never."""
    with named(path):
        with open(path + ".part", mode, **how) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".part", path)


class Parser(argparse.ArgumentParser):
    def print_help(self, file=None):
        """argparse's own says nothing where it could not be written."""
        if file:
            super().print_help(file)
        else:
            say(self.format_help(), end="")


def check_regular(path):
    """OSError unless a file is there that ends: a pipe without a writer would hold us up for ever, a device may have no end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "expected a regular file", path)


def whole(least, most=(1 << 31) - 1):
    """The type of an argument that is a whole number of this range."""
    def read(text):
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text}: expected {least} to {most}")
        return value
    read.__name__ = "whole number"  # as argparse calls it
    return read


def number(least, most):
    """The same of any number."""
    def read(text):
        value = float(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text}: expected {least:g} to {most:g}")
        return value
    read.__name__ = "number"
    return read


def sentence(error):
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)  # str of a KeyError is quoted


def failed(name, error, status=FAILED):
    """Says it; the status."""
    print(f"{name}: {sentence(error)}", file=sys.stderr)
    return status


def _drop_stdout():
    """What it did not take is not tried again at the end of the process, with a traceback."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)


def status_of(name, work):
    """Of the program `name`: what work() returns, None as 0, or what it failed with: 1 of numbers that are not finite, 130 of Ctrl-C, as shells have
    it, else 2."""
    try:
        return work() or 0
    except KeyboardInterrupt:
        return failed(name, "stopped by SIGINT", INTERRUPTED)
    except FloatingPointError as error:
        return failed(name, error, NOT_FINITE)
    except (OSError, KeyError, ValueError, Error) as error:
        if isinstance(error, OSError) and error.filename == STDOUT:
            _drop_stdout()
        return failed(name, error)
