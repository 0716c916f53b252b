"""A training run on disk: masters through Megatron's dist_checkpointing, the optimizer's state, what the arm keeps, and how many steps are
done. The folder is replaced as a whole: at every moment either the old one or the new one can be read."""
import contextlib
import hashlib
import json
import os
import queue
import shutil

import torch
from torch.distributed.checkpoint.api import CheckpointException

from .. import quiet
from ..ledger import n_step_of
from . import failures, lock

with quiet.known():
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

# Megatron starts a process for a queue even where it writes in this one; after MPI has started, no process may be forked.
filesystem_async._results_queue = queue.SimpleQueue()

CHECKPOINT, LEDGER, TABLE, ECHO = "checkpoint", "ledger.h5", "metrics.csv", "run.yaml"  # in a run's folder
METADATA = dict(non_homogeneous_layers=True)
RUN = "run.json"
UNREADABLE = "cannot be read as a checkpoint of this run"


def masters(model):
    return model.sharded_state_dict(metadata=METADATA)


def sync_folder(folder):
    """What lies below reaches the disk before the folder's new name does."""
    for place, _, files in os.walk(folder):
        for name in [os.path.join(place, f) for f in files] + [place]:
            handle = os.open(name, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)


def digests(folder):
    """{path below the folder: SHA-256} of all that was saved, but for the file that says so."""
    found = {}
    for place, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(place, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, folder)] = hashlib.sha256(file.read()).hexdigest()
    found.pop(RUN, None)
    return found


class Failed(ValueError):
    """A checkpoint that cannot be written, is damaged, or is of another run; one sentence."""


@contextlib.contextmanager
def told(what):
    """A full disk and a damaged file show as any exception of what writes or reads there, one of which is no Exception. Too little memory and a GPU
    that fails are no fault of the folder."""
    try:
        yield
    except (Failed, failures.DeviceFailed):
        raise
    except (Exception, CheckpointException) as error:
        if any(isinstance(inner, KeyboardInterrupt) for inner, _ in getattr(error, "failures", {}).values()):
            raise KeyboardInterrupt from None  # torch wraps whatever it meets
        cause = failures.cause_of(error)
        if cause:
            raise failures.DeviceFailed(what, *cause) from error
        why = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise Failed(f"{what}: {why}") from error


def save(folder, policy, n_step, kept):
    """n_step: steps that are done; kept: tensors of the arm."""
    part, old = folder + ".part", folder + ".old"
    with told(f"{folder}: cannot be written"):
        recover(folder)
        os.makedirs(os.path.join(part, "masters"))
        dist_checkpointing.save(masters(policy.model), os.path.join(part, "masters"))
        torch.save(dict(optimizer=policy.optimizer.state_dict(), kept=kept), os.path.join(part, "optimizer.pt"))
        with open(os.path.join(part, RUN), "w", encoding="ascii") as file:
            json.dump(dict(n_step=n_step, base_digest=policy.base_digest, files=digests(part)), file)
        sync_folder(part)
        if os.path.exists(folder):
            os.rename(folder, old)
        os.rename(part, folder)
        shutil.rmtree(old, ignore_errors=True)


def recover(folder):
    """After a process was killed: what it was writing is dropped; between the two renames the old folder gets its name back."""
    part, old = folder + ".part", folder + ".old"
    shutil.rmtree(part, ignore_errors=True)
    if os.path.exists(old) and not os.path.exists(folder):
        os.rename(old, folder)
    shutil.rmtree(old, ignore_errors=True)


def stands(out):
    """Is there a checkpoint in a run's folder to go on from, if need be the one that was about to be replaced?"""
    return any(os.path.exists(os.path.join(out, CHECKPOINT + end)) for end in ("", ".old"))


def check(out, library, every):
    """Is the checkpoint in a run's folder of one moment with the ledger? A step is recorded before its checkpoint is written, and `every` steps
    have one; step 0 begins from one as well."""
    checkpoint, ledger = os.path.join(out, CHECKPOINT), os.path.join(out, LEDGER)
    n_recorded = n_step_of(library, ledger) if os.path.exists(ledger) else 0
    if not os.path.exists(checkpoint):
        if n_recorded:
            raise Failed(f"{checkpoint}: is not there, but {LEDGER} has {n_recorded} steps: put it back, or begin again in another folder")
        return
    n_step, _ = header(checkpoint)
    due = (n_step // every + 1) * every
    is_of = f"{checkpoint}: is of {n_step} steps, but {LEDGER} has {n_recorded}"
    if n_recorded < n_step:
        raise Failed(f"{is_of}: put back the {LEDGER} that was written beside it, or begin again in another folder")
    if n_recorded > due:
        raise Failed(f"{is_of}, and the next was due at {due}: put the last one back, or begin again in another folder")


def missing(folder):
    """Of a folder and those that it lies in the ones that are not there, the deepest first."""
    path, found = os.path.abspath(folder), []
    while not os.path.lexists(path):
        found.append(path)
        path = os.path.dirname(path)
    return found


def remove_empty(folders):
    for folder in folders:
        with contextlib.suppress(OSError):  # one that holds something, or that was never made
            os.rmdir(folder)


def forget(out, stood, library):
    """After a start that recorded no step: what it made in a run's folder goes. stood: names of what was there before."""
    ledger, made = os.path.join(out, LEDGER), {lock.FILE}
    if LEDGER not in stood:
        if os.path.exists(ledger) and n_step_of(library, ledger):
            return
        made |= {name + end for name in (LEDGER, CHECKPOINT, TABLE, ECHO) for end in ("", ".part")}
    for name in made.difference(stood):
        path = os.path.join(out, name)
        if os.path.isdir(path):
            shutil.rmtree(path)
        elif os.path.exists(path):
            os.unlink(path)


def header(folder):
    """(Steps that are done, digest of the base.)"""
    with told(f"{folder}: {UNREADABLE}"), open(os.path.join(folder, RUN), encoding="ascii") as file:
        run = json.load(file)
        if type(run["n_step"]) is not int or run["n_step"] < 0:
            raise Failed(f"{folder}: {UNREADABLE}: it is of {run['n_step']} steps")
        found = digests(folder)
        torn = sorted(name for name in run["files"].keys() | found.keys() if run["files"].get(name) != found.get(name))
        if torn:
            raise Failed(f"{folder}: {UNREADABLE}: {torn[0]} is not what was saved")
        return run["n_step"], run["base_digest"]


def load(folder, policy):
    """Fills the policy; (steps that are done, tensors of the arm), or None where no step was saved. The base must be the run's."""
    recover(folder)
    if not os.path.exists(folder):
        return None
    n_step, base_digest = header(folder)
    with told(f"{folder}: {UNREADABLE}"):
        if base_digest != policy.base_digest:
            raise Failed(f"{folder}: made on base weights {base_digest}, these are {policy.base_digest}")
        model = policy.model
        wanted = {name for name, p in model.named_parameters() if p.requires_grad}
        with quiet.known():
            values = dist_checkpointing.load(masters(model), os.path.join(folder, "masters"))
        missing, unexpected = model.load_state_dict(values, strict=False)
        if unexpected or wanted & set(missing):
            raise Failed(f"{folder}: {len(unexpected)} tensors without a place, {len(wanted & set(missing))} adapters without values")
        state = torch.load(os.path.join(folder, "optimizer.pt"), weights_only=True)
        policy.optimizer.load_state_dict(state["optimizer"])
        return n_step, state["kept"]
