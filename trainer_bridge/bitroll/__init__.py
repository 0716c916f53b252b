"""bitroll for trainers: the ops of the rollout engine as torch functions, so that a trainer's forward gives the same bytes.

    abi         libbitroll through ctypes: structs and constants read from its own headers
    ops         an opened op table: calls with torch tensors, packed matrices
    rows        the packed sequences of one forward
    functions   one torch.autograd.Function an op
    float64     the same functions in float64 torch: what gradients are checked against
    lora        linear maps with adapters: masters, and what forwards read of them
    blocks, model, mcore      the model in torch, and as a Megatron-Core GPTModel
    tensors, names, peft      checkpoints, one table of names, PEFT folders
    stage_hash  the lines of `bitroll dump --stage-hash` from a forward of this package
    in_process  the rollout engine in this process
    grpo        one step of GRPO with its certificate
    resume      a training run on disk
"""
