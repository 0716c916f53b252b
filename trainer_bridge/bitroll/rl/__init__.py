"""Reinforcement learning of adapters, a rollout engine and a trainer that agree to the bit.

    settings    one YAML file, checked
    task        prompts and their reward
    episodes    texts of one or more turns, sampled by the engine
    policy      the model that is trained: forwards, gradients, updates, what is published
    objective   advantages, the clipped objective, statistics of log-ratios
    arms        how the rollout's weights come to be: exact, and three controls that must show a difference
    expand      a checkpoint with its experts in bf16, which the merged arm rolls out with
    grpo        one step and its certificate
    resume      a training run on disk; lock: one run at a time
    metrics     one CSV row a step; bars: what a finished run must show
    train       the loop: python -m bitroll.rl.train
    report      plots, a page and events of runs: python -m bitroll.rl.report
    base_model  the base of the arithmetic runs as it is kept; train_base makes one"""
