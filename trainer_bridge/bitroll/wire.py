"""libbitroll_bridge through ctypes: its transports, and the fields of what it sends and takes in."""
import ctypes
import os
import struct

from . import abi

C, S = abi.CONSTANTS, abi.STRUCTS
TYPE = {name[3:]: value for name, value in abi.ENUMS["tb_type"].items()}
TYPE_NAME = {value: name for name, value in TYPE.items()}


class Bridge(abi.Loaded):
    """libbitroll_bridge, from where a library of ours lies."""
    started = False  # MPI, by this process

    def __init__(self, library):
        super().__init__(os.path.join(os.path.dirname(library.c._name), "libbitroll_bridge.so"))

    def transport(self, address, wait_ms):
        form, _, place = address.partition(":")
        out = ctypes.c_void_p()
        if form == "unix":
            self.check(self.c.tb_socket_connect(os.fsencode(place), wait_ms, ctypes.byref(out)))
        elif form == "mpi" and place.isdecimal():
            rank = abi.fitting(f"address '{address}', rank", ctypes.c_int, int(place))
            if Bridge.started:
                raise abi.Error(C["BR_E_UNSUPPORTED"], "MPI has been started by this process: one job is one connection")
            self.check(self.c.tb_mpi_start(None, None, ctypes.byref(ctypes.c_int()), ctypes.byref(ctypes.c_int())))
            Bridge.started = True
            self.check(self.c.tb_mpi_open(rank, ctypes.byref(out)))
        else:
            raise ValueError(f"address '{address}': expected unix:PATH or mpi:RANK")
        return out


def field(name, kind, value):
    """A field of a message as C has it, of text, bytes, words, a digest as text, or a number."""
    if kind is S["br_digest"]:
        return abi.digest_of(value)
    if kind is S["tb_text"]:
        value = value.encode()
    if kind in (S["tb_text"], S["tb_bytes"], S["tb_words"]):
        held = value if isinstance(value, bytes) else abi.array(name, ctypes.c_uint32, value)
        return kind(p=abi.address_of(held), n=len(value))
    return value


def made(name, /, **fields):
    """The struct tb_<name>."""
    kind = S["tb_" + name]
    kinds = dict(kind._fields_)
    return kind(**{key: field(key, kinds[key], value) for key, value in fields.items()})


def bits_of(value, form="f"):
    """Of a number as binary32, or as binary64, form "d"."""
    return int.from_bytes(struct.pack("<" + form, value), "little")


def text_at(text):
    return ctypes.string_at(text.p, text.n).decode("utf-8", "replace") if text.n else ""


def words_at(words):
    return (ctypes.c_uint32 * words.n).from_address(words.p)[:] if words.n else []
