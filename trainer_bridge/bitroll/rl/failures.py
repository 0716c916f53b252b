"""What torch, the engine and Python raise where memory or a GPU fails or the worker is gone, as one sentence that says where the run was. What is a
fault of the program keeps its traceback."""
import contextlib
import errno

import torch

from .. import abi, program
from ..bridge import Lost

# The CPU's allocator and CUDA's libraries say it in a plain RuntimeError.
SAYS = ("CUDA out of memory", "CUDA error: ", "CUDA driver error: ", "cuDNN error: ", "DefaultCPUAllocator: ", "std::bad_alloc")
NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "STATUS_ALLOC_FAILED", "std::bad_alloc")
# An index out of range, seen by a GPU; arguments that a call of CUDA, cuBLAS or cuDNN refused.
PROGRAM = ("device-side assert", "CUDA error: invalid ", "CUDA driver error: invalid ", "STATUS_INVALID_VALUE", "STATUS_BAD_PARAM")
ENGINE_MEMORY, ENGINE_GPU = (abi.CONSTANTS[name] for name in ("BR_E_NOMEM", "BR_E_DEVICE"))


class DeviceFailed(RuntimeError):
    """where: of the run; why: words of what failed; is_memory: there was too little."""

    def __init__(self, where, why, is_memory):
        super().__init__(f"{where}: {why}")
        self.is_memory = is_memory

    def sentence(self, less):
        """less: what needs less memory, each with the value that it has."""
        return f"{self}: {less}: expected a smaller one" if self.is_memory else str(self)


class WorkerLost(RuntimeError):
    """where: of the run; error: of the connection."""

    def __init__(self, where, error):
        super().__init__(f"{where}: {error}")


def cause_of(error):
    """(What it says of itself, was there too little memory?); torch's without its advice to who writes programs. None of any other error."""
    text = str(error)
    if isinstance(error, abi.Error):
        return (text, error.status == ENGINE_MEMORY) if error.status in (ENGINE_MEMORY, ENGINE_GPU) else None
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return program.sentence(error) or "Python is out of memory", True
    begins = [text.find(says) for says in SAYS if says in text]
    is_device = begins or isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError))
    if not is_device or any(says in text for says in PROGRAM):
        return None
    line = (text[min(begins, default=0) :].strip() or type(error).__name__).splitlines()[0]
    why = "; ".join(line.rstrip(".").split(". ")[:3])  # CUDA out of memory; how much was asked for; how much there is
    return why, isinstance(error, torch.OutOfMemoryError) or any(says in why for says in NO_MEMORY)


@contextlib.contextmanager
def told(where):
    """DeviceFailed or WorkerLost in place of such an error. A GPU reports an error at a call behind the one that made it: where is the latest that it
    can have been."""
    try:
        yield
    except (DeviceFailed, WorkerLost):  # from further in, which knows better
        raise
    except Lost as error:
        raise WorkerLost(where, error) from error
    except (RuntimeError, MemoryError, OSError) as error:
        cause = cause_of(error)
        if cause is None:
            raise
        raise DeviceFailed(where, *cause) from error
