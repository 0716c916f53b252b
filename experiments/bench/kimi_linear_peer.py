#!/usr/bin/env python3
"""Kimi-Linear with random weights of the 48B shape: `bitroll generate` beside `generate` of transformers, on one GPU.

    python3 experiments/bench/kimi_linear_peer.py --bitroll build/bitroll --csv experiments/bench/results/h200.csv

The two models do not fit the card together (98 GB each): first transformers runs, in a process of its own, then bitroll, a
process for each time. Both read the config.json of one `bitroll init` folder and draw greedily, from the same random prompts, so many
tokens however they read. Rows, with the columns of `bitroll bench`:

    kimi_linear.generate.b<B>   microseconds of a step: all of a generation of --new tokens, its prompts too, over --new
    kimi_linear.token.b<B>      of a decode step: what --new tokens take longer than a quarter of them, over the difference

The time of bitroll is the first generation of its process, loading left out; that of transformers the median of three, after one
to warm up: so `generate` holds our cold start, `token` does not. transformers runs as it comes: KimiLinearForCausalLM in bf16, its
own defaults, which are sdpa attention, torch._grouped_mm experts and the dynamic cache, not compiled. flash-linear-attention and
causal_conv1d are not in a stock stack: recurrence and convolution are its PyTorch forms. Its static cache, which it compiles, was
tried on one H200: within 90 s for one prompt and 75 s for 64, loading included, it had given no time yet.

Prompts take part in both measures: where transformers runs out of memory in the prompts of a batch, their length is halved
for both until it does not, and the row names it."""
import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

import bench_table

REPEATS = 3

# ---- transformers, in the child ---------------------------------------------------------------------------------------------


def fill(torch, model):
    """What the recipes of the model's own initialisation make, in bf16 and without its copies in host memory."""
    for name, tensor in list(model.named_parameters()) + list(model.named_buffers()):
        if name.endswith("A_log"):
            tensor.uniform_(0, 2)
        elif name.endswith("dt_bias"):
            tensor.uniform_(-6, -1)
        elif tensor.dim() == 1 and name.endswith("weight"):
            tensor.fill_(1)  # norms
        elif tensor.is_floating_point():
            for part in tensor.split(16) if tensor.dim() == 3 else [tensor]:
                part.normal_(0, 0.02)
        else:
            sys.exit(f"unexpected tensor {name}")


def open_model(torch, folder, device):
    import transformers
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = transformers.KimiLinearForCausalLM(config)
    model.to_empty(device=device)
    with torch.no_grad():
        fill(torch, model)
    model.eval()
    model.generation_config.eos_token_id = None
    return model, config, transformers.__version__


def time_generation(torch, model, prompt, n_new):
    options = {"max_new_tokens": n_new, "min_new_tokens": n_new, "do_sample": False, "pad_token_id": 0,
               "attention_mask": torch.ones_like(prompt)}
    begin = time.monotonic()
    out = model.generate(prompt, **options)
    _ = out.cpu()
    if out.shape[1] != prompt.shape[1] + n_new:
        sys.exit(f"generated {out.shape[1] - prompt.shape[1]} tokens instead of {n_new}")
    return time.monotonic() - begin


def child(arguments):
    """One line of JSON a batch: prompt_len, and for each count of new tokens the times."""
    import torch
    device = "cuda" if torch.cuda.is_available() else "cpu"
    begin = time.monotonic()
    model, config, version = open_model(torch, arguments.child, device)
    print(f"transformers {version}, torch {torch.__version__}, {model.config._attn_implementation} attention, experts "
          f"{getattr(model.config, '_experts_implementation', None)}: {sum(p.numel() for p in model.parameters()) / 1e9:.2f} G "
          f"parameters in {time.monotonic() - begin:.1f} s", file=sys.stderr)
    for batch in arguments.batch:
        n = arguments.prompt
        while True:
            prompt = torch.tensor(prompts(batch, n, config.vocab_size), device=device)
            try:
                times = {}
                time_generation(torch, model, prompt, min(4, arguments.new))
                for n_new in lengths(arguments):
                    times[n_new] = [time_generation(torch, model, prompt, n_new) for _ in range(REPEATS)]
                break
            except torch.OutOfMemoryError as error:
                print(f"batch {batch}, prompts of {n}: {str(error)[:160]}", file=sys.stderr)
                torch.cuda.empty_cache()
                n //= 2
                if n == 0:
                    sys.exit("no prompt fits")
        name = torch.cuda.get_device_name(0) if device == "cuda" else "cpu"
        print(json.dumps({"batch": batch, "prompt": n, "times": times, "gpu": name, "version": version}), flush=True)


# ---- both -------------------------------------------------------------------------------------------------------------------


def prompts(batch, n, vocab):
    draw = random.Random(7)
    return [[draw.randrange(3, vocab - 1000) for _ in range(n)] for _ in range(batch)]


def lengths(arguments):
    """A short generation and the whole one."""
    return (max(1, arguments.new // 4), arguments.new)


def run_transformers(arguments, folder):
    command = [sys.executable, os.path.abspath(__file__), "--child", folder, "--prompt", str(arguments.prompt), "--new",
               str(arguments.new), "--batch", *map(str, arguments.batch)]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        print(f"transformers ended with {done.returncode} after {len(lines)} batches", file=sys.stderr)
    return {line["batch"]: line for line in lines}


def run_bitroll(arguments, folder, work, batch, n_prompt, n_new):
    """Seconds of the generation and its log-prob digest."""
    path = os.path.join(work, "prompts.jsonl")
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        vocab = json.load(file)["vocab_size"]
    with open(path, "w", encoding="utf-8") as file:
        for prompt in prompts(batch, n_prompt, vocab):
            file.write(json.dumps({"prompt": prompt}) + "\n")
    command = [arguments.bitroll, "generate", "--json", "--model", folder, "--prompts", path, "--out", os.path.join(work, "r.h5"),
               "--max-new", str(n_new), "--ignore-eos", "--temperature", "0", "--max-seqs", str(batch), "--chunk-tokens",
               str(max(256, min(8192, batch * n_prompt)))]
    begin = time.monotonic()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    report = json.loads(done.stdout.splitlines()[-1])
    print(f"bitroll: {batch} x {n_new} tokens in {report['seconds']:.3f} s, its process {time.monotonic() - begin:.1f} s",
          file=sys.stderr)
    return report["seconds"], report.get("logprob_digest", "")


def rows_of(arguments, batch, n_prompt, ours, theirs, digest):
    """theirs: None where transformers gave no times."""
    short, long = lengths(arguments)
    measures = [("generate", long, lambda t: t[long] / long), ("token", long - short, lambda t: (t[long] - t[short]) / (long - short))]
    for name, n_new, of in measures:
        us = 1e6 * of(ours)
        row = {"date": bench_table.today(), "commit": arguments.commit, "row": f"kimi_linear.{name}.b{batch}", "us": f"{us:.3f}",
               "shape": f"{arguments.preset} bf16; {batch} prompts of {n_prompt}; {n_new} new tokens; greedy", "digest": digest}
        if theirs:
            peer_us = 1e6 * of({n: statistics.median(theirs["times"][str(n)]) for n in (short, long)})
            row |= {"gpu": theirs["gpu"], "peer": f"transformers {theirs['version']} generate", "peer_us": f"{peer_us:.3f}",
                    "ratio": f"{peer_us / us:.4f}"}
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--bitroll", default="build/bitroll", help="the command")
    parser.add_argument("--preset", default="kimi-linear-48b")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--csv", help="append the rows to it")
    parser.add_argument("--commit", default="")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.new < 4:
        sys.exit("--new: expected 4 or more")
    if arguments.child:
        child(arguments)
        return
    with tempfile.TemporaryDirectory(prefix="bitroll-kimi-linear-") as work:
        folder = os.path.join(work, "model")
        subprocess.run([arguments.bitroll, "init", "--preset", arguments.preset, "--seed", "1", "--out", folder, "--recipe"],
                       check=True, stdout=subprocess.DEVNULL)
        theirs = {} if arguments.no_peer else run_transformers(arguments, folder)
        for batch in arguments.batch:
            n_prompt = theirs[batch]["prompt"] if batch in theirs else arguments.prompt
            ours, digest = {}, ""
            for n_new in lengths(arguments):
                ours[n_new], digest = run_bitroll(arguments, folder, work, batch, n_prompt, n_new)
            bench_table.append(arguments.csv, rows_of(arguments, batch, n_prompt, ours, theirs.get(batch), digest))


main()
