"""The engine behind the bridge against the engine in this process: over a UNIX socket the same bytes, and every fault an exception with a
sentence. test_launch is the same over MPI."""
import contextlib
import ctypes
import itertools
import os
import signal
import socket
import subprocess
import threading
import time
import types
import unittest
from unittest import mock

import torch

import rig
from bitroll import abi, in_process, remote_texts, remote_weights, values
from bitroll.bridge import Refused, Remote
from bitroll.digests import NOTHING, adapter_digest, digest_of_bits, weights_digest
from bitroll.in_process import INITIAL, RESYNC, Engine, Sample
from bitroll.tensors import Checkpoint
from bitroll.wire import TYPE

WORKER = os.path.join(os.path.dirname(rig.BITROLL), "bitroll-worker")
SETTINGS = types.SimpleNamespace(rank=rig.RANK, alpha=rig.ALPHA, rslora=False)
OPTIONS = ["--adapter", "policy=", "--swap-rank", str(rig.RANK), "--swap-alpha", str(rig.ALPHA), "--backend", rig.BACKEND, "--threads", "1"]
ABORT = abi.CONSTANTS["BR_STOP_ABORT"]
NEW, LONG, DEAD_MS = 6, 200, 2000
counter = itertools.count()


def here(folder):
    return Engine(rig.LIBRARY, folder, {"policy": None}, swap_rank=rig.RANK, swap_alpha=rig.ALPHA, n_thread=1)


def version(shapes, seed):
    """An adapter of random numbers."""
    torch.manual_seed(seed)
    return {name: (torch.randn(*shape) * 0.05).bfloat16() for name, shape in shapes.items()}


def samples(n=12):
    """Ragged prompts, two samples each."""
    return [Sample(f"prompt {i // 2}", i % 2, [3 + (7 * i // 2 + k) % 200 for k in range(2 + 5 * (i // 2))]) for i in range(n)]


@contextlib.contextmanager
def on_a_gpu(at=0):
    """As if all tensors lay on a GPU, their block `at` bytes behind the beginning of its allocation; what gives a block's handle."""
    def handle_of(block):
        return abi.STRUCTS["br_ipc"](handle=(ctypes.c_uint8 * 64)(*(block.data_ptr() - at).to_bytes(8, "little")), offset=at)

    def block_of(values):
        return torch.cat([value.reshape(-1) for value in values])
    with mock.patch.object(remote_weights, "block_of", block_of), mock.patch.object(values, "block_of", block_of):
        yield handle_of


def flipped(digest):
    return f"{int(digest[0], 16) ^ 1:x}" + digest[1:]


def check_round(test, remote, engine):
    """Manifest, swap, texts and certificates are those of an engine in this process."""
    shapes = engine.manifest("policy")
    test.assertEqual(list(remote.manifest("policy").items()), list(shapes.items()))
    for number in (0, 1):
        tensors = version(shapes, number)
        digest = engine.swap("policy", number, tensors, 0 if number else INITIAL)
        there = {name: value.to(rig.DEVICE) for name, value in tensors.items()}
        test.assertEqual(remote.swap("policy", number, there, 0 if number else INITIAL), digest)
        test.assertEqual(remote.last_swap["by_handle"], rig.BACKEND == "cuda")
        test.assertEqual(adapter_digest(rig.LIBRARY, shapes, tensors, SETTINGS), digest)
        test.assertEqual(remote.live_digest("policy"), digest)
    test.assertEqual(remote.last_swap["bytes"], sum(2 * a * b for a, b in shapes.values()))
    test.assertEqual((remote.weights_digest(), remote.contract_digest()), (engine.weights_digest(), engine.contract_digest()))
    sampling = dict(max_new=NEW, ignore_eos=1, temperature=0.7, top_p=0.95, top_k=50, min_p=0.01)
    for adapter in ("policy", "base"):
        for n in (1, 12, 70):
            ours, theirs = samples(n), samples(n)
            for texts, one in ((ours, engine), (theirs, remote)):
                one.generate(texts, adapter, 7, n <= 12, base=adapter == "policy", **sampling)
            test.assertEqual([(t.tokens, t.digest, t.base) for t in theirs], [(t.tokens, t.digest, t.base) for t in ours])
            number = 1 if adapter == "policy" else 0  # those of the base count on their own
            test.assertEqual({(t.certified, t.version_begin, t.version_end) for t in theirs}, {(True, number, number)})
            if n <= 12:
                test.assertEqual([t.logprob for t in ours + theirs], [[]] * 2 * n)
                certificates = [flipped(t.digest) if i == 0 else t.digest for i, t in enumerate(ours)]
                engine.release(ours, certificates)
                remote.release(theirs, certificates)
            test.assertEqual([t.logprob for t in theirs], [t.logprob for t in ours])
            test.assertEqual([digest_of_bits(rig.LIBRARY, t.logprob) for t in theirs], [t.digest for t in theirs])
            test.assertEqual({len(t.logprob) for t in theirs}, {NEW})
            test.assertEqual([t.base for t in ours], engine.score(ours, None, 0.7) if adapter == "policy" else [[]] * n)
    for adapter in ("policy", "base"):  # the texts are of the base
        scores = remote.score(theirs, adapter, 0.7)
        test.assertEqual(scores, engine.score(theirs, adapter, 0.7))
        test.assertEqual(scores == [t.logprob for t in theirs], adapter == "base")


# ---- over a socket -----------------------------------------------------------------------------------------------------------


class Rig:
    """A worker, an engine of this process on the same checkpoint, and a Remote on demand."""

    def __init__(self, *options):
        self.folder, _ = rig.checkpoint("pico")
        self.path = os.path.join(rig.PLACE, f"worker-{next(counter)}.sock")
        self.worker = subprocess.Popen([WORKER, "--model", self.folder, "--socket", self.path, *OPTIONS, *options], stdout=subprocess.DEVNULL)
        self.engine, self.remotes = here(self.folder), []
        self.shapes = self.engine.manifest("policy")

    def remote(self, folder=None, path=None, **options):
        self.remotes.append(Remote(rig.LIBRARY, folder or self.folder, "unix:" + (path or self.path), SETTINGS, **{"wait_ms": 20000, **options}))
        return self.remotes[-1]

    def lose(self, remote):
        """As when the trainer dies: no BYE."""
        remote.bridge.c.tb_trainer_close(remote.trainer, 0)
        remote.trainer = None

    def close(self):
        for remote in self.remotes:
            remote.close()
        self.engine.close()
        self.worker.kill()
        self.worker.wait()


@contextlib.contextmanager
def rigged(*options):
    r = Rig(*options)
    try:
        yield r
    finally:
        r.close()


def tapped(path, flip):
    """A socket that hands on to `path`, frame by frame in the trainer's direction through flip(type, payload)."""
    place, server = f"{path}.tap", socket.socket(socket.AF_UNIX)
    server.bind(place)
    server.listen()

    def whole(conn, n):
        data = bytearray()
        while len(data) < n:
            part = conn.recv(n - len(data))
            if not part:
                raise ConnectionError
            data += part
        return data

    def to_worker(trainer, worker):
        with contextlib.suppress(OSError):
            while True:
                head = whole(trainer, 64)
                payload = whole(trainer, int.from_bytes(head[40:48], "little"))
                flip(int.from_bytes(head[8:10], "little"), payload)
                worker.sendall(head + payload)

    def to_trainer(trainer, worker):
        with contextlib.suppress(OSError):
            while part := worker.recv(1 << 16):
                trainer.sendall(part)
            trainer.shutdown(socket.SHUT_RDWR)

    def serve():
        with server, server.accept()[0] as trainer, socket.socket(socket.AF_UNIX) as worker:
            worker.connect(path)
            threading.Thread(target=to_worker, args=(trainer, worker), daemon=True).start()
            to_trainer(trainer, worker)
    threading.Thread(target=serve, daemon=True).start()
    return place


class Socket(unittest.TestCase):
    def test_the_engines_bytes(self):
        with rigged() as r:
            remote = r.remote()
            check_round(self, remote, r.engine)
            remote.close()
            self.assertEqual(r.worker.wait(10), 0)

    def test_abort_and_resume(self):
        with rigged() as r:
            remote = r.remote(grant_bytes=512)  # the worker cannot be far ahead of what was taken here
            sampling = dict(ignore_eos=1, temperature=0.7)
            whole, cut = samples(4), samples(4)
            r.engine.generate(whole, "base", 7, certify=False, max_new=LONG, **sampling)
            remote.start(cut, "base", 7, max_new=LONG, **sampling)
            remote.wait(lambda: len(cut[0].tokens) > 3, "tokens")
            remote.abort(cut)
            self.assertEqual({t.stop for t in cut}, {ABORT})
            self.assertLess(max(len(t.tokens) for t in cut), LONG)
            rest = [Sample(t.uid, t.sample, t.prompt + t.tokens) for t in cut]
            for text, one in zip(cut, rest):
                remote.generate([one], "base", 7, max_new=LONG - len(text.tokens), **sampling)
            remote.release(cut + rest, [t.digest for t in cut + rest])
            self.assertEqual([a.tokens + b.tokens for a, b in zip(cut, rest)], [t.tokens for t in whole])
            self.assertEqual([a.logprob + b.logprob for a, b in zip(cut, rest)], [t.logprob for t in whole])

    def test_an_abort_that_crosses_the_end(self):
        """The worker has sent GEN_DONE when GEN_ABORT comes: the text is whole, its log-probs wait for their certificate."""
        with rigged() as r:
            remote, texts, whole, ended = r.remote(), samples(3), samples(3), []
            r.engine.generate(whole, "base", 7, certify=False, max_new=NEW, ignore_eos=1)
            take, finish = remote.take_gen_done, remote.finish
            remote.take_gen_done = lambda number, done: ended.append((number, type(done).from_buffer_copy(done)))
            remote.start(texts, "base", 7, max_new=NEW, ignore_eos=1)
            remote.wait(lambda: len(ended) == len(texts), "generation")
            remote.finish = lambda _: [take(*end) for end in ended]
            remote.abort(texts)
            remote.take_gen_done, remote.finish = take, finish
            remote.release(texts, [t.digest for t in texts])
            self.assertEqual([(t.tokens, t.stop, t.logprob) for t in texts], [(t.tokens, t.stop, t.logprob) for t in whole])

    def test_a_release_of_what_is_discarded(self):
        """Is an error at once; the other texts of the release come all the same."""
        with rigged() as r:
            remote, texts = r.remote(), samples(3)
            remote.generate(texts, "base", 7, max_new=NEW, ignore_eos=1)
            number = remote.held[texts[1]]
            remote.discard(texts[1:2])
            remote.held[texts[1]] = number
            begin = time.monotonic()
            with self.assertRaisesRegex(abi.Error, f"GEN_RELEASE {number}: no log-probs are held of it"):
                remote.release(texts, [t.digest for t in texts])
            self.assertLess(time.monotonic() - begin, 5)
            self.assertEqual([len(t.logprob) for t in texts], [NEW, 0, NEW])
            remote.generate(samples(1), "base", 7, max_new=NEW, ignore_eos=1)

    def test_texts_that_wait_for_credit_are_aborted_too(self):
        with rigged("--requests", "2") as r:
            remote, texts = r.remote(), samples(6)
            remote.start(texts, "base", 7, max_new=LONG, ignore_eos=1)
            remote.abort(texts)
            self.assertEqual({t.stop for t in texts}, {ABORT})
            self.assertEqual(texts[5].tokens, [])

    def test_more_certified_texts_than_the_worker_holds(self):
        with rigged("--requests", "4") as r:
            remote, texts = r.remote(), samples(6)
            with self.assertRaisesRegex(abi.Error, "2 requests are left without credit while the worker, which holds 4 at once, "
                                        "holds 4 texts for their certificates: release those, or start it with --requests 6 or more"):
                remote.generate(texts, "base", 7, max_new=2, ignore_eos=1)
            remote.release(texts[:2], [t.digest for t in texts[:2]])
            remote.discard(texts[2:4])
            others = samples(8)[4:]
            remote.generate(others, "base", 7, max_new=2, ignore_eos=1)
            self.assertEqual({len(t.tokens) for t in others}, {2})

    def test_a_score_beside_texts_that_are_held(self):
        """It takes a place of its own: prompts x samples were not enough."""
        for n, sentence in ((5, None), (4, "4 requests are left without credit .* --requests 5 or more")):
            with self.subTest(n=n), rigged("--requests", str(n)) as r:
                remote, texts = r.remote(), samples(4)
                remote.swap("policy", 0, version(r.shapes, 1), INITIAL)
                with self.assertRaisesRegex(abi.Error, sentence) if sentence else contextlib.nullcontext():
                    remote.generate(texts, "policy", 7, base=True, max_new=2, ignore_eos=1)
                    self.assertEqual({len(t.base) for t in texts}, {2})

    def test_a_request_that_the_engine_refuses(self):
        with rigged() as r:
            remote = r.remote()
            with self.assertRaisesRegex(abi.Error, "stranger"):
                remote.generate(samples(2), "stranger", 7)
            with self.assertRaisesRegex(TypeError, "no field 'top_pp'"):
                remote.generate(samples(2), "base", 7, top_pp=0.5)
            remote.generate(samples(2), "base", 7)

    def test_what_is_refused_before_it_is_sent_leaves_nothing(self):
        with rigged() as r:
            remote, texts = r.remote(wait_ms=5000), samples(2)
            with self.assertRaisesRegex(abi.Error, "GEN_REQ, adapter"):
                remote.generate(texts, "x" * 300, 7, max_new=2, base=True)
            self.assertEqual((remote.running, remote.with_base), ({}, {}))
            for engine, said in ((remote, "W_BEGIN, version 18446744073709551616: expected 0 to"), (r.engine, "version 18446744073709551616: expected ")):
                with self.assertRaisesRegex(abi.Error, said):
                    engine.swap("policy", 1 << 64, version(r.shapes, 0), INITIAL)
            with self.assertRaisesRegex(abi.Error, "flags 4294967297: expected 0 to"):
                r.engine.swap("policy", 0, version(r.shapes, 0), (1 << 32) + INITIAL)
            remote.generate(texts, "base", 7, max_new=2, ignore_eos=1)
            right = [t.digest for t in texts]
            for wrong in ("zz", "g" * 32, "0x" + "0" * 30, None, 7):
                with self.assertRaisesRegex(ValueError, "expected 32 hex digits"):
                    remote.release(texts, [right[0], wrong])
            remote.release(texts, right)
            self.assertEqual({len(t.logprob) for t in texts}, {2})

    def test_no_score_is_a_certificate(self):
        with rigged() as r:
            for engine in (r.remote(), r.engine):
                texts = samples(2)
                engine.swap("policy", 0, version(r.shapes, 0), INITIAL)
                engine.generate(texts, "policy", 7, max_new=NEW, ignore_eos=1)
                with self.assertRaisesRegex(abi.Error, "certifying requests of this adapter are not released"):
                    engine.score(texts, "policy", 1.0)
                self.assertEqual(len(engine.score(texts, None, 1.0)[1]), NEW)
                for others, sentence in ((texts, "1 certificates for 2 texts"), (samples(1) + texts, "not a text that waits")):
                    others[0].tokens = others[0].tokens or [1]
                    with self.assertRaisesRegex(ValueError, sentence):
                        engine.release(others, [texts[0].digest])
                engine.release(texts, [t.digest for t in texts])
                self.assertEqual(engine.score(texts, "policy", 1.0), [t.logprob for t in texts])

    def test_bits_that_are_not_those_of_their_digest(self):
        """The worker's memory after the digest was sent: no frame's hash can see it."""
        with rigged() as r:
            remote, texts = r.remote(), samples(3)
            remote.generate(texts, "base", 7, max_new=NEW, ignore_eos=1)
            read = remote_texts.words_at
            with mock.patch.object(remote_texts, "words_at", lambda words: [bits ^ (i == 2) for i, bits in enumerate(read(words))]):
                with self.assertRaisesRegex(abi.Error, "prompt 1: the log-probs are not those whose digest came with the tokens"):
                    remote.release(texts[2:], [texts[2].digest])


    def test_strangers_at_the_socket(self):
        """One that says nothing and one that drips: each is dropped, a trainer behind them gets through."""
        with rigged("--greet", "1") as r, contextlib.ExitStack() as stack:
            strangers = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2)]
            for stranger in strangers:
                while stranger.connect_ex(r.path):
                    time.sleep(0.01)

            def drip():
                with contextlib.suppress(OSError):
                    while strangers[1].send(b"x"):
                        time.sleep(0.05)
            threading.Thread(target=drip, daemon=True).start()
            begin, remote = time.monotonic(), r.remote()
            self.assertLess(time.monotonic() - begin, 10)
            remote.generate(samples(1), "base", 7, max_new=NEW, ignore_eos=1)


class Swaps(unittest.TestCase):
    def test_chunks(self):
        with rigged() as r, mock.patch.object(remote_weights, "CHUNK_BYTES", 1000):
            remote, good = r.remote(), version(r.shapes, 0)
            send, sent = remote.send_chunk, []

            def slowly(number, tensor, offset, address, n):
                sent.append(n)
                send(number, tensor, offset, address, n)
                time.sleep(0.5 if len(sent) == 1 else 0)
            remote.send_chunk = slowly
            with self.assertRaisesRegex(Refused, "BAD_VERSION"):
                remote.swap("policy", 3, good)
            self.assertLess(len(sent), 5)  # a refusal is heard on the way
            sent.clear()
            self.assertEqual(remote.swap("policy", 0, good, INITIAL), r.engine.swap("policy", 0, good, INITIAL))
            self.assertGreater(len(sent), len(good))
            self.assertEqual(sum(sent), remote.last_swap["bytes"])

    def test_a_bit_that_flips_before_it_is_framed(self):
        """The adapter's digest catches it; the version before serves on, and the same version may come again."""
        with rigged() as r:
            remote, good = r.remote(), version(r.shapes, 0)
            remote.swap("policy", 0, good, INITIAL)
            send, other = remote.send_chunk, version(r.shapes, 1)

            def flip(number, tensor, offset, address, n):
                if tensor == 5:
                    byte = (ctypes.c_ubyte * n).from_address(address)
                    byte[0] ^= 1
                send(number, tensor, offset, address, n)
            remote.send_chunk = flip
            with self.assertRaises(Refused) as caught:
                remote.swap("policy", 1, {name: t.clone() for name, t in other.items()})
            self.assertEqual(caught.exception.code, "BAD_DIGEST")
            self.assertEqual(remote.live_digest("policy"), r.engine.swap("policy", 0, good, INITIAL))
            remote.send_chunk = send
            self.assertEqual(remote.swap("policy", 1, other), r.engine.swap("policy", 1, other))

    def test_a_refused_commit_does_not_leave_the_worker_paused(self):
        with rigged() as r:
            remote, digest = r.remote(wait_ms=3000), r.engine.swap("policy", 0, version(r.shapes, 0), INITIAL)
            remote.swap("policy", 0, version(r.shapes, 0), INITIAL)
            send, other = remote.send, version(r.shapes, 1)
            for mode in ("stop", "finish-old", "in-flight", "drain"):
                remote.send = lambda name, *rest, **fields: send("W_ABORT" if name == "W_COMMIT" else name, *rest, **fields)
                with self.subTest(mode), self.assertRaisesRegex(Refused, "aborted by the trainer; version 0 serves"):
                    remote.swap("policy", 1, other, mode=mode)
                remote.send, texts = send, samples(2)
                remote.generate(texts, "policy", 7, certify=False, max_new=NEW, ignore_eos=1)
                self.assertEqual(({len(t.logprob) for t in texts}, remote.live_digest("policy")), ({NEW}, digest))
            self.assertEqual(remote.swap("policy", 1, other), r.engine.swap("policy", 1, other))

    def test_a_bit_that_flips_on_the_wire(self):
        """The frame's hash catches it; the connection ends, what was live serves the next one."""
        with rigged() as r:
            first = r.remote()
            digest = first.swap("policy", 0, version(r.shapes, 0), INITIAL)
            r.lose(first)

            def flip(kind, payload):
                if kind == TYPE["W_CHUNK"] and len(payload) > 100:
                    payload[99] ^= 4
            second = r.remote(path=tapped(r.path, flip))
            with self.assertRaisesRegex(abi.Error, "hash"):
                second.swap("policy", 1, version(r.shapes, 1))
            third = r.remote()
            self.assertEqual((third.hello.live_version, third.hello.adapter), (0, digest))
            self.assertEqual(third.swap("policy", 9, version(r.shapes, 1), RESYNC), r.engine.swap("policy", 9, version(r.shapes, 1), RESYNC))

    def test_values_on_a_gpu(self):
        """What takes the place of a GPU: a block in this process, whose address is the handle. A stand-in opens it for the worker."""
        seen = []
        with rigged() as r, on_a_gpu(at=6) as handle_of:
            remote = r.remote()
            remote.opens, remote.handle_of, post = True, handle_of, remote.post

            def open_here(name, message, number=0, tensor=0):
                if name != "W_IPC":
                    return post(name, message, number, tensor)
                sent = message.w_ipc
                self.assertEqual(sent.handle.n, abi.CONSTANTS["BR_IPC_HANDLE_BYTES"])
                address = int.from_bytes(ctypes.string_at(sent.handle.p, 8), "little") + sent.offset
                seen.append(tensor)
                remote.send_chunk(number, tensor, 0, address, 2 * r.shapes[list(r.shapes)[tensor]][0] * r.shapes[list(r.shapes)[tensor]][1])
            remote.post = open_here
            for number in (0, 1):
                tensors = version(r.shapes, number)
                self.assertEqual(remote.swap("policy", number, tensors, 0 if number else INITIAL),
                                 r.engine.swap("policy", number, tensors, 0 if number else INITIAL))
            self.assertEqual(seen, 2 * list(range(len(r.shapes))))
            self.assertTrue(remote.opens and remote.last_swap["by_handle"])

    def test_an_engine_on_cuda_reads_values_where_they_lie(self):
        """Once torch's streams are at rest."""
        value, order = types.SimpleNamespace(is_cuda=True, device="cuda:0"), []
        stream = types.SimpleNamespace(synchronize=lambda: order.append("at rest"))
        with mock.patch.object(torch.cuda, "current_stream", lambda device: order.append(device) or stream):
            self.assertEqual(values.settled([value, value]), [value, value])
            self.assertEqual(order, ["cuda:0", "at rest"])
        with rigged() as r, mock.patch.object(in_process, "settled", lambda values: order.append([v.data_ptr() for v in values]) or values):
            tensors = version(r.shapes, 0)
            r.engine.reads_gpu = True
            digest = r.engine.swap("policy", 0, tensors, INITIAL)
            self.assertEqual(order[2:], [[tensors[name].data_ptr() for name in r.shapes]])
            self.assertEqual(adapter_digest(rig.LIBRARY, r.shapes, tensors, SETTINGS), digest)

    def test_a_handle_that_the_worker_cannot_open(self):
        """It says so, and the bytes are sent; from then on only these. What the bytes are refused for is another matter."""
        kinds = []
        with rigged() as r, on_a_gpu() as handle_of:
            r.lose(r.remote())  # it serves
            remote = r.remote(path=tapped(r.path, lambda kind, payload: kinds.append(kind)))
            self.assertFalse(remote.opens)  # a worker without a GPU
            remote.opens, remote.handle_of = True, handle_of
            good, first = version(r.shapes, 0), sorted(r.shapes)[0]
            with self.assertRaisesRegex(Refused, "NaN"):
                remote.swap("policy", 0, {**good, first: torch.full_like(good[first], float("nan"))}, INITIAL)
            self.assertTrue(remote.opens)
            remote.live_digest("policy")  # all of that has passed
            kinds.clear()
            for number in (0, 1):
                tensors = version(r.shapes, number)
                self.assertEqual(remote.swap("policy", number, tensors, 0 if number else INITIAL),
                                 r.engine.swap("policy", number, tensors, 0 if number else INITIAL))
                self.assertEqual(kinds.count(TYPE["W_IPC"]), len(r.shapes))
                self.assertEqual(kinds.count(TYPE["W_CHUNK"]), (1 + number) * len(r.shapes))
            self.assertFalse(remote.opens or remote.last_swap["by_handle"])

    def test_memory_that_cannot_be_shared(self):
        with rigged() as r, on_a_gpu():
            remote, tensors = r.remote(), version(r.shapes, 0)
            remote.opens = True
            self.assertEqual(remote.swap("policy", 0, tensors, INITIAL), r.engine.swap("policy", 0, tensors, INITIAL))
            self.assertTrue(remote.opens and not remote.last_swap["by_handle"])

    def test_refusals(self):
        with rigged() as r:
            remote, good = r.remote(), version(r.shapes, 0)
            first = sorted(good)[0]
            self.assertEqual((remote.hello.live_version, remote.hello.adapter), (None, NOTHING))
            self.assertEqual(remote.live_digest("policy"), r.engine.live_digest("policy"))
            with self.assertRaisesRegex(Refused, "BAD_TENSOR: adapter 'other'"):
                remote.swap("other", 0, good, INITIAL)
            with self.assertRaisesRegex(ValueError, "expected torch.bfloat16"):
                remote.swap("policy", 0, {**good, first: good[first].float()}, INITIAL)
            with self.assertRaisesRegex(KeyError, "not in both"):
                remote.swap("policy", 0, {n: t for n, t in good.items() if n != first}, INITIAL)
            with self.assertRaisesRegex(Refused, "BAD_VERSION"):
                remote.swap("policy", 3, good)
            with self.assertRaisesRegex(Refused, "NaN"):
                remote.swap("policy", 0, {**good, first: torch.full_like(good[first], float("nan"))}, INITIAL)
            digest = remote.swap("policy", 0, good, INITIAL)
            self.assertEqual(remote.swap("policy", 0, good), digest)  # again: it is live
            with self.assertRaisesRegex(abi.Error, f"live with digest {digest}"):
                remote.swap("policy", 0, version(r.shapes, 1))

    def test_texts_under_way(self):
        with rigged() as r:
            remote, texts = r.remote(grant_bytes=512), {}
            remote.swap("policy", 0, version(r.shapes, 0), INITIAL)
            for number, mode in enumerate(("drain", "finish-old", "stop", "in-flight", "drain", "drain"), 1):
                texts[number] = samples(2)
                remote.start(texts[number], "policy", 7, max_new=LONG, ignore_eos=1)
                remote.wait(lambda: texts[number][0].tokens, "tokens")
                remote.swap("policy", number, version(r.shapes, number), mode=mode)
                remote.finish(texts[number])
                runs = {(t.certified, t.version_begin, t.version_end) for t in texts[number]}
                self.assertEqual(runs, {(False, number - 1, number) if mode == "in-flight" else (True, number - 1, number - 1)})
                self.assertEqual({t.stop == ABORT for t in texts[number]}, {mode == "stop"})
                self.assertEqual({len(t.tokens) < LONG for t in texts[number]}, {mode == "stop"})


class Base(unittest.TestCase):
    def check(self, r, engine):
        """Another base and back; the adapter stays."""
        whole = Checkpoint(r.folder).tensors
        other = Checkpoint(rig.checkpoint("pico", seed=2)[0])
        engine.swap("policy", 0, version(r.shapes, 0), INITIAL)
        live = engine.live_digest("policy")
        loaded, found = engine.weights_digest(), []
        for number, tensors in enumerate((whole, other.tensors, whole)):
            if number:
                wanted = rig.LIBRARY.weights_digest(other.dir if number == 1 else r.folder)
                self.assertEqual(weights_digest(rig.LIBRARY, tensors), wanted)
                self.assertEqual(engine.swap_base(number, tensors), wanted)
                self.assertEqual(engine.weights_digest(), wanted)
            self.assertEqual(engine.live_digest("policy"), live)
            texts = samples(4)
            engine.generate(texts, "base", 7, certify=False, max_new=NEW, ignore_eos=1)
            found.append([t.logprob for t in texts])
        self.assertNotEqual(found[1], found[0])
        self.assertEqual(found[2], found[0])
        self.assertEqual(engine.weights_digest(), loaded)
        return found

    def test_the_same_from_both(self):
        with rigged() as r:
            remote = r.remote()
            self.assertEqual(self.check(r, remote), self.check(r, r.engine))
            self.assertEqual(remote.last_swap["bytes"], sum(t.nbytes for t in Checkpoint(r.folder).tensors.values()))
            whole = dict(Checkpoint(r.folder).tensors)
            del whole[sorted(whole)[0]]
            with self.assertRaisesRegex(Refused, f"the manifest has {len(whole)} tensors: expected all {len(whole) + 1}"):
                remote.swap_base(3, whole)
            with self.assertRaisesRegex(abi.Error, "0 of [0-9]+ bytes came"):
                r.engine.swap_base(3, whole)
            self.assertEqual(r.engine.weights_digest(), rig.LIBRARY.weights_digest(r.folder))
            with self.assertRaisesRegex(Refused, "BAD_VERSION: version 7 cannot follow 2"):
                remote.swap_base(7, Checkpoint(r.folder).tensors)


class Ends(unittest.TestCase):
    def test_a_killed_worker(self):
        with rigged() as r:
            remote = r.remote(grant_bytes=512)
            remote.start(samples(4), "base", 7, max_new=LONG, ignore_eos=1)
            r.worker.kill()
            begin, texts = time.monotonic(), samples(4)
            with self.assertRaises(abi.Error) as caught:
                remote.generate(texts, "base", 7, max_new=LONG, ignore_eos=1)
            self.assertEqual(caught.exception.status, abi.CONSTANTS["BR_E_IO"])
            self.assertLess(time.monotonic() - begin, DEAD_MS / 1000)

    def test_a_worker_that_stands_still(self):
        with rigged() as r:
            remote = r.remote(dead_ms=DEAD_MS)
            r.worker.send_signal(signal.SIGSTOP)
            begin = time.monotonic()
            with self.assertRaisesRegex(abi.Error, "nothing was heard of the peer for"):
                remote.generate(samples(4), "base", 7, max_new=NEW)
            self.assertLess(time.monotonic() - begin, DEAD_MS / 1000 + 2)
            r.worker.send_signal(signal.SIGCONT)


if __name__ == "__main__":
    unittest.main()
