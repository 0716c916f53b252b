#!/usr/bin/env python3
"""The peer of `bitroll bench`: times calls of torch on the same GPU, in turn with the ops of bitroll.

Says `ready NAME` and then answers each request line with one line: the microseconds of one call, or `error SENTENCE`. The
operands of the last request are kept, so that asking again times again. Requests:

    mm M K N                  x (M, K) bf16 times w (N, K) transposed
    mm_logprob M K N          the same, then float32 log_softmax and the entries of M given tokens
    grouped_mm M D F c,c,..   both products of routed experts in bf16: D -> 2 F and F -> D; c: rows of each expert
    topk R N K                the K best of each of R rows of N float32
    rms_norm M D              bf16
    copy BYTES                on the device

Protocol as on the other side: random operands, never zeros, as many sets as exceed the L2 four times; calls recorded in a CUDA
graph of a few milliseconds; one play to warm up, one between two events.
"""
import math
import os
import sys

SPREAD_BYTES = 240 << 20
SETS_MAX = 16
BLOCK_US = 4000.0
CALLS_MAX = 512

ANSWERS = os.fdopen(os.dup(1), "w")  # nothing that a library prints may stand between answers
os.dup2(2, 1)


def say(text):
    ANSWERS.write(text.replace("\n", " ") + "\n")
    ANSWERS.flush()


def load_torch():
    try:
        import torch
    except ImportError as error:
        sys.exit(f"no peer: {error}")
    if not torch.cuda.is_available():
        sys.exit("no peer: torch sees no GPU")
    return torch


torch = load_torch()
BF16, F32 = torch.bfloat16, torch.float32


def normal(*shape, scale=1.0, dtype=BF16):
    return torch.empty(*shape, device="cuda", dtype=dtype).normal_(0, scale)


def sets(count_bytes):
    """How many operand sets of so many bytes a request goes through."""
    return max(1, min(SETS_MAX, int(SPREAD_BYTES / count_bytes) + 1))


# ---- one function a request: the calls to go through ------------------------------------------------------------------------


def mm(m, k, n):
    count = sets(2 * (k * n + m * k + m * n))
    x = [normal(m, k) for _ in range(count)]
    w = [normal(n, k, scale=2.0**-6) for _ in range(count)]
    y = [torch.empty(m, n, device="cuda", dtype=BF16) for _ in range(count)]
    return [lambda i=i: torch.mm(x[i], w[i].t(), out=y[i]) for i in range(count)]


def mm_logprob(m, k, n):
    x, w = normal(m, k), normal(n, k, scale=2.0**-6)
    token = torch.randint(0, n, (m, 1), device="cuda")
    return [lambda: torch.log_softmax(torch.mm(x, w.t()).float(), -1).gather(1, token)]


def filled(*shape):
    """Large weights in parts: one call of the generator takes no more than 2^31 numbers."""
    w = torch.empty(*shape, device="cuda", dtype=BF16)
    for part in w.split(32):
        part.normal_(0, 2.0**-6)
    return w


EXPERTS = {}  # the weights of all experts are 59 GB at full width: made when first asked for, kept until other requests come


def grouped_mm(m, d, f, counts):
    count = [int(c) for c in counts.split(",")]
    key, rows = (len(count), d, f), sum(count)
    if key not in EXPERTS:
        EXPERTS.clear()
        EXPERTS[key] = (filled(len(count), 2 * f, d), filled(len(count), d, f))
    up, down = EXPERTS[key]
    ends = torch.tensor(count, device="cuda").cumsum(0).to(torch.int32)
    x, h = normal(rows, d), normal(rows, f)

    def both():
        torch._grouped_mm(x, up.transpose(-2, -1), offs=ends, out_dtype=BF16)
        torch._grouped_mm(h, down.transpose(-2, -1), offs=ends, out_dtype=BF16)

    return [both]


def topk(rows, n, k):
    xs = [normal(rows, n, dtype=F32) for _ in range(sets(4 * rows * n))]
    return [lambda x=x: torch.topk(x, k, dim=1) for x in xs]


def rms_norm(m, d):
    xs = [normal(m, d) for _ in range(sets(4 * m * d))]
    w = normal(d)
    return [lambda x=x: torch.nn.functional.rms_norm(x, (d,), w, 1e-5) for x in xs]


def copy(count_bytes):
    x = normal(count_bytes // 2)
    y = torch.empty_like(x)
    return [lambda: y.copy_(x)]


REQUESTS = {f.__name__: f for f in (mm, mm_logprob, grouped_mm, topk, rms_norm, copy)}

# ---- timing -----------------------------------------------------------------------------------------------------------------


def elapsed_us(run):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return 1000.0 * begin.elapsed_time(end)


class Step:
    """The calls of a request, recorded where torch can record them."""

    def __init__(self, calls):
        self.calls = calls
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.once()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        once = elapsed_us(self.once)
        self.passes = max(1, min(CALLS_MAX // len(calls), math.ceil(BLOCK_US / once)))
        self.graph = self.record()

    def once(self):
        for call in self.calls:
            call()

    def all(self):
        for _ in range(self.passes):
            self.once()

    def record(self):
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.all()
        except Exception as error:  # some calls read a size back
            torch.cuda.synchronize()
            print(f"peer: not recorded: {error}", file=sys.stderr)
            return None
        return graph

    def time(self):
        play = self.graph.replay if self.graph else self.all
        play()
        return elapsed_us(play) / (self.passes * len(self.calls))


def main():
    say(f"ready torch {torch.__version__} cuda {torch.version.cuda} on {torch.cuda.get_device_name(0)}")
    last, step = None, None
    torch.manual_seed(1)
    with torch.no_grad():
        for line in sys.stdin:
            words = line.split()
            try:
                if words != last:
                    step, last = None, None
                    if words[0] != "grouped_mm":
                        EXPERTS.clear()
                    torch.cuda.empty_cache()
                    args = [word if "," in word else int(word) for word in words[1:]]
                    step = Step(REQUESTS[words[0]](*args))
                    last = words
                say(f"{step.time():.4f}")
            except Exception as error:
                step, last = None, None
                torch.cuda.empty_cache()
                say(f"error {type(error).__name__}: {error}"[:400])


main()
