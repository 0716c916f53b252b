"""An opened op table: `ops.rmsnorm(n_row=.., x=tensor, ..)` with the field names of the op's struct in C; fields left out are 0.

A pointer field takes a torch tensor (its memory), a Host, or None; a struct field takes the bytes of `ops.pack`. What an op reads
must stay alive until the call returns; on a GPU the work lies on torch's current stream, whose allocator keeps the memory in order.
A call costs a few microseconds of Python: forwards and backwards are thousands of them."""
import ctypes
import functools
import keyword
import struct

import torch

from . import abi

FORM_BF16, FORM_FP4 = 0, 1

LETTER = {ctypes.c_int32: "i", ctypes.c_uint32: "I", ctypes.c_int64: "q", ctypes.c_uint64: "Q", ctypes.c_uint8: "B", ctypes.c_float: "f",
          ctypes.c_double: "d", ctypes.c_void_p: "Q"}


class Host:
    """Structs in host memory that another struct points to, at one address for as long as this object lives."""
    __slots__ = ("buffer", "address")

    def __init__(self, data):
        self.buffer = (ctypes.c_char * len(data)).from_buffer_copy(data)
        self.address = ctypes.addressof(self.buffer)

    def data_ptr(self):
        return self.address


@functools.cache
def packer(name):
    """A function that takes the fields of the C struct `name` and gives its bytes; a field that Python reserves gets an underscore. Written
    out as one expression, a third of the time that a loop over the fields takes."""
    kind, form, parameters, values, at = abi.STRUCTS[name], "=", [], [], 0
    for field_name, ctype in kind._fields_:
        field, parameter = getattr(kind, field_name), field_name + "_" * keyword.iskeyword(field_name)
        is_struct = issubclass(ctype, ctypes.Structure)
        form += f"{field.offset - at}x" + (f"{field.size}s" if is_struct else LETTER[ctype])
        at = field.offset + field.size
        parameters.append(f"{parameter}={b'' if is_struct else None if ctype is ctypes.c_void_p else 0!r}")
        values.append(f"0 if {parameter} is None else {parameter}.data_ptr()" if ctype is ctypes.c_void_p else parameter)
    form += f"{ctypes.sizeof(kind) - at}x"
    made = eval(f"lambda *, {', '.join(parameters)}: pack({', '.join(values)})", dict(pack=struct.Struct(form).pack))
    made.__qualname__ = name  # what a call with an unknown field is told
    return made


class Stack:
    """n packed matrices of one shape (n_out, n_in): y = W x."""

    def __init__(self, ops, n, n_out, n_in, form=FORM_BF16, shared=False):
        self.ops, self.n, self.n_out, self.n_in, self.form = ops, n, n_out, n_in, form
        self.stride = ops.library.c.br_ops_mat_bytes(ops.handle, form, n_out, n_in)
        self.data = torch.empty((1 if shared else n) * self.stride, dtype=torch.uint8, device=ops.device)
        self.shared = shared  # one matrix stands for all n

    @functools.cached_property
    def mat(self):
        """The bytes of its bi_mat."""
        return self.ops.pack("bi_mat", data=self.data, n_out=self.n_out, n_in=self.n_in, form=self.form, stride=0 if self.shared else self.stride)

    def _single(self):
        return 1 if self.shared else self.n

    def pack(self, w):
        """From bf16 in host memory, (n, n_out, n_in), any strides."""
        library, ops = self.ops.library, self.ops
        w = w.reshape(-1, self.n_out, self.n_in) if w.dim() == 2 else w
        assert w.device.type == "cpu" and w.dtype == torch.bfloat16 and w.shape == (self._single(), self.n_out, self.n_in), w.shape
        for i in range(self._single()):
            library.check(library.c.br_ops_mat_pack_bf16(ops.handle, self.data.data_ptr() + i * self.stride, self.n_out, self.n_in,
                                                         w[i].data_ptr(), w.stride(1), w.stride(2)))
        return self

    def pack_fp4(self, code, scale):
        """From MXFP4 in host memory: code (n, n_out, n_in / 2) and scale (n, n_out, n_in / 32), bytes."""
        library, ops = self.ops.library, self.ops
        code, scale = code.contiguous(), scale.contiguous()
        assert code.shape == (self.n, self.n_out, self.n_in // 2) and scale.shape == (self.n, self.n_out, self.n_in // 32)
        for i in range(self.n):
            library.check(library.c.br_ops_mat_pack_fp4(ops.handle, self.data.data_ptr() + i * self.stride, self.n_out, self.n_in,
                                                        code[i].data_ptr(), scale[i].data_ptr()))
        return self

    def round_from(self, master):
        """From f32 masters (n, n_out, n_in) on the ops' device, any strides: the one rounding of the trainer."""
        master = master.unsqueeze(0) if master.dim() == 2 else master
        assert master.dtype == torch.float32 and master.shape == (self._single(), self.n_out, self.n_in), master.shape
        self.ops.mat_pack_f32(n=self._single(), to=self.mat, src=master, stride=master.stride(0), stride_out=master.stride(1),
                              stride_in=master.stride(2))
        return self

    def unpack(self):
        """The bf16 values that a forward reads, (n, n_out, n_in)."""
        out = torch.empty(self._single(), self.n_out, self.n_in, dtype=torch.bfloat16, device=self.ops.device)
        self.ops.mat_unpack(n=self._single(), from_=self.mat, dst=out)
        return out


class Ops:
    """config: abi.Library.config(dir). Rows and positions are limits of one call."""

    def __init__(self, config, n_row_max, n_pos_max, rank_max=0, n_slot=0, backend=None, gradients=True, n_thread=0, library=None):
        self.library = library or abi.Library()
        backend = backend or ("cuda" if torch.cuda.is_available() else "oracle")
        self.backend, self.config = backend, config
        self.device = torch.device("cpu") if backend == "oracle" else torch.device("cuda", torch.cuda.current_device())
        limits, handle = abi.STRUCTS["bi_limits"](), ctypes.c_void_p()
        c = self.library.c
        self.library.check(c.br_ops_limits(ctypes.byref(config), rank_max, n_slot, n_row_max, n_pos_max, ctypes.byref(limits)))
        self.stream = None if backend == "oracle" else torch.cuda.current_stream().cuda_stream
        self.library.check(c.br_ops_open(backend.encode(), ctypes.byref(limits), n_thread, self.stream, int(gradients), ctypes.byref(handle)))
        self.handle, self.limits, self.of_slot = handle, limits, {}

    def close(self):
        if self.handle:
            self.library.c.br_ops_close(self.handle)
            self.handle = None

    def wait(self):
        self.library.check(self.library.c.br_ops_wait(self.handle))

    def rows_of_slot(self, slot):
        """As many rows of one adapter slot as a call may have, int32: one tensor for all who ask, not to be written."""
        if slot not in self.of_slot:
            self.of_slot[slot] = torch.full((self.limits.n_row,), slot, dtype=torch.int32, device=self.device)
        return self.of_slot[slot]

    def check_device(self, *tensors):
        """Tensors that come from outside: an op takes addresses, on whatever device they are."""
        for tensor in tensors:
            if tensor.device != self.device:
                raise ValueError(f"a tensor on {tensor.device}: expected {self.device}")

    @staticmethod
    def pack(name, **values):
        """The bytes of the C struct `name`."""
        return packer(name)(**values)

    @staticmethod
    def pointers(tensors):
        """An array of addresses in host memory."""
        return Host(struct.pack(f"={len(tensors)}Q", *(t.data_ptr() for t in tensors)))

    def __getattr__(self, op):
        if op not in ARGUMENTS:
            raise AttributeError(f"there is no op '{op}'")
        name, encoded, handle, c_call = ARGUMENTS[op], op.encode(), self.handle, self.library.c.br_ops_call
        pack, size = packer(name), ctypes.sizeof(abi.STRUCTS[name])

        def call(**values):
            if self.stream is not None and torch._C._cuda_getCurrentRawStream(self.device.index) != self.stream:
                raise RuntimeError(f"op {op}: torch's current stream is not the one that these ops were opened on")
            status = c_call(handle, encoded, pack(**values), size)
            if status:
                self.library.check(status)
        setattr(self, op, call)  # found here once
        return call


def _argument_structs():
    """{op: name of its struct}: bi_<op>_args, but for the two norms, which share one; the gradients of bi_grad.h; linear_group."""
    names = {}
    for name in abi.STRUCTS:
        if name.startswith("bi_grad_") and name.endswith("_args"):
            names["grad_" + name[8:-5]] = name
        elif name.startswith("bi_") and name.endswith("_args"):
            names[name[3:-5]] = name
        elif name.startswith("br_") and name.endswith("_args"):
            names[name[3:-5]] = name
    names["rmsnorm"] = names["layernorm"] = names.pop("norm")
    names["grad_rmsnorm"] = names.pop("grad_norm")
    return names


ARGUMENTS = _argument_structs()
