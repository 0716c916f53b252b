"""An opened op table: `ops.rmsnorm(n_row=.., x=tensor, ..)` with the field names of the op's struct in C.

A pointer field takes a torch tensor (its memory), a ctypes struct or array (its address), or None; a struct field takes a dict. What an
op reads stays alive until the call returns; on a GPU the work lies on torch's current stream, whose allocator keeps the memory in order."""
import ctypes

import torch

from . import abi

FORM_BF16, FORM_FP4 = 0, 1


def _pointer(value, device):
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        if value.device != device:
            raise ValueError(f"a tensor on {value.device}: expected {device}")
        return value.data_ptr()
    if isinstance(value, int):
        return value
    return ctypes.addressof(value)


class Stack:
    """n packed matrices of one shape (n_out, n_in): y = W x."""

    def __init__(self, ops, n, n_out, n_in, form=FORM_BF16, shared=False):
        self.ops, self.n, self.n_out, self.n_in, self.form = ops, n, n_out, n_in, form
        self.stride = ops.library.c.br_ops_mat_bytes(ops.handle, form, n_out, n_in)
        self.data = torch.empty((1 if shared else n) * self.stride, dtype=torch.uint8, device=ops.device)
        self.shared = shared  # one matrix stands for all n

    def mat(self):
        return dict(data=self.data, n_out=self.n_out, n_in=self.n_in, form=self.form, stride=0 if self.shared else self.stride)

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
        self.ops.mat_pack_f32(n=self._single(), to=self.mat(), src=master, stride=master.stride(0), stride_out=master.stride(1),
                              stride_in=master.stride(2))
        return self

    def unpack(self):
        """The bf16 values that a forward reads, (n, n_out, n_in)."""
        out = torch.empty(self._single(), self.n_out, self.n_in, dtype=torch.bfloat16, device=self.ops.device)
        self.ops.mat_unpack(n=self._single(), **{"from": self.mat()}, dst=out)
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
        self.handle, self.limits = handle, limits

    def close(self):
        if self.handle:
            self.library.c.br_ops_close(self.handle)
            self.handle = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def wait(self):
        self.library.check(self.library.c.br_ops_wait(self.handle))

    def struct(self, name, values, keep):
        """The C struct `name` of a dict; keep collects what must live until the call returns."""
        kind = abi.STRUCTS[name]
        made, known = kind(), {field: ctype for field, ctype in kind._fields_}
        for field, value in values.items():
            ctype = known.get(field)
            if ctype is None:
                raise TypeError(f"{name} has no field '{field}': it has {', '.join(known)}")
            if ctype is ctypes.c_void_p:
                setattr(made, field, _pointer(value, self.device))
            elif issubclass(ctype, ctypes.Structure):
                setattr(made, field, self.struct(ctype.__name__, value, keep) if isinstance(value, dict) else value)
            else:
                setattr(made, field, value)
            keep.append(value)
        return made

    def array(self, name, dicts, keep):
        """An array of structs in host memory."""
        made = (abi.STRUCTS[name] * len(dicts))(*(self.struct(name, one, keep) for one in dicts))
        keep.append(made)
        return made

    def pointers(self, tensors):
        return (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))

    def call(self, op, **values):
        keep = []
        name = ARGUMENTS[op]
        args = self.struct(name, values, keep)
        if self.stream is not None and torch.cuda.current_stream().cuda_stream != self.stream:
            raise RuntimeError(f"op {op}: torch's current stream is not the one that these ops were opened on")
        self.library.check(self.library.c.br_ops_call(self.handle, op.encode(), ctypes.byref(args), ctypes.sizeof(args)))

    def __getattr__(self, op):
        if op not in ARGUMENTS:
            raise AttributeError(f"there is no op '{op}'")
        return lambda **values: self.call(op, **values)


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
