"""The rollout engine in another process: bitroll-worker behind the bridge, over a UNIX socket or MPI. A Remote has the methods of
in_process.Engine; log-prob bits of certified texts stay with the worker until the trainer's own digests have been sent. Every wait has a
deadline, and what the worker says of an error is the exception's sentence."""
import array
import collections
import ctypes
import os
import struct
import time

from . import abi
from .digests import NOTHING, adapter_digest, digest_of_bits, weights_digest
from .in_process import check_release, sampling_of
from .values import block_of, each_on_host, in_order, on_host

C, S = abi.CONSTANTS, abi.STRUCTS
TYPE = {name[3:]: value for name, value in abi.ENUMS["tb_type"].items()}
TYPE_NAME = {value: name for name, value in TYPE.items()}
CODE_NAME = {value: name[3:] for name, value in abi.ENUMS["tb_code"].items()}
MODE = {"drain": C["TB_DRAIN"], "stop": C["TB_STOP"], "finish-old": C["TB_FINISH_OLD"], "in-flight": C["TB_IN_FLIGHT"]}
CHUNK_BYTES = 8 << 20
SLICE_MS, BUSY_SLICE_MS, FULL_S, FINISH_MS = 1000, 20, 2.0, 60000
NOT_OPENED = ("BAD_TENSOR", "NOT_BUILT")  # what a worker answers that cannot open a handle, among others
GONE = (C["TB_LOST"], C["TB_SILENT"])  # ends of a connection that the worker does not know of

Hello = collections.namedtuple("Hello", "pid build can live_version adapter base contract config tokenizer")


class Refused(abi.Error):
    """The worker answered W_NACK: its code, by name, and its sentence. What was live serves on."""

    def __init__(self, code, sentence):
        super().__init__(0, f"{code}: {sentence}")
        self.code = code


class Busy(abi.Error):
    """The worker serves another trainer."""


class Bridge:
    """One loaded libbitroll_bridge."""

    def __init__(self, path):
        self.c = ctypes.CDLL(path)
        p, i32, i64, u64, text = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_char_p
        handle, number = ctypes.POINTER(p), ctypes.POINTER(ctypes.c_int)
        signatures = {
            "br_last_error": (text,),
            "tb_socket_connect": (i32, text, i64, handle), "tb_mpi_open": (i32, ctypes.c_int, handle),
            "tb_mpi_start": (i32, p, p, number, number), "tb_mpi_version": (None, text, ctypes.c_size_t), "tb_mpi_finish": (None, ctypes.c_int, i64, ctypes.c_int),
            "tb_trainer_open": (i32, p, p, handle), "tb_trainer_worker": (ctypes.POINTER(S["tb_hello"]), p),
            "tb_trainer_requests": (i64, p), "tb_trainer_send": (i32, p, ctypes.c_int, u64, u64, p),
            "tb_trainer_flush": (i32, p), "tb_trainer_send_chunk": (i32, p, u64, u64, u64, p, u64), "tb_trainer_next": (i32, p, i64, p),
            "tb_trainer_end": (ctypes.c_int, p), "tb_trainer_close": (None, p, ctypes.c_int),
            "tb_tensor_add": (None, p, p), "tb_tensor_next": (ctypes.c_int, p, p, p), "tb_buffer_close": (None, p),
        }
        for name, (result, *arguments) in signatures.items():
            function = getattr(self.c, name)
            function.restype, function.argtypes = result, arguments

    def check(self, status, error=abi.Error):
        if status:
            raise error(status, self.c.br_last_error().decode())

    def transport(self, address, wait_ms):
        form, _, place = address.partition(":")
        out = ctypes.c_void_p()
        if form == "unix":
            self.check(self.c.tb_socket_connect(os.fsencode(place), wait_ms, ctypes.byref(out)))
        elif form == "mpi" and place.isdecimal():
            self.start_mpi()
            self.check(self.c.tb_mpi_open(int(place), ctypes.byref(out)))
        else:
            raise ValueError(f"address '{address}': expected unix:PATH or mpi:RANK")
        return out

    started = False

    def start_mpi(self):
        if Bridge.started:
            raise abi.Error(C["BR_E_UNSUPPORTED"], "MPI has been started by this process: one job is one connection")
        rank, n_rank = ctypes.c_int(), ctypes.c_int()
        self.check(self.c.tb_mpi_start(None, None, ctypes.byref(rank), ctypes.byref(n_rank)))
        Bridge.started = True


def bridge_of(library):
    """libbitroll_bridge from where a library of ours lies."""
    folder = os.path.dirname(library.c._name)
    return Bridge(os.path.join(folder, "libbitroll_bridge.so") if folder else "libbitroll_bridge.so")


def fill(struct_, fields, keep):
    """Sets fields of a message: text, bytes, words, a digest by its text, or a number. `keep` owns what is pointed to."""
    kinds = dict(struct_._fields_)
    for name, value in fields.items():
        kind = kinds[name]
        if kind is S["tb_text"]:
            keep.append(ctypes.create_string_buffer(value.encode()))
            value = kind(p=ctypes.addressof(keep[-1]), n=len(value.encode()))
        elif kind is S["tb_bytes"]:
            keep.append(ctypes.create_string_buffer(value, len(value)))
            value = kind(p=ctypes.addressof(keep[-1]), n=len(value))
        elif kind is S["tb_words"]:
            keep.append((ctypes.c_uint32 * max(1, len(value)))(*value))
            value = kind(p=ctypes.addressof(keep[-1]), n=len(value))
        elif kind is S["br_digest"]:
            value = abi.digest_of(value)
        setattr(struct_, name, value)


def adapter_name(adapter):
    """As the wire has it: the base has none."""
    return "" if adapter in (None, "base") else adapter


def bits_of(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


def text_at(text):
    return ctypes.string_at(text.p, text.n).decode("utf-8", "replace") if text.n else ""


def words_at(words):
    out = array.array("I")
    out.frombytes(ctypes.string_at(words.p, 4 * words.n) if words.n else b"")
    return out.tolist()


def file_digest(library, model_dir, name):
    path = os.path.join(model_dir, name)
    if not os.path.exists(path):
        return NOTHING
    with open(path, "rb") as file:
        return abi.text_of(library.hash(file.read()))


class Remote:
    """address: "unix:PATH" or "mpi:RANK" of a bitroll-worker that runs the checkpoint at model_dir. settings: lora.Settings of the adapter
    that is swapped. wait_ms: deadline of the greeting, for which the worker may have to load first, and of every answer; dead_ms: silence
    that ends the connection; grant_bytes: results that may wait here [16 MiB]. Over MPI a process has one Remote. Busy: the worker serves
    another trainer."""

    def __init__(self, library, model_dir, address, settings=None, wait_ms=600_000, dead_ms=10_000, grant_bytes=0):
        self.library, self.model_dir, self.settings, self.wait_ms = library, model_dir, settings, wait_ms
        self.bridge, self.trainer = bridge_of(library), ctypes.c_void_p()
        self.is_mpi = address.startswith("mpi:")
        self.keep = []
        options = S["tb_trainer_options"](dead_ms=dead_ms, wait_ms=wait_ms, grant_bytes=grant_bytes)
        fill(options.me, dict(abi=abi.ABI_VERSION, pid=os.getpid(), build=library.c.br_version().decode(), contract=library.contract_digest(),
                              base=library.weights_digest(model_dir), config=file_digest(library, model_dir, "config.json"),
                              tokenizer=file_digest(library, model_dir, "tokenizer.json")), self.keep)
        transport = self.bridge.transport(address, wait_ms)
        status = self.bridge.c.tb_trainer_open(transport, ctypes.byref(options), ctypes.byref(self.trainer))
        if status and self.is_mpi and status != C["BR_E_IO"]:
            self.bridge.c.tb_mpi_finish(1, FINISH_MS, 1)  # the worker knows, and ends as well
        self.bridge.check(status, Busy if status == C["BR_E_LIMIT"] else abi.Error)
        self.hello = self.greeted()
        self.live_version, self.base_digest, self.base_version = self.hello.live_version, self.hello.base, 0
        self.opens = bool(self.hello.can & C["TB_CAN_IPC"])  # the worker opens our GPU memory
        self.event = S["tb_event"]()
        self.n_asked = 0
        self.queue = collections.deque()  # (number, owner, type, fields) that wait for credit
        self.running = {}                 # number: what is asked
        self.held = {}                    # text: number, until its certificate is sent
        self.released = {}                # number: (text, certificate), until its log-probs are here
        self.errors = {}                  # owner: why it ended
        self.answers = collections.deque()
        self.manifests, self.in_force, self.mode = {}, {}, MODE["drain"]  # in_force: {kind: (names, hash)}
        self.last_swap = {}

    def greeted(self):
        worker = self.bridge.c.tb_trainer_worker(self.trainer).contents
        digests = {name: abi.text_of(getattr(worker, name)) for name in ("adapter", "base", "contract", "config", "tokenizer")}
        version = None if digests["adapter"] == NOTHING else worker.live_version
        return Hello(pid=worker.pid, build=text_at(worker.build), can=worker.can, live_version=version, **digests)

    def close(self):
        """BYE, if the worker still listens; over MPI the end of the job's communication as well."""
        if self.trainer:
            is_gone = self.bridge.c.tb_trainer_end(self.trainer) in GONE
            self.bridge.c.tb_trainer_close(self.trainer, 1)
            self.trainer = None
            if self.is_mpi and not is_gone:  # MPI would wait for a worker that is
                self.bridge.c.tb_mpi_finish(1, FINISH_MS, 1)

    def contract_digest(self):
        return self.hello.contract

    def weights_digest(self):
        return self.base_digest

    # ---- messages ------------------------------------------------------------------------------------------------------------

    def send(self, name, version=0, subject=0, member=None, **fields):
        """Goes out with what follows, at the next `take` or `flush`."""
        message, keep = S["tb_message"](), []
        fill(getattr(message, member or name.lower()), fields, keep) if fields else None
        self.bridge.check(self.bridge.c.tb_trainer_send(self.trainer, TYPE[name], version, subject, ctypes.byref(message)))

    def flush(self):
        self.bridge.check(self.bridge.c.tb_trainer_flush(self.trainer))

    def take(self, wait_ms):
        """Takes in one message; False when none came."""
        status = self.bridge.c.tb_trainer_next(self.trainer, wait_ms, ctypes.byref(self.event))
        if status == C["BR_E_NOT_FOUND"]:
            return False
        self.bridge.check(status)
        name, subject = TYPE_NAME[self.event.header.type], self.event.header.subject
        if name in ("GEN_PART", "GEN_DONE", "GEN_HELD", "SCORE_DONE"):
            owner = (self.released if name == "GEN_HELD" else self.running).get(subject)
            if owner is None:
                raise abi.Error(C["BR_E_FORMAT"], f"{name} came for request {subject}, which does not wait for it")
            getattr(self, "take_" + name.lower())(subject, owner, getattr(self.event.message, name.lower()))
        elif name == "ERROR":
            raise abi.Error(C["BR_E_ARG"], text_at(self.event.message.error.text))
        else:
            self.answers.append((name, self.body(name)))
        return True

    def body(self, name):
        """What outlives the event of an answer."""
        message = self.event.message
        if name == "MANIFEST":
            return self.tensors_of(message.manifest.tensors)
        if name == "MANIFEST_ACK":
            return message.manifest_ack.hash
        if name == "W_NACK":
            return CODE_NAME.get(message.w_nack.code, "unknown"), text_at(message.w_nack.text)
        if name == "W_COMMITTED":
            return abi.text_of(message.w_committed.digest)
        if name == "STATS":
            return abi.text_of(message.stats.adapter)
        return None

    def wait(self, done, what):
        heard = time.monotonic()
        while not done():
            self.send_some()
            if self.take(BUSY_SLICE_MS if self.queue else SLICE_MS):
                heard = time.monotonic()
                continue
            silent = time.monotonic() - heard
            if self.queue and not self.running and silent > FULL_S:
                n_left = len(self.queue)
                self.queue.clear()
                raise abi.Error(C["BR_E_LIMIT"], f"{n_left} requests are left without credit while the worker holds {len(self.held)} texts for "
                                                 "their certificates: release those, or start it with more --requests")
            if silent > self.wait_ms / 1000:
                raise abi.Error(C["BR_E_IO"], f"{what}: the worker answered nothing for {self.wait_ms} ms")

    def answer(self, name):
        self.wait(lambda: self.answers, name)
        found, body = self.answers.popleft()
        if found == "W_NACK":
            raise Refused(*body)
        if found != name:
            raise abi.Error(C["BR_E_FORMAT"], f"the worker answered {found} where {name} was expected")
        return body

    # ---- sampling ------------------------------------------------------------------------------------------------------------

    def generate(self, texts, adapter, seed, certify=True, **sampling):
        """Fills the texts. certify: log-probs stay with the worker until `release`."""
        self.start(texts, adapter, seed, certify, **sampling)
        self.finish(texts)

    def start(self, texts, adapter, seed, certify=True, **sampling):
        """Asks for texts; `finish` or `abort` ends them."""
        setting = sampling_of(self.library, sampling)
        if setting.top_logprobs or setting.entropy:
            raise TypeError("top_logprobs and entropy do not come over the bridge")
        fields = dict(flags=C["TB_CERTIFY"] if certify else 0, seed=seed, adapter=adapter_name(adapter), temperature=bits_of(setting.temperature),
                      min_p=bits_of(setting.min_p), top_p=struct.unpack("<Q", struct.pack("<d", setting.top_p))[0],
                      top_k=setting.top_k, max_new=setting.max_new, min_new=setting.min_new, ignore_eos=setting.ignore_eos,
                      stop=setting.stop[: setting.n_stop])
        for text in texts:
            text.adapter = adapter
            self.ask(text, "GEN_REQ", dict(fields, uid=text.uid, sample=text.sample, prompt=text.prompt))
        self.flush()

    def ask(self, owner, name, fields):
        self.n_asked += 1
        self.queue.append((self.n_asked, owner, name, fields))
        self.send_some()

    def send_some(self):
        """As many requests as there is credit for."""
        while self.queue and self.bridge.c.tb_trainer_requests(self.trainer) > 0:
            number, owner, name, fields = self.queue.popleft()
            self.running[number] = owner
            self.send(name, 0, number, **fields)

    def finish(self, texts):
        """Waits until these texts have ended; raises the first error of one."""
        wanted = set(texts)
        self.wait(lambda: wanted.isdisjoint(self.running.values()) and wanted.isdisjoint(q[1] for q in self.queue), "generation")
        errors = [self.errors.pop(text) for text in texts if text in self.errors]
        if errors:
            raise errors[0]

    def abort(self, texts):
        """Ends texts now: what was sampled until then stays in them. A text that goes on from there has prompt + tokens as its prompt, and
        the same uid, sample and seed."""
        wanted = set(texts)
        for entry in [q for q in self.queue if q[1] in wanted]:
            self.queue.remove(entry)
            entry[1].stop, entry[1].digest = C["BR_STOP_ABORT"], digest_of_bits(self.library, [])
        for number in [n for n, owner in self.running.items() if owner in wanted]:
            self.send("GEN_ABORT", 0, number)
        self.finish(texts)

    def take_gen_part(self, number, text, part):
        tokens, bits = words_at(part.token), words_at(part.logprob)
        if part.first != len(text.tokens):
            raise abi.Error(C["BR_E_FORMAT"], f"{text.uid}: tokens from {part.first} came after {len(text.tokens)}")
        if bits and digest_of_bits(self.library, bits) != abi.text_of(part.digest):
            raise abi.Error(C["BR_E_MISMATCH"], f"{text.uid}: the log-probs of tokens from {part.first} have another digest")
        text.tokens += tokens
        text.logprob += bits

    def take_gen_done(self, number, text, done):
        del self.running[number]
        if done.n_tok != len(text.tokens):
            raise abi.Error(C["BR_E_FORMAT"], f"{text.uid}: {len(text.tokens)} tokens came of {done.n_tok}")
        text.stop, text.digest = done.stop, abi.text_of(done.digest)
        text.version_begin, text.version_end = done.version_begin, done.version_end
        text.certified = bool(done.certified) and done.version_begin == done.version_end
        if done.stop == C["BR_STOP_ERROR"]:
            self.errors[text] = abi.Error(done.status, text_at(done.text))
        if done.n_tok and not text.logprob:
            self.held[text] = number

    # ---- certificates --------------------------------------------------------------------------------------------------------

    def release(self, texts, certificates):
        """Sends the digests of the caller's own bits, and only then takes the worker's log-probs."""
        check_release(self.held, texts, certificates)
        for text, certificate in zip(texts, certificates):
            if text.tokens:
                number = self.held.pop(text)
                self.released[number] = text, certificate
                self.send("GEN_RELEASE", 0, number, certificate=certificate)
        self.wait(lambda: not self.released, "release")

    def take_gen_held(self, number, owner, held):
        (text, certificate), bits = owner, words_at(held.logprob)
        if held.first != len(text.logprob) or held.n_tok != len(text.tokens) or len(text.logprob) + len(bits) > held.n_tok:
            raise abi.Error(C["BR_E_FORMAT"], f"{text.uid}: {len(bits)} log-probs from {held.first} of {held.n_tok} came after {len(text.logprob)}")
        text.logprob += bits
        if len(text.logprob) < held.n_tok:
            return
        del self.released[number]
        if digest_of_bits(self.library, text.logprob) != text.digest:
            raise abi.Error(C["BR_E_MISMATCH"], f"{text.uid}: the log-probs are not those whose digest came with the tokens")
        if bool(held.equal) != (certificate == text.digest):
            raise abi.Error(C["BR_E_MISMATCH"], f"{text.uid}: the worker holds certificate {certificate} and digest {text.digest} for "
                                                f"{'equal' if held.equal else 'different'}")

    def discard(self, texts):
        """Texts that are never released: the worker drops what it holds of them."""
        for text in texts:
            if text in self.held:
                self.send("GEN_ABORT", 0, self.held.pop(text))
        self.flush()

    # ---- scoring -------------------------------------------------------------------------------------------------------------

    def score(self, texts, adapter, temperature):
        """Bits of the log-probs of each text's tokens behind its prompt, under an adapter; "base" or None: without one. The worker scores
        nothing under an adapter whose texts wait for their certificates, so that no score can be one."""
        wanted = [Score(text) for text in texts]
        for one in wanted:
            if one.text.tokens:
                self.ask(one, "SCORE_REQ", dict(first_asked=len(one.text.prompt), adapter=adapter_name(adapter), temperature=bits_of(temperature),
                                                token=one.text.prompt + one.text.tokens))
        self.finish(wanted)
        return [one.bits for one in wanted]

    def take_score_done(self, number, one, done):
        del self.running[number]
        if done.status:
            self.errors[one] = abi.Error(done.status, text_at(done.text))
            return
        one.bits = words_at(done.logprob)[len(one.text.prompt) :]
        if len(one.bits) != len(one.text.tokens):
            raise abi.Error(C["BR_E_FORMAT"], f"{one.text.uid}: {len(one.bits)} scores came for {len(one.text.tokens)} tokens")

    # ---- weights that change -------------------------------------------------------------------------------------------------

    def manifest(self, adapter):
        """{PEFT name: shape} of a version's tensors, in order: the worker's own."""
        if adapter not in self.manifests:
            self.send("MANIFEST_REQ", adapter=adapter)
            self.manifests[adapter] = self.answer("MANIFEST")
        return self.manifests[adapter]

    def tensors_of(self, tensors):
        at, tensor, shapes = ctypes.c_uint64(), S["tb_tensor"](), {}
        while self.bridge.c.tb_tensor_next(ctypes.byref(tensors), ctypes.byref(at), ctypes.byref(tensor)):
            shapes[text_at(tensor.name)] = tuple(tensor.dim[: tensor.n_dim])
        return shapes

    def swap(self, adapter, version, tensors, flags=0, mode="drain"):
        """A version, live when the call returns. tensors: {PEFT name: bf16}; a worker on the same GPU reads them there. mode: what becomes of
        texts under way: drain, stop, finish-old, in-flight. Returns the digest of the live memory; the worker has compared the bytes with
        ours before."""
        begin = time.monotonic()
        shapes = self.manifest(adapter)
        values = in_order(shapes, tensors)
        block = block_of(values)
        values = on_host(values, block)
        digest = adapter_digest(self.library, shapes, dict(zip(shapes, values)), self.settings)
        kinds = [C["TB_LORA_B"] if ".lora_B." in name else C["TB_LORA_A"] for name in shapes]
        self.last_swap = dict(export_ms=1000 * (time.monotonic() - begin))
        if version == self.live_version and flags == 0:  # sent before: the answer says what is live
            self.begin("TB_W_ADAPTER", adapter, version, flags, values)
            live = self.answer("W_COMMITTED")
        else:
            self.agree("TB_W_ADAPTER", list(shapes), kinds, values)
            live = self.transfer_adapter(block, adapter, version, flags, values, digest, mode)
        if live != digest:
            raise abi.Error(C["BR_E_MISMATCH"], f"version {version} of {adapter} is live with digest {live}: expected {digest}")
        self.live_version = version
        return live

    def swap_base(self, version, tensors):
        """All tensors of the checkpoint, {Hugging Face name: tensor}, in place of the base weights. Versions of the base count from 1."""
        begin = time.monotonic()
        values = each_on_host(tensors)
        digest = weights_digest(self.library, values)
        self.last_swap = dict(export_ms=1000 * (time.monotonic() - begin))
        self.agree("TB_W_FULL", list(values), [C["TB_BASE"]] * len(values), list(values.values()))
        self.base_digest = self.transfer("TB_W_FULL", "", version, 0, list(values.values()), digest, "drain")
        self.base_version = version
        return self.base_digest

    def agree(self, kind, names, kinds, values):
        """MANIFEST, unless it is the one in force."""
        if self.in_force.get(kind, (None,))[0] == names:
            return
        self.in_force.pop(kind, None)
        raw, tensor = S["tb_buffer"](), S["tb_tensor"]()
        for name, tensor_kind, value in zip(names, kinds, values):
            keep = []
            fill(tensor, dict(name=name, dtype=DTYPE[str(value.dtype)], kind=tensor_kind, n_dim=value.dim()), keep)
            tensor.dim[: value.dim()] = value.shape
            self.bridge.c.tb_tensor_add(ctypes.byref(raw), ctypes.byref(tensor))
        message = S["tb_message"]()
        message.manifest.tensors.n, message.manifest.tensors.raw.p, message.manifest.tensors.raw.n = len(names), raw.bytes, raw.n
        try:
            self.bridge.check(raw.failed)
            self.bridge.check(self.bridge.c.tb_trainer_send(self.trainer, TYPE["MANIFEST"], 0, 0, ctypes.byref(message)))
        finally:
            self.bridge.c.tb_buffer_close(ctypes.byref(raw))
        self.in_force[kind] = names, self.answer("MANIFEST_ACK")

    def begin(self, kind, adapter, version, flags, values):
        self.send("W_BEGIN", version, flags=flags, kind=C[kind], base_version=self.live_version or 0, n_bytes=sum(v.nbytes for v in values),
                  manifest=self.in_force.get(kind, (None, 0))[1], adapter=adapter)
        self.flush()  # a refusal can then be heard on the way

    def transfer_adapter(self, block, *what):
        """By the handle of the block that holds the values, or by their bytes where there is none, or none that the worker can open."""
        handle = self.handle_of(block) if self.opens and block is not None else None
        if handle is not None:
            try:
                return self.transfer("TB_W_ADAPTER", *what, handle=handle)
            except Refused as refusal:
                if refusal.code not in NOT_OPENED:
                    raise
        live = self.transfer("TB_W_ADAPTER", *what)
        self.opens = self.opens and handle is None  # the values were sound: it was the handle
        return live

    def handle_of(self, block):
        """None: memory that cannot be shared."""
        handle = S["br_ipc"]()
        return None if self.library.c.br_ipc_export(block.data_ptr(), ctypes.byref(handle)) else handle

    def transfer(self, kind, adapter, version, flags, values, digest, mode, handle=None):
        """W_BEGIN to W_COMMITTED; times and sizes go to last_swap. handle: of the block that the values are, one behind the other."""
        times = [time.monotonic()]
        self.begin(kind, adapter, version, flags, values)
        if handle is not None:
            self.send_handles(version, values, handle)
        else:
            self.send_values(version, values)
        self.send("W_END", version, member="w_digest", digest=digest)
        times.append(time.monotonic())
        self.answer("W_PREPARED")
        times.append(time.monotonic())
        if mode != "drain" or MODE[mode] != self.mode:
            self.send("PAUSE", mode=MODE[mode])
            self.mode = MODE[mode]
            self.answer("STATS")
        self.send("W_COMMIT", version)
        live = self.answer("W_COMMITTED")
        if mode != "drain":
            self.send("RESUME")
            self.answer("STATS")
        times.append(time.monotonic())
        self.last_swap.update(bytes=sum(v.nbytes for v in values), by_handle=handle is not None, transfer_ms=1000 * (times[1] - times[0]),
                              verify_ms=1000 * (times[2] - times[1]), commit_ms=1000 * (times[3] - times[2]))
        return live

    def send_values(self, version, values):
        """Chunks from the tensors' own memory. A refusal on the way ends the sending."""
        unheard = 0
        for i, value in enumerate(values):
            for at in range(0, max(1, value.nbytes), CHUNK_BYTES):
                n = min(CHUNK_BYTES, value.nbytes - at)
                self.send_chunk(version, i, at, value.data_ptr() + at, n)
                unheard += n
                if unheard >= CHUNK_BYTES:
                    unheard = 0
                    self.take(0)
                    if self.answers:
                        self.answer("W_PREPARED")  # which it cannot be yet: W_NACK, as an exception

    def send_chunk(self, version, tensor, offset, address, n):
        self.bridge.check(self.bridge.c.tb_trainer_send_chunk(self.trainer, version, tensor, offset, address, n))

    def send_handles(self, version, values, handle):
        message, keep = S["tb_message"](), []
        fill(message.w_ipc, dict(offset=handle.offset, handle=bytes(handle.handle)), keep)
        for i, value in enumerate(values):
            self.send_handle(version, i, message)
            message.w_ipc.offset += value.nbytes

    def send_handle(self, version, tensor, message):
        self.bridge.check(self.bridge.c.tb_trainer_send(self.trainer, TYPE["W_IPC"], version, tensor, ctypes.byref(message)))

    def live_digest(self, adapter):
        """Of the memory that the worker's forwards read, now."""
        self.manifest(adapter)  # the worker has this one, and no other that changes
        self.send("STATS_REQ")
        return self.answer("STATS")


class Score:
    """A text that is scored, and its log-probs."""

    def __init__(self, text):
        self.text, self.bits = text, []


DTYPE = {"torch.bfloat16": C["TB_BF16"], "torch.float32": C["TB_F32"], "torch.float8_e4m3fn": C["TB_F8_E4M3"], "torch.uint8": C["TB_U8"]}
