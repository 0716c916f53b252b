#!/usr/bin/env python3
"""The trainer's forward (Megatron-Core, no gradients) beside `bitroll score` on the same packs: bits first, then times.

Makes a checkpoint and an adapter, scores packs of --tokens rows with the command, computes them with the trainer, and compares the digest of
all log-probs. Then times of one pack, from tokens on the host to log-probs on the host, in turn: medians of the trainer's, and of the
command's, each taken from two runs so that its start drops out. Ends with one line of JSON, with --csv also a row of the table of `bitroll
bench`; fails when bits differ.

    megatron_forward.py --bitroll build/bitroll --library build/libbitroll.so --backend cuda
"""
import argparse
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "trainer_bridge"))

import torch

import bench_table
from bitroll import abi, lora, mcore, peft
from bitroll.ops import Ops
from bitroll.tensors import Checkpoint

RANK, ALPHA, FEW, WARM, ROUNDS = 32, 64.0, 2, 3, 3


def options():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bitroll", default="build/bitroll")
    parser.add_argument("--library", default="build/libbitroll.so")
    parser.add_argument("--backend", default="cuda", choices=("cuda", "oracle"))
    parser.add_argument("--preset", default="small")
    parser.add_argument("--tokens", type=int, default=8192, help="rows of a pack")
    parser.add_argument("--sequences", type=int, default=16, help="sequences of a pack, all of one length")
    parser.add_argument("--packs", type=int, default=22, help="packs of the longer run of the command")
    parser.add_argument("--repeat", type=int, default=20, help="timed forwards of the trainer")
    parser.add_argument("--csv", help="append the row to it")
    parser.add_argument("--commit", default="")
    return parser.parse_args()


def command(o, *arguments):
    done = subprocess.run([o.bitroll, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"bitroll {arguments[0]}: {done.stderr.strip()}")
    return done.stdout


def score(o, place, texts):
    """The command's JSON for these texts, in packs of o.sequences."""
    path, n = os.path.join(place, "in.jsonl"), len(texts[0])
    with open(path, "w", encoding="ascii") as file:
        file.writelines(json.dumps(dict(uid=f"s{i}", prompt=text)) + "\n" for i, text in enumerate(texts))
    out = command(o, "score", "--json", "--backend", o.backend, "--model", f"{place}/model", "--adapter", f"a={place}/lora", "--adapter-override",
                  "a", "--pack-tokens", n * o.sequences, "--in", path, "--out", f"{place}/out.h5")
    os.remove(f"{place}/out.h5")
    return json.loads(out.splitlines()[-1])


class Trainer:
    def __init__(self, o, place):
        library = abi.Library(o.library)
        config = library.config(f"{place}/model")
        mcore.initialize(o.backend)
        self.ops = Ops(config, o.tokens, o.tokens, rank_max=RANK, n_slot=1, backend=o.backend, gradients=False, library=library)
        checkpoint = Checkpoint(f"{place}/model")
        self.model = mcore.BitrollModel(lora.Settings(self.ops, RANK, ALPHA), config, checkpoint).eval()
        peft.load(self.model, f"{place}/lora", checkpoint.prefix)
        lora.publish(self.model)
        self.n_vocab, self.library = config.n_vocab, library

    @torch.no_grad()
    def log_probs(self, lengths, token, target, temperature):
        """Bits, on the host, of rows on the host."""
        token, target, temperature = (t.to(self.ops.device, non_blocking=True) for t in (token, target, temperature))
        out = self.model.log_probs(token, mcore.pack(lengths), target, temperature, entropy=False)[0].cpu()
        self.model.current.rows.check_faults()
        return out.view(torch.int32)


def rows_of(texts):
    flat = [torch.tensor([t for text in texts for t in part(text)], dtype=torch.int32) for part in (lambda x: x[:-1], lambda x: x[1:])]
    rows = ([len(text) - 1 for text in texts], *flat, torch.ones(len(flat[0])))
    return rows if not torch.cuda.is_available() else (rows[0], *(t.pin_memory() for t in rows[1:]))


def digest(library, texts, bits):
    """src/proof/logprob_digest.h: bits of each text's log-probs, from its second token on."""
    leaves = b""
    for i, (text, own) in enumerate(zip(texts, bits, strict=True)):
        pairs = b"".join(struct.pack("<ii", t + 1, b) for t, b in enumerate(own))
        leaf = library.hash(f"s{i}\0".encode() + struct.pack("<Ii", 0, len(text)) + struct.pack(f"<{len(text)}i", *text) + pairs)
        leaves += struct.pack("<QQ", leaf.lo, leaf.hi)
    return abi.text_of(library.hash(leaves))


def row_of(o, times, peer, found):
    own = statistics.median(times)
    return {"date": bench_table.today(), "commit": o.commit, "gpu": torch.cuda.get_device_name(0) if o.backend == "cuda" else "host",
            "row": f"trainer.forward.{o.preset}.{o.tokens}", "shape": f"{o.tokens} rows; {o.sequences} sequences; Megatron-Core model without gradients",
            "us": f"{own * 1e6:.3f}", "us_min": f"{min(times) * 1e6:.3f}", "us_max": f"{max(times) * 1e6:.3f}", "peer": "bitroll score",
            "peer_us": f"{peer * 1e6:.3f}", "ratio": f"{peer / own:.4f}", "digest": found}


def main():
    o = options()
    if o.tokens % o.sequences:
        sys.exit(f"--tokens {o.tokens}: expected a multiple of --sequences {o.sequences}")
    with tempfile.TemporaryDirectory(prefix="bitroll-forward-") as place:
        command(o, "init", "--preset", o.preset, "--seed", 1, "--out", f"{place}/model", "--lora-rank", RANK, "--lora-out", f"{place}/lora",
                "--lora-seed", 3)
        trainer, rng = Trainer(o, place), random.Random(5)
        n = o.tokens // o.sequences
        texts = [[rng.randrange(3, trainer.n_vocab) for _ in range(n + 1)] for _ in range(o.packs * o.sequences)]
        few = texts[: FEW * o.sequences]
        packs = [rows_of(few[i * o.sequences : (i + 1) * o.sequences]) for i in range(FEW)]
        bits = torch.cat([trainer.log_probs(*rows) for rows in packs]).view(-1, n).tolist()
        wanted, found = score(o, place, few), digest(trainer.library, few, bits)
        print(f"log-prob digest of {len(few)} sequences: command {wanted['logprob_digest']}, trainer {found}")
        if wanted["logprob_digest"] != found:
            sys.exit("the log-probs of the trainer's forward are not the command's: nothing was timed")
        peers, times, queued = [], [], []
        for _ in range(ROUNDS):  # in turn, so that both meet the same clocks
            peers.append((score(o, place, texts)["forward_seconds"] - score(o, place, few)["forward_seconds"]) / (o.packs - FEW))
            for i in range(WARM + o.repeat):
                begin = time.perf_counter()
                trainer.log_probs(*packs[i % FEW])
                if i >= WARM:
                    times.append(time.perf_counter() - begin)
        peer = statistics.median(peers)
        for i in range(o.repeat):  # how long Python takes to put a forward into the queue, of which the GPU sees nothing while it is busy
            lengths, *host = packs[i % FEW]
            device = [t.to(trainer.ops.device) for t in host]
            trainer.ops.wait()
            begin = time.perf_counter()
            with torch.no_grad():
                trainer.model.log_probs(device[0], mcore.pack(lengths), *device[1:], entropy=False)
            queued.append(time.perf_counter() - begin)
            trainer.ops.wait()
        own = statistics.median(times)
        if o.csv:
            bench_table.append(o.csv, [row_of(o, times, peer, found)])
        print(json.dumps(dict(preset=o.preset, backend=o.backend, rows=o.tokens, sequences=o.sequences, score_ms=round(peer * 1e3, 3),
                              trainer_ms=round(own * 1e3, 3), trainer_ms_min=round(min(times) * 1e3, 3),
                              queue_ms=round(statistics.median(queued) * 1e3, 3), ratio=round(peer / own, 4), digest=found)))


if __name__ == "__main__":
    main()
