"""Libraries of this Python that are not there, or that cannot be loaded: which, and what to do, in one sentence."""
import sys


def fault(error, needed):
    """error: what importing one of `needed`, names as pip has them, raised. A broken library raises whatever its damage led to; the reason stands at
    the beginning of the chain, and numpy says pages behind it."""
    if isinstance(error, ModuleNotFoundError) and not error.__cause__:
        return f"this Python has no {error.name}, which is needed here: {sys.executable} -m pip install {needed}"
    while error.__cause__:
        error = error.__cause__
    why = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"a library of this Python cannot be loaded ({why}): {sys.executable} -m pip install --force-reinstall {needed}"
