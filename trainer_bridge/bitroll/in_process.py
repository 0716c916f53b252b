"""The rollout engine in this process: texts sampled token by token, and adapters that change between two steps."""
import ctypes
import os

from . import abi
from .digests import digest_of_bits, weights_digest
from .values import each_on_host, in_order, on_host, settled

INITIAL, RESYNC = abi.CONSTANTS["BR_SWAP_INITIAL"], abi.CONSTANTS["BR_SWAP_RESYNC"]
DRAIN = abi.CONSTANTS["BR_SWAP_DRAIN"]
COMMITTED = abi.CONSTANTS["BR_SWAP_COMMITTED"]
POLL_MAX = 4096


class Sample:
    """A prompt and what was sampled behind it. logprob: the bits of binary32 numbers, one a sampled token; until they are released only
    their digest is here. base: of the same tokens with no adapter, where asked for. certified: one weight version from the first prompt token
    on."""

    def __init__(self, uid, sample, prompt):
        self.uid, self.sample, self.prompt, self.tokens, self.logprob, self.base = uid, sample, list(prompt), [], [], []
        self.adapter = self.stop = self.digest = self.version_begin = self.version_end = None
        self.certified = False


class Score:
    """A request for the log-probs of a text's tokens under what may be another adapter."""

    def __init__(self, text, bits):
        self.text, self.bits = text, bits

    @property
    def uid(self):
        return self.text.uid


def sampling_of(library, fields):
    """The library's defaults with some fields changed."""
    setting = library.c.br_sampling_default()
    known = {name for name, _ in setting._fields_}
    for name, value in fields.items():
        if name not in known:
            raise TypeError(f"sampling has no field '{name}'")
        setattr(setting, name, value)
    return setting


LIMITS = {"sample": (0, (1 << 24) - 1), "seed": (0, (1 << 64) - 1), "max_new": (1, 1 << 20), "min_new": (0, 1 << 20), "top_k": (0, (1 << 31) - 1),
          "ignore_eos": (0, 1), "n_stop": (0, abi.CONSTANTS["BR_STOP_MAX"])}


def check_numbers(**numbers):
    for name, value in numbers.items():
        least, most = LIMITS[name]
        if not least <= value <= most:
            raise ValueError(f"{name} {value}: expected {least} to {most}")


def check_text(text):
    """What a request can say of a text, in this process and on the wire."""
    uid = text.uid.encode()
    if not 1 <= len(uid) <= abi.CONSTANTS["BR_UID_BYTES_MAX"] or b"\0" in uid:
        raise ValueError(f"uid {text.uid!r:.80}: expected 1 to {abi.CONSTANTS['BR_UID_BYTES_MAX']} bytes, none of them 0")
    ids = text.prompt + text.tokens
    if not text.prompt or len(ids) > 1 << 20 or not all(0 <= i < 1 << 31 for i in ids):
        raise ValueError(f"{text.uid}: a prompt of {len(text.prompt)} and {len(text.tokens)} tokens behind it: expected 1 to {1 << 20} ids, "
                         "none below 0")
    check_numbers(sample=text.sample)


def check_sampling(texts, adapter, seed, certify, base, fields):
    """Before anything is asked for. The base's own log-probs would be their certificate."""
    if base and certify and (adapter or "base") == "base":
        raise ValueError("base: texts of the base that are certified are not scored under it before their release")
    if len(set(texts)) != len(texts):
        raise ValueError("a text comes twice")
    check_numbers(seed=seed, **{name: value for name, value in fields.items() if name in LIMITS})
    for text in texts:
        check_text(text)


def check_release(held, texts, certificates):
    strangers = [f"{t.uid}, sample {t.sample}" for t in texts if t.tokens and t not in held]
    if strangers:
        raise ValueError(f"{strangers[0]}: not a text that waits for its certificate")
    if len(texts) != len(certificates):
        raise ValueError(f"{len(certificates)} certificates for {len(texts)} texts")
    for certificate in certificates:
        abi.digest_of(certificate)


class Engine:
    """adapters: {name: folder, or None for one that begins empty}. swap_rank: of adapters that change."""

    def __init__(self, library, model_dir, adapters, swap_rank=0, swap_alpha=0.0, backend="oracle", **options):
        sources = (abi.STRUCTS["br_adapter_source"] * max(1, len(adapters)))()
        for source, (name, folder) in zip(sources, adapters.items()):
            source.name, source.dir = abi.address_of(name.encode()), abi.address_of(os.fsencode(folder) if folder else None)
        self.options = abi.STRUCTS["br_engine_options"](
            model_dir=abi.address_of(os.fsencode(model_dir)), backend=abi.address_of(backend.encode()), adapter=abi.address_of(sources),
            n_adapter=len(adapters), swap_rank=swap_rank, swap_alpha=swap_alpha, **options)
        self.library, self.model_dir, self.held, self.handle = library, model_dir, {}, ctypes.c_void_p()
        self.reads_gpu = backend == "cuda"
        library.check(library.c.br_engine_open(ctypes.byref(self.options), ctypes.byref(self.handle)))

    def close(self):
        self.library.c.br_engine_close(self.handle)
        self.handle = None

    def contract_digest(self):
        return self.library.contract_digest()

    def weights_digest(self):
        return abi.text_of(self.library.c.br_engine_weights_digest(self.handle))

    def live_digest(self, adapter):
        """Of the memory that forwards read, now."""
        digest = abi.STRUCTS["br_digest"]()
        self.library.check(self.library.c.br_engine_adapter_live_digest(self.handle, adapter.encode(), ctypes.byref(digest)))
        return abi.text_of(digest)

    # ---- sampling ------------------------------------------------------------------------------------------------------------

    def generate(self, texts, adapter, seed, certify=True, base=False, **sampling):
        """Fills the texts. certify: log-probs are kept until `release`. base: a text that has ended is scored without an adapter, in the same
        steps as those that still run."""
        check_sampling(texts, adapter, seed, certify, base, sampling)
        held, temperature = {text: [] for text in texts}, sampling_of(self.library, sampling).temperature
        for text in texts:
            text.adapter = adapter

        def take(text, token):
            if token.token >= 0:
                text.tokens.append(token.token)
                held[text].append(token.logprob)
            if not token.last:
                return []
            text.stop, text.digest = token.stop, digest_of_bits(self.library, held[text])
            self.take_versions(text, token.request)
            scored = base and text.tokens and token.stop not in (abi.CONSTANTS["BR_STOP_ERROR"], abi.CONSTANTS["BR_STOP_ABORT"])
            return [self.score_request(Score(text, text.base), "base", temperature)] if scored else []
        self.run([(t, dict(prompt=t.prompt, uid=t.uid, sample=t.sample, adapter=adapter, seed=seed, **sampling)) for t in texts], take)
        self.held.update(held)
        if not certify:
            self.release(texts, [text.digest for text in texts])

    def release(self, texts, certificates):
        """The log-probs of texts, once the digests of the caller's own bits are here."""
        check_release(self.held, texts, certificates)
        for text in texts:
            text.logprob = self.held.pop(text)

    def score(self, texts, adapter, temperature):
        """Bits of the log-probs of each text's tokens behind its prompt, under an adapter; "base" or None: without one. Not under an adapter
        whose texts wait for their certificates, so that no score can be one."""
        adapter = adapter or "base"
        if any((text.adapter or "base") == adapter for text in self.held):
            raise abi.Error(abi.CONSTANTS["BR_E_LIMIT"], "certifying requests of this adapter are not released: nothing is scored under it before")
        scores = [Score(text, []) for text in texts]
        self.run([self.score_request(score, adapter, temperature) for score in scores if score.text.tokens])
        return [score.bits for score in scores]

    def score_request(self, score, adapter, temperature):
        text = score.text
        check_text(text)
        return score, dict(prompt=text.prompt + text.tokens, uid=text.uid, sample=text.sample, adapter=adapter, seed=0,
                           score_from=len(text.prompt), temperature=temperature)

    def run(self, requests, take=None):
        """requests: (owner, arguments of submit). take(text, token) for each token that comes of a text, returns further requests; tokens of a
        Score are its bits. Raises the first error at the end."""
        running = {}
        try:
            self.poll_all(list(reversed(requests)), running, take)
        except BaseException:
            self.drop(running)
            raise

    def drop(self, running):
        """Requests whose caller has given up: the engine forgets them."""
        for number in running:
            self.library.c.br_abort(self.handle, number)
        tokens, n, done = (abi.STRUCTS["br_token"] * POLL_MAX)(), ctypes.c_int32(), ctypes.c_int32()
        while running and not self.library.c.br_poll(self.handle, tokens, POLL_MAX, ctypes.byref(n), ctypes.byref(done)):
            for token in tokens[: n.value]:
                if token.last:
                    running.pop(token.request, None)

    def poll_all(self, waiting, running, take):
        errors = []
        tokens, n, done = (abi.STRUCTS["br_token"] * POLL_MAX)(), ctypes.c_int32(), ctypes.c_int32()
        while waiting or running:
            self.submit_some(waiting, running)
            self.library.check(self.library.c.br_poll(self.handle, tokens, POLL_MAX, ctypes.byref(n), ctypes.byref(done)))
            for token in tokens[: n.value]:
                owner = running[token.request]
                if not isinstance(owner, Score):
                    waiting += take(owner, token)
                elif token.token >= 0:
                    owner.bits.append(token.logprob)
                if token.last:
                    del running[token.request]
                    errors += self.error_of(token)
        if errors:
            raise errors[0]

    def submit_some(self, waiting, running):
        """As many as the engine holds at once; the rest when some have ended."""
        while waiting:
            owner, arguments = waiting[-1]
            try:
                running[self.submit(**arguments)] = owner
            except abi.Error as error:
                if error.status != abi.CONSTANTS["BR_E_LIMIT"] or not running:
                    raise
                return
            waiting.pop()

    def submit(self, prompt, uid, sample, adapter, seed, score_from=0, **sampling):
        if not self.handle:
            raise ValueError("the engine is closed")
        setting = sampling_of(self.library, sampling)
        ids = abi.array("prompt", ctypes.c_int32, prompt)
        request = abi.STRUCTS["br_request"](
            uid=abi.address_of(uid.encode()), adapter=abi.address_of(adapter.encode()), prompt=abi.address_of(ids), n_prompt=len(prompt),
            sample=sample, seed=seed, sampling=setting, score_from=score_from)
        number = ctypes.c_uint64()
        self.library.check(self.library.c.br_submit(self.handle, ctypes.byref(request), ctypes.byref(number)))
        return number.value

    def error_of(self, token):
        """The error that ended a request, in a list; empty when none did."""
        if token.stop != abi.CONSTANTS["BR_STOP_ERROR"]:
            return []
        sentence = ctypes.c_char_p()
        status = self.library.c.br_request_error(self.handle, token.request, ctypes.byref(sentence))
        return [abi.Error(status, sentence.value.decode())]

    def take_versions(self, text, request):
        versions = abi.STRUCTS["br_versions"]()
        self.library.check(self.library.c.br_request_versions(self.handle, request, ctypes.byref(versions)))
        runs = versions.run[: versions.n_run]
        text.certified = bool(versions.certified)
        text.version_begin, text.version_end = (runs[0].version, runs[-1].version) if runs else (-1, -1)

    # ---- weights that change -------------------------------------------------------------------------------------------------

    def manifest(self, adapter):
        """{PEFT name: shape} of a version's tensors, in order."""
        n, digest, tensor = ctypes.c_int64(), abi.STRUCTS["br_digest"](), abi.STRUCTS["br_swap_tensor"]()
        self.library.check(self.library.c.br_swap_manifest(self.handle, adapter.encode(), ctypes.byref(n), ctypes.byref(digest)))
        shapes = {}
        for i in range(n.value):
            self.library.check(self.library.c.br_swap_tensor_at(self.handle, adapter.encode(), i, ctypes.byref(tensor)))
            shapes[bytes(tensor.name).split(b"\0")[0].decode()] = (tensor.n_row, tensor.n_col)
        return shapes

    def swap(self, adapter, version, tensors, flags=0):
        """A version from this process's memory, live when the call returns. tensors: {PEFT name: bf16}, which an engine on cuda reads where
        they lie. Returns the digest of the live memory."""
        version, flags = abi.fitting("version", ctypes.c_int64, version), abi.fitting("flags", ctypes.c_uint32, flags)
        values = in_order(self.manifest(adapter), tensors)
        values = settled(values) if self.reads_gpu else on_host(values)
        addresses, answer = (ctypes.c_void_p * len(values))(*(v.data_ptr() for v in values)), ctypes.c_int()
        c, name = self.library.c, adapter.encode()
        self.library.check(c.br_swap_from_memory(self.handle, name, addresses, len(values), None, version, flags, ctypes.byref(answer)))
        self.library.check(c.br_swap_commit(self.handle, name, version, DRAIN, ctypes.byref(answer)))
        if answer.value != COMMITTED:
            raise RuntimeError(f"version {version} of {adapter}: not committed, answer {answer.value}")
        return self.live_digest(adapter)

    def swap_base(self, version, tensors):
        """All tensors of the checkpoint, {Hugging Face name: tensor}, in place of the base weights. Versions of the base count from 1."""
        values, c, check = each_on_host(tensors), self.library.c, self.library.check
        base, number = ctypes.c_void_p(), ctypes.c_int64()
        check(c.br_base_open(self.handle, os.fsencode(self.model_dir), ctypes.byref(base)))
        try:
            check(c.br_base_begin(base))
            for name, value in values.items():
                check(c.br_base_find(base, name.encode(), ctypes.byref(number)))
                check(c.br_base_chunk(base, number, 0, value.data_ptr(), value.nbytes))
            check(c.br_base_end(base, abi.digest_of(weights_digest(self.library, values))))
            check(c.br_base_commit(base))
        finally:
            c.br_base_close(base)
        return self.weights_digest()
