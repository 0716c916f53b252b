"""bitroll for trainers: the ops of the rollout engine as torch functions, so that a trainer's forward gives the same bytes.

    abi         libbitroll through ctypes: structs and constants read from its own headers
    ops         an opened op table: calls with torch tensors, packed matrices
    rows        the packed sequences of one forward
    functions   one torch.autograd.Function an op, over node
    float64     the same functions in float64 torch: what gradients are checked against
    rehash      the same functions, watched: what is computed again must be the same bytes
    torch_ops   the same functions with linear maps by torch: a control, not the rollout's bits
    lora        linear maps with adapters: masters, and what forwards read of them
    blocks, model, mcore      the model in torch, and as a Megatron-Core GPTModel
    tensors, names, peft      checkpoints, one table of names, PEFT folders
    refusals    settings and states that are refused by name
    stage_hash, dump          the lines of `bitroll dump --stage-hash` from a forward of this package; python -m bitroll.dump
    program     how programs of this package end: a sentence and an exit status
    libraries   what is said of one that is missing or broken
    importers   log-prob dumps of other stacks, for bitroll parity --foreign; never load libbitroll
    values      tensors on their way out of torch
    digests     what the two sides compare
    in_process  the rollout engine in this process
    bridge      the same engine in another process, behind bitroll-worker: a connection, its texts (remote_texts) and weights (remote_weights)
    wire        libbitroll_bridge through ctypes
    ledger      the proof ledger of a training run
    rl          training runs: python -m bitroll.rl.train
"""
