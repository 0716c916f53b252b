"""One connection to a bitroll-worker: the greeting, messages in both directions, answers, the end. Every wait has a deadline, and what the
worker says of an error is the exception's sentence."""
import collections
import ctypes
import os
import sys
import time

from . import abi
from .digests import NOTHING
from .wire import C, S, TYPE, TYPE_NAME, Bridge, made, text_at

CODE_NAME = {value: name[3:] for name, value in abi.ENUMS["tb_code"].items()}
SLICE_MS, FINISH_MS = 1000, 60000
CONNECT_SLICE_MS, SAY_MS = 100, 5000  # between two looks at the socket; before it is said that nobody listens there
GONE = (C["TB_LOST"], C["TB_SILENT"])  # ends of a connection that the worker does not know of

Hello = collections.namedtuple("Hello", "pid can contract base adapter live_version")


class Refused(abi.Error):
    """The worker answered W_NACK: its code, by name, and its sentence. What was live serves on."""

    def __init__(self, code, sentence):
        super().__init__(0, f"{code}: {sentence}")
        self.code = code


class Busy(abi.Error):
    """The worker serves another trainer."""


class Lost(abi.Error):
    """The connection is over, without a word of the worker's that says why: it ended, was killed or is silent."""


def file_digest(library, model_dir, name):
    path = os.path.join(model_dir, name)
    if not os.path.exists(path):
        return NOTHING
    with open(path, "rb") as file:
        return abi.text_of(library.hash(file.read()))


class Connection:
    """address: "unix:PATH" or "mpi:RANK" of a bitroll-worker that runs the checkpoint at model_dir. connect_ms: how long to wait for somebody to
    listen at PATH, as while the worker loads; wait_ms: deadline of the greeting and of every answer; dead_ms: silence that ends the connection;
    grant_bytes: results that may wait here [16 MiB]; rank, alpha: of adapters that will be sent, compared with the worker's; rank 0: none;
    requests: that the worker must hold at once. Over MPI a process has one. Busy: the worker serves another trainer. A message of the type NAME
    goes to the method take_name, or is an answer; one may come before __init__ is done."""

    def __init__(self, library, model_dir, address, connect_ms=60_000, wait_ms=600_000, dead_ms=10_000, grant_bytes=0, rank=0, alpha=0.0,
                 requests=1):
        self.library, self.address, self.wait_ms, self.is_mpi = library, address, wait_ms, address.startswith("mpi:")
        self.bridge, self.trainer, self.event, self.is_answered = Bridge(library), ctypes.c_void_p(), S["tb_event"](), False
        me = made("hello", abi=abi.ABI_VERSION, pid=os.getpid(), build=library.c.br_version().decode(), contract=library.contract_digest(),
                  base=library.weights_digest(model_dir), config=file_digest(library, model_dir, "config.json"),
                  tokenizer=file_digest(library, model_dir, "tokenizer.json"), rank=rank, alpha=f"{alpha:.17g}")
        options = S["tb_trainer_options"](me=me, dead_ms=dead_ms, wait_ms=wait_ms, grant_bytes=grant_bytes)
        adapter = f" --adapter policy= --swap-rank {rank} --swap-alpha {alpha:g}" if rank else ""
        held = f" --requests {requests}" if requests > 1 else ""
        transport = self.transport(address, connect_ms, f"bitroll-worker --model {model_dir} --socket {address[5:]}{adapter}{held}")
        status = self.bridge.c.tb_trainer_open(transport, ctypes.byref(options), ctypes.byref(self.trainer))
        if status and status != C["BR_E_IO"]:
            self.finish_mpi()  # the worker knows, and ends as well
        self.bridge.check(status, Busy if status == C["BR_E_LIMIT"] else abi.Error)
        worker = self.bridge.c.tb_trainer_worker(self.trainer).contents
        contract, base, adapter = map(abi.text_of, (worker.contract, worker.base, worker.adapter))
        self.hello = Hello(worker.pid, worker.can, contract, base, adapter, None if adapter == NOTHING else worker.live_version)
        try:
            self.n_request = self.first_credit(requests)
        except BaseException:
            self.close(is_done=False)
            raise

    def first_credit(self, wanted):
        """How many requests the worker holds at once: of a connection that begins it grants them all, right behind its greeting."""
        until = time.monotonic() + self.wait_ms / 1000
        while not self.bridge.c.tb_trainer_requests(self.trainer):
            if time.monotonic() > until:
                raise abi.Error(C["BR_E_IO"], f"the worker granted no requests within {self.wait_ms} ms")
            self.take(1)
        held = self.bridge.c.tb_trainer_requests(self.trainer)
        if held < wanted:
            raise abi.Error(C["BR_E_LIMIT"], f"the worker holds {held} requests at once, {wanted} are needed here: start bitroll-worker with "
                                             f"--requests {wanted} or more")
        return held

    def transport(self, address, connect_ms, command):
        """command: of a worker that would listen there."""
        begin, is_said = time.monotonic(), False
        while True:
            left_ms = connect_ms - 1000 * (time.monotonic() - begin)
            try:
                return self.bridge.transport(address, int(max(0, min(left_ms, CONNECT_SLICE_MS))))
            except abi.Error as error:
                if error.status != C["BR_E_NOT_FOUND"]:
                    raise
                if left_ms <= 0:
                    raise abi.Error(error.status, f"{address[5:]}: nobody listened there for {connect_ms / 1000:g} s: start `{command}`, or wait "
                                                  "longer (--wait) if it is still loading") from None
            if not is_said and connect_ms - left_ms >= SAY_MS:
                is_said = True
                print(f"bitroll: waiting up to {left_ms / 1000:.0f} s more for a bitroll-worker that listens at {address[5:]}", file=sys.stderr,
                      flush=True)

    def close(self, is_done=True):
        """BYE, if the worker still listens; over MPI the end of the job's communication as well. Not is_done: no BYE over a socket, where a
        worker ends with the first, and serves the next trainer without."""
        if self.trainer:
            is_gone = self.bridge.c.tb_trainer_end(self.trainer) in GONE
            self.bridge.c.tb_trainer_close(self.trainer, int(is_done or self.is_mpi))
            self.trainer = None
            if not is_gone:  # MPI would wait for a worker that is
                self.finish_mpi()

    def finish_mpi(self):
        if self.is_mpi:
            self.bridge.c.tb_mpi_finish(1, FINISH_MS, 1)

    def check(self, status):
        """Of a call that sends or waits."""
        if status == C["BR_E_ABORTED"] or (status and self.bridge.c.tb_trainer_end(self.trainer) in GONE):
            raise Lost(status, f"the worker at {self.address}: {self.bridge.c.br_last_error().decode()}")
        self.bridge.check(status)

    def send(self, name, version=0, subject=0, body=None, **fields):
        """Goes out with what follows, at the next `take` or `flush`. body: the member of the message, where it has not the type's name."""
        body = body or name.lower()
        self.post(name, S["tb_message"](**{body: made(body, **fields)}) if fields else S["tb_message"](), version, subject)

    def post(self, name, message, version=0, subject=0):
        for what, number in (("version", version), ("subject", subject)):
            abi.fitting(f"{name}, {what}", ctypes.c_uint64, number)
        self.check(self.bridge.c.tb_trainer_send(self.trainer, TYPE[name], version, subject, ctypes.byref(message)))

    def flush(self):
        self.check(self.bridge.c.tb_trainer_flush(self.trainer))

    def take(self, wait_ms):
        """Takes in one message; False when none came."""
        status = self.bridge.c.tb_trainer_next(self.trainer, wait_ms, ctypes.byref(self.event))
        if status == C["BR_E_NOT_FOUND"]:
            return False
        self.check(status)
        name = TYPE_NAME[self.event.header.type].lower()
        taker = getattr(self, "take_" + name, None)
        if taker:
            taker(self.event.header.subject, getattr(self.event.message, name))
        else:
            self.is_answered = True
        return True

    def take_error(self, _, error):
        raise abi.Error(C["BR_E_ARG"], text_at(error.text))

    def take_w_nack(self, _, nack):
        raise Refused(CODE_NAME.get(nack.code, "unknown"), text_at(nack.text))

    def idle(self, silent):
        """Before each message that is waited for: how long to wait, ms. silent: s since the last one came."""
        return SLICE_MS

    def wait(self, done, what):
        heard = time.monotonic()
        while not done():
            if self.take(self.idle(time.monotonic() - heard)):
                heard = time.monotonic()
            elif time.monotonic() - heard > self.wait_ms / 1000:
                raise abi.Error(C["BR_E_IO"], f"{what}: the worker answered nothing for {self.wait_ms} ms")

    def answer(self, name):
        """The worker's answer to what was sent last; what it holds lasts until the next message."""
        self.wait(lambda: self.is_answered, name)
        self.is_answered, found = False, TYPE_NAME[self.event.header.type]
        if found != name:
            raise abi.Error(C["BR_E_FORMAT"], f"the worker answered {found} where {name} was expected")
        return getattr(self.event.message, name.lower(), None)
