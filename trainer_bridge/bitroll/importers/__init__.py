"""Log-prob dumps of other stacks as files for `bitroll parity --foreign`: python -m bitroll.importers.NAME IN --out F.h5 ...

    nemo_jsonl      NeMo-RL's train_data_step*.jsonl: both sides
    slime_pt        slime's --save-debug-rollout-data and --save-debug-train-data
    verl_dataproto  a verl DataProto as a torch file of plain tensors: both sides
    vllm_json       vLLM's RequestOutput as JSON
    sglang_json     SGLang's /generate responses
    dump_file       what they share

They need h5py and numpy, those of torch files torch as well, never libbitroll. What a log-prob is of, its temperature and its token are
never guessed: they are in the dump or given as an option. A torch file is read in weights-only mode: nothing in it runs."""
