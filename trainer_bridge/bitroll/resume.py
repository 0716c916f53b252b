"""A training run on disk: masters through Megatron's dist_checkpointing, the optimizer's state, and which version of the adapter comes next.
A folder appears whole or not at all."""
import json
import os
import shutil

import torch
from megatron.core import dist_checkpointing

METADATA = dict(non_homogeneous_layers=True)


def masters(model):
    return model.sharded_state_dict(metadata=METADATA)


def save(folder, model, optimizer, version, base_digest):
    """version: of the last adapter that was published; base_digest: of the frozen weights, which are not copied."""
    part = folder + ".part"
    shutil.rmtree(part, ignore_errors=True)
    os.makedirs(os.path.join(part, "masters"))
    dist_checkpointing.save(masters(model), os.path.join(part, "masters"))
    torch.save(optimizer.state_dict(), os.path.join(part, "optimizer.pt"))
    with open(os.path.join(part, "run.json"), "w", encoding="ascii") as file:
        json.dump(dict(version=version, base_digest=base_digest), file)
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(part, folder)


def load(folder, model, optimizer, base_digest):
    """Fills model and optimizer; returns the version. The base must be the one that the run was made on."""
    with open(os.path.join(folder, "run.json"), encoding="ascii") as file:
        run = json.load(file)
    if run["base_digest"] != base_digest:
        raise ValueError(f"{folder}: made on base weights {run['base_digest']}, these are {base_digest}")
    wanted = {name for name, p in model.named_parameters() if p.requires_grad}
    missing, unexpected = model.load_state_dict(dist_checkpointing.load(masters(model), os.path.join(folder, "masters")), strict=False)
    if unexpected or wanted & set(missing):
        raise KeyError(f"{folder}: {len(unexpected)} tensors without a place, {len(wanted & set(missing))} adapters without values")
    optimizer.load_state_dict(torch.load(os.path.join(folder, "optimizer.pt"), weights_only=True))
    return run["version"]
