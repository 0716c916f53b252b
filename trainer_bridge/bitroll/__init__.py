"""bitroll for trainers: the ops of the rollout engine as torch functions, so that a trainer's forward gives the same bytes.

    abi        libbitroll through ctypes: structs and constants read from its own headers
    ops        an opened op table: calls with torch tensors, packed matrices
    functions  one torch.autograd.Function an op
"""
