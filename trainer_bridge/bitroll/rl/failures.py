"""What torch raises where memory or a GPU fails, as one sentence that says where the run was. What is a fault of the program keeps its traceback."""
import contextlib

import torch

# The CPU's allocator and CUDA's libraries say it in a plain RuntimeError.
SAYS = ("CUDA error: ", "CUDA driver error: ", "cuDNN error: ", "DefaultCPUAllocator: ")
NO_MEMORY = ("out of memory", "can't allocate memory", "STATUS_ALLOC_FAILED")
PROGRAM = "device-side assert"  # an index out of range, seen by a GPU


class DeviceFailed(RuntimeError):
    """where: of the run; why: torch's words; is_memory: there was too little."""

    def __init__(self, where, why, is_memory):
        super().__init__(f"{where}: {why}")
        self.is_memory = is_memory

    def sentence(self, less):
        """less: what needs less memory, each with the value that it has."""
        return f"{self}: {less}: expected a smaller one" if self.is_memory else str(self)


def words_of(error):
    """Torch's, without its advice to who writes programs; None of an error that is no device's."""
    text = str(error)
    begins = [text.find(says) for says in SAYS if says in text]
    is_device = begins or isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError))
    if PROGRAM in text or not is_device:
        return None
    line = text[min(begins, default=0) :].splitlines()[0]
    return "; ".join(line.rstrip(".").split(". ")[:3])  # CUDA out of memory; how much was asked for; how much there is


@contextlib.contextmanager
def told(where):
    """DeviceFailed in place of torch's error. A GPU reports an error at a call behind the one that made it: where is the latest that it can
    have been."""
    try:
        yield
    except DeviceFailed:  # from further in, which knows better
        raise
    except RuntimeError as error:
        why = words_of(error)
        if why is None:
            raise
        raise DeviceFailed(where, why, any(says in why for says in NO_MEMORY)) from error
