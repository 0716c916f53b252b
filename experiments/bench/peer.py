#!/usr/bin/env python3
"""The peer of `bitroll bench`: times calls of torch on the same GPU, in turn with the ops of bitroll.

Says `ready NAME` and then answers each request line with one line: the microseconds of one call, or `error SENTENCE`. The
operands of the last request are kept, so that asking again times again. Requests:

    mm M K N                  x (M, K) bf16 times w (N, K) transposed
    bmm B M K N               B of these
    mm_logprob M K N          the same, then float32 log_softmax and the entries of M given tokens
    grouped_mm M D F c,c,..   both products of routed experts in bf16: D -> 2 F and F -> D; c: rows of each expert
    topk R N K                the K best of each of R rows of N float32
    rms_norm M D              bf16
    layer_norm M D            bf16
    add M D                   bf16
    embedding M N D           M rows of a table (N, D) bf16
    conv B C T                causal depthwise convolution of 4 taps, then silu: B sequences of T tokens, C channels, bf16
    route M D E K             x (M, D) bf16 times w (E, D) transposed, sigmoid, the K best by a bias, their normalised scores
    combine M K D             sums of K rows of D bf16, weighted
    sample M N                of M rows of N float32 logits: log_softmax, a draw, the entry of what is drawn
    copy BYTES                on the device

Protocol as on the other side: random operands, never zeros, as many sets as exceed the L2 four times; calls recorded in a CUDA
graph of a few milliseconds; one play to warm up, one between two events.
"""
import math
import os
import sys

SPREAD_BYTES = 240 << 20
SETS_MAX = 64
L2_BYTES = 60 << 20
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
DEVICE, F = "cuda", torch.nn.functional


def normal(*shape, scale=1.0, dtype=BF16):
    return torch.empty(*shape, device=DEVICE, dtype=dtype).normal_(0, scale)


def sets(count_bytes):
    """How many operand sets of so many bytes a request goes through."""
    return max(1, min(SETS_MAX, int(SPREAD_BYTES / count_bytes) + 1))


def row_sets(count_bytes):
    """The same of rows alone: those that a step has just written are in the L2 if they fit."""
    return 1 if count_bytes <= L2_BYTES else sets(count_bytes)


# ---- one function a request: the calls to go through ------------------------------------------------------------------------


def mm(m, k, n):
    count = sets(2 * (k * n + m * k + m * n))
    x = [normal(m, k) for _ in range(count)]
    w = [normal(n, k, scale=2.0**-6) for _ in range(count)]
    y = [torch.empty(m, n, device=DEVICE, dtype=BF16) for _ in range(count)]
    return [lambda i=i: torch.mm(x[i], w[i].t(), out=y[i]) for i in range(count)]


def bmm(b, m, k, n):
    count = sets(2 * b * (k * n + m * k + m * n))
    x = [normal(b, m, k) for _ in range(count)]
    w = [normal(b, n, k, scale=2.0**-6) for _ in range(count)]
    y = [torch.empty(b, m, n, device=DEVICE, dtype=BF16) for _ in range(count)]
    return [lambda i=i: torch.bmm(x[i], w[i].transpose(1, 2), out=y[i]) for i in range(count)]


def mm_logprob(m, k, n):
    x, w = normal(m, k), normal(n, k, scale=2.0**-6)
    token = torch.randint(0, n, (m, 1), device=DEVICE)
    return [lambda: torch.log_softmax(torch.mm(x, w.t()).float(), -1).gather(1, token)]


def filled(*shape):
    """Large weights in parts: one call of the generator takes no more than 2^31 numbers."""
    w = torch.empty(*shape, device=DEVICE, dtype=BF16)
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
    ends = torch.tensor(count, device=DEVICE).cumsum(0).to(torch.int32)
    x, h = normal(rows, d), normal(rows, f)

    def both():
        torch._grouped_mm(x, up.transpose(-2, -1), offs=ends, out_dtype=BF16)
        torch._grouped_mm(h, down.transpose(-2, -1), offs=ends, out_dtype=BF16)

    return [both]


def topk(rows, n, k):
    xs = [normal(rows, n, dtype=F32) for _ in range(sets(4 * rows * n))]
    return [lambda x=x: torch.topk(x, k, dim=1) for x in xs]


def rms_norm(m, d):
    xs = [normal(m, d) for _ in range(row_sets(4 * m * d))]
    w = normal(d)
    return [lambda x=x: F.rms_norm(x, (d,), w, 1e-5) for x in xs]


def layer_norm(m, d):
    xs = [normal(m, d) for _ in range(row_sets(4 * m * d))]
    w, b = normal(d), normal(d)
    return [lambda x=x: F.layer_norm(x, (d,), w, b, 1e-5) for x in xs]


def add(m, d):
    pairs = [(normal(m, d), normal(m, d)) for _ in range(row_sets(6 * m * d))]
    return [lambda x=x, y=y: torch.add(x, y) for x, y in pairs]


def embedding(m, n, d):
    table = normal(n, d)
    token = torch.randint(0, n, (m,), device=DEVICE)
    return [lambda: F.embedding(token, table)]


def conv(b, c, t):
    xs = [normal(b, c, t + 3) for _ in range(row_sets(4 * b * c * t))]
    w = normal(c, 1, 4)
    return [lambda x=x: F.silu(F.conv1d(x, w, groups=c)) for x in xs]


def route(m, d, n_expert, k):
    x, bias = normal(m, d), normal(n_expert, scale=0.01, dtype=F32)
    ws = [normal(n_expert, d, scale=2.0**-6) for _ in range(sets(2 * n_expert * d))]

    def choose(w):
        score = torch.mm(x, w.t()).float().sigmoid()
        p = score.gather(1, torch.topk(score + bias, k, dim=1)[1])
        return p / p.sum(1, keepdim=True)

    return [lambda w=w: choose(w) for w in ws]


def combine(m, k, d):
    es = [normal(m, k, d) for _ in range(row_sets(2 * m * k * d))]
    p = normal(m, 1, k, scale=0.1)
    return [lambda e=e: torch.bmm(p, e) for e in es]


def sample(m, n):
    logit, noise = normal(m, n, scale=2.2, dtype=F32), torch.empty(m, n, device=DEVICE, dtype=F32)

    def draw():
        logprob = torch.log_softmax(logit, -1)
        return logprob.gather(1, (logprob - noise.exponential_().log_()).argmax(-1, keepdim=True))

    return [draw]


def copy(count_bytes):
    x = normal(count_bytes // 2)
    y = torch.empty_like(x)
    return [lambda: y.copy_(x)]


REQUESTS = {f.__name__: f for f in (mm, bmm, mm_logprob, grouped_mm, topk, rms_norm, layer_norm, add, embedding, conv, route, combine,
                                    sample, copy)}

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
