"""Texts that a worker samples and scores. Requests wait here while the worker gives no credit; log-prob bits of certified texts stay with it
until the trainer's own digests have been sent."""
import collections
import itertools

from . import abi
from .connection import SLICE_MS, Connection
from .digests import digest_of_bits
from .in_process import Score, check_release, check_sampling, check_text, sampling_of
from .wire import C, bits_of, text_at, words_at

BUSY_SLICE_MS, FULL_S = 20, 2.0


class Asked(dict):
    """What the worker owes an answer, by the number of the request."""

    def __missing__(self, number):
        raise abi.Error(C["BR_E_FORMAT"], f"a message came for request {number}, which does not wait for it")


def text_of(owner):
    return owner.text if isinstance(owner, Score) else owner


class Texts(Connection):
    def __init__(self, *where, **limits):
        self.n_asked = 0
        self.queue = collections.deque()  # (number, owner, type, fields) that wait for credit
        self.running = Asked()            # number: what is asked
        self.held = {}                    # text: number, until its certificate is sent
        self.released = Asked()           # number: (text, certificate), until its log-probs are here
        self.errors = {}                  # text: why it ended
        self.with_base = {}               # text: the temperature at which it is scored without an adapter once it has ended
        super().__init__(*where, **limits)

    # ---- requests and credit -------------------------------------------------------------------------------------------------

    def ask(self, owner, name, adapter, **fields):
        self.n_asked += 1
        fields["adapter"] = "" if adapter in (None, "base") else adapter  # on the wire the base has no name
        self.queue.append((self.n_asked, owner, name, fields))
        self.send_some()

    def send_some(self):
        """As many requests as there is credit for."""
        while self.queue and self.bridge.c.tb_trainer_requests(self.trainer) > 0:
            number, owner, name, fields = self.queue.popleft()
            try:
                self.send(name, 0, number, **fields)
            except BaseException:
                self.with_base.pop(owner, None)  # nothing has gone out
                raise
            self.running[number] = owner

    def idle(self, silent):
        self.send_some()
        if self.queue and not self.running and silent > FULL_S:
            n_left = len(self.queue)
            for _, owner, _, _ in self.queue:
                self.with_base.pop(owner, None)
            self.queue.clear()
            raise abi.Error(C["BR_E_LIMIT"], f"{n_left} requests are left without credit while the worker, which holds {self.n_request} at once, "
                                             f"holds {len(self.held)} texts for their certificates: release those, or start it with --requests "
                                             f"{self.n_request + n_left} or more")
        return BUSY_SLICE_MS if self.queue else SLICE_MS

    def finish(self, texts):
        """Waits until these texts and their scores have ended; raises the first error of one."""
        wanted = set(texts)
        self.wait(lambda: wanted.isdisjoint(text_of(owner) for owner in itertools.chain(self.running.values(), (q[1] for q in self.queue))),
                  "generation")
        self.raise_error_of(texts)

    def raise_error_of(self, texts):
        errors = [self.errors.pop(text) for text in texts if text in self.errors]
        if errors:
            raise errors[0]

    # ---- sampling ------------------------------------------------------------------------------------------------------------

    def generate(self, texts, adapter, seed, certify=True, base=False, **sampling):
        """Fills the texts. certify: log-probs stay with the worker until `release`. base: a text that has ended is scored without an adapter, in
        the same steps as those that still run."""
        try:
            self.start(texts, adapter, seed, certify, base, **sampling)
            self.finish(texts)
        except abi.Error as error:
            if error.status == C["BR_E_ARG"]:
                self.abort(texts)  # of one whose fields are refused nothing has gone out; the others end with it
            raise

    def start(self, texts, adapter, seed, certify=True, base=False, **sampling):
        """Asks for texts; `finish` or `abort` ends them."""
        check_sampling(texts, adapter, seed, certify, base, sampling)
        setting = sampling_of(self.library, sampling)
        if setting.top_logprobs or setting.entropy:
            raise TypeError("top_logprobs and entropy do not come over the bridge")
        fields = dict(flags=C["TB_CERTIFY"] if certify else 0, seed=seed, temperature=bits_of(setting.temperature), min_p=bits_of(setting.min_p),
                      top_p=bits_of(setting.top_p, "d"), top_k=setting.top_k, max_new=setting.max_new, min_new=setting.min_new,
                      ignore_eos=setting.ignore_eos, stop=setting.stop[: setting.n_stop])
        for text in texts:
            text.adapter = adapter
            if base:
                self.with_base[text] = setting.temperature
            self.ask(text, "GEN_REQ", adapter, uid=text.uid, sample=text.sample, prompt=text.prompt, **fields)
        self.flush()

    def abort(self, texts):
        """Ends texts now: what was sampled until then stays in them. A text that goes on from there has prompt + tokens as its prompt, and
        the same uid, sample and seed."""
        wanted = set(texts)
        for entry in [q for q in self.queue if q[1] in wanted]:
            self.queue.remove(entry)
            self.with_base.pop(entry[1], None)
            entry[1].stop, entry[1].digest = C["BR_STOP_ABORT"], digest_of_bits(self.library, [])
        for number in [n for n, owner in self.running.items() if owner in wanted]:
            self.send("GEN_ABORT", 0, number)
        self.finish(texts)

    def take_gen_part(self, number, part):
        text, tokens, bits = self.running[number], words_at(part.token), words_at(part.logprob)
        if part.first != len(text.tokens):
            raise abi.Error(C["BR_E_FORMAT"], f"{text.uid}: tokens from {part.first} came after {len(text.tokens)}")
        if bits and digest_of_bits(self.library, bits) != abi.text_of(part.digest):
            raise abi.Error(C["BR_E_MISMATCH"], f"{text.uid}: the log-probs of tokens from {part.first} have another digest")
        text.tokens += tokens
        text.logprob += bits

    def take_gen_done(self, number, done):
        text = self.running[number]
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
        temperature = self.with_base.pop(text, None)
        if temperature is not None and text.tokens and done.stop not in (C["BR_STOP_ERROR"], C["BR_STOP_ABORT"]):
            self.ask_score(Score(text, text.base), "base", temperature)

    # ---- certificates --------------------------------------------------------------------------------------------------------

    def release(self, texts, certificates):
        """Sends the digests of the caller's own bits, and only then takes the worker's log-probs."""
        check_release(self.held, texts, certificates)
        try:
            for text, certificate in zip(texts, certificates):
                if text.tokens:
                    number = self.held.pop(text)
                    self.released[number] = text, certificate
                    self.send("GEN_RELEASE", 0, number, certificate=certificate)
            self.wait(lambda: not self.released, "release")
        finally:
            self.released.clear()
        self.raise_error_of(texts)

    def take_error(self, number, error):
        """Of one certificate it is raised when the others are through."""
        if number not in self.released:
            super().take_error(number, error)
        text, _ = self.released.pop(number)
        self.errors[text] = abi.Error(C["BR_E_ARG"], text_at(error.text))

    def take_gen_held(self, number, held):
        (text, certificate), bits = self.released[number], words_at(held.logprob)
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
                self.send("GEN_DISCARD", 0, self.held.pop(text))
        self.flush()

    # ---- scoring -------------------------------------------------------------------------------------------------------------

    def score(self, texts, adapter, temperature):
        """Bits of the log-probs of each text's tokens behind its prompt, under an adapter; "base" or None: without one. The worker scores
        nothing under an adapter whose texts wait for their certificates, so that no score can be one."""
        scores = [Score(text, []) for text in texts]
        for score in scores:
            if score.text.tokens:
                self.ask_score(score, adapter, temperature)
        self.finish(texts)
        return [score.bits for score in scores]

    def ask_score(self, score, adapter, temperature):
        text = score.text
        check_text(text)
        self.ask(score, "SCORE_REQ", adapter, first_asked=len(text.prompt), temperature=bits_of(temperature), token=text.prompt + text.tokens)

    def take_score_done(self, number, done):
        score = self.running[number]
        del self.running[number]
        if done.status:
            self.errors[score.text] = abi.Error(done.status, text_at(done.text))
            return
        score.bits += words_at(done.logprob)[len(score.text.prompt) :]
        if len(score.bits) != len(score.text.tokens):
            raise abi.Error(C["BR_E_FORMAT"], f"{score.uid}: {len(score.bits)} scores came for {len(score.text.tokens)} tokens")
