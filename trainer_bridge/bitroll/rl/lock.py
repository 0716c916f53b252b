"""One run at a time in a folder: a file there that is locked for as long as the process that runs lives. The kernel lets go, so that nothing
is left behind by a kill."""
import contextlib
import fcntl
import os

FILE, WIDTH = "run.lock", 10


class Held(ValueError):
    """Another process holds the folder; one sentence."""


def hold(folder):
    """The descriptor whose closing lets go."""
    path = os.path.join(folder, FILE)
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(handle, WIDTH, 0).decode("ascii", "replace").strip()
            os.close(handle)
            raise Held(f"{folder}: another run is at work here, pid {who or 'unknown'}") from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                break
        os.close(handle)  # of a start that failed meanwhile, and took the file with it
    os.pwrite(handle, f"{os.getpid():<{WIDTH}}\n".encode(), 0)
    return handle
