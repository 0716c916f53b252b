"""libbitroll through ctypes. Structs, enums and constants are read from the library's own headers, so that a field is written down
once, in C; the library compares the size of each struct at the call."""
import ctypes
import os
import re

HERE = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.dirname(os.path.dirname(HERE))
HEADER_DIRS = ("src", "src/base", "kernels_batch_invariant", "kernels_batch_invariant/backward", "trainer_bridge")
# In the order of their use of one another.
HEADERS = ("bitroll.h", "bitroll_ledger.h", "br_config.h", "bi_types.h", "bi_attn.h", "bi_attnres.h", "bi_conv.h", "bi_embed.h", "bi_glu.h", "bi_experts.h",
           "bi_head.h", "bi_index.h", "bi_kda.h", "bi_linear.h", "bi_norm.h", "bi_pack.h", "bi_route.h", "bi_grad.h",
           "bitroll_ops.h", "tb_frame.h", "tb_message.h", "tb_trainer.h")
ABI_VERSION = 3

SCALAR = {"uint16_t": ctypes.c_uint16, "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64,
          "uint8_t": ctypes.c_uint8, "char": ctypes.c_char, "int": ctypes.c_int, "float": ctypes.c_float, "double": ctypes.c_double,
          "size_t": ctypes.c_size_t}

STRUCT = re.compile(r"typedef (struct|union) (\w+) \{([^{}]*)\} \2;", re.S)
ENUM = re.compile(r"(?:typedef )?enum(?: (\w+))? \{(.*?)\}", re.S)


class Error(RuntimeError):
    """A call of libbitroll that failed: its status and its sentence."""

    def __init__(self, status, sentence):
        super().__init__(sentence)
        self.status = status


def _header(name):
    for folder in HEADER_DIRS:
        path = os.path.join(TREE, folder, name)
        if os.path.exists(path):
            with open(path, encoding="ascii") as file:
                return re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)
    raise FileNotFoundError(f"{name}: no such header of bitroll under {TREE}")


def _enum_values(body, known):
    values, following = {}, 0
    for item in filter(None, (part.strip() for part in body.split(","))):
        name, _, value = (part.strip() for part in item.partition("="))
        if value:
            try:
                following = int(eval(value, {"__builtins__": {}}, {**known, **values}))  # integers and names of our own headers
            except (NameError, SyntaxError, TypeError):
                continue  # sizeof and the like: not a constant that Python needs
        values[name] = following
        following += 1
    return values


def _fields(body, structs, enums, constants):
    """(name, ctype) of a struct's declarations; every pointer is an address."""
    for line in filter(None, (part.strip() for part in body.split(";"))):
        kind = re.match(r"(?:const )?(?:unsigned )?(?:struct )?(\w+)\s*(.*)", line, re.S)
        word, rest = kind.group(1), kind.group(2)
        for item in rest.split(","):
            array = re.search(r"(\w+)\[(\w+)\]$", item.strip())
            name = array.group(1) if array else re.search(r"(\w+)$", item.strip()).group(1)
            if "*" in item:
                yield name, ctypes.c_void_p
                continue
            ctype = SCALAR.get(word) or structs.get(word) or (ctypes.c_int if word in enums else None)
            if ctype is None:
                raise TypeError(f"field '{line}': the type {word} is not known")
            if array:
                size = array.group(2)
                ctype = ctype * (int(size) if size.isdigit() else constants[size])
            yield name, ctype


def read_headers():
    """{name: ctypes.Structure or Union}, {enum: {constant: value}} and {constant: value} of them all."""
    structs, enums, constants = {}, {}, {}
    for header in HEADERS:
        text = _header(header)
        for name, body in ENUM.findall(text):
            enums[name] = _enum_values(body, constants)
            constants.update(enums[name])
        for kind, name, body in STRUCT.findall(text):
            if "(*" in body:
                continue  # a table of functions
            try:
                base = ctypes.Structure if kind == "struct" else ctypes.Union
                structs[name] = type(name, (base,), {"_fields_": list(_fields(body, structs, enums, constants))})
            except TypeError:  # of the jobs, which Python leaves to the command
                if header != "bitroll.h":
                    raise
    return structs, enums, constants


STRUCTS, ENUMS, CONSTANTS = read_headers()
LINE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)


def default_library():
    """$BITROLL_LIBRARY, or the tree's own, or the one that is installed."""
    built = os.path.join(TREE, "build", "libbitroll.so")
    return os.environ.get("BITROLL_LIBRARY") or (built if os.path.exists(built) else "libbitroll.so.0")


def command(*arguments):
    """Of the command line: $BITROLL, or the tree's own."""
    return [os.environ.get("BITROLL") or os.path.join(TREE, "build", "bitroll"), *arguments]


def text_of(digest):
    """A br_digest as files and summaries print it."""
    return f"{digest.hi:016x}{digest.lo:016x}"


def digest_of(text):
    if len(text) != 32:
        raise ValueError(f"digest '{text}': expected 32 hex digits")
    return STRUCTS["br_digest"](hi=int(text[:16], 16), lo=int(text[16:], 16))


class Library:
    """One loaded libbitroll."""

    def __init__(self, path=None):
        self.c = ctypes.CDLL(path or default_library())
        p, i32, i64, size = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t
        text, real, config, limits = ctypes.c_char_p, ctypes.c_float, STRUCTS["br_config"], STRUCTS["bi_limits"]
        signatures = {
            "br_last_error": (text,), "br_version": (text,), "br_abi_version": (i32,), "br_contract_digest": (STRUCTS["br_digest"],),
            "br_ops_config": (i32, text, ctypes.POINTER(config)),
            "br_ops_limits": (i32, ctypes.POINTER(config), i32, i32, i32, i32, ctypes.POINTER(limits)),
            "br_ops_open": (i32, text, ctypes.POINTER(limits), i32, p, i32, ctypes.POINTER(p)),
            "br_ops_close": (None, p), "br_ops_wait": (i32, p), "br_ops_call": (i32, p, text, p, size),
            "br_ops_mat_bytes": (size, p, i32, i32, i32),
            "br_ops_mat_pack_bf16": (i32, p, p, i32, i32, p, i64, i64), "br_ops_mat_pack_fp4": (i32, p, p, i32, i32, p, p),
            "br_ops_attnres_weight": (i32, p, p, p, p, i32), "br_ops_kda_state_bytes": (size, p, i32, i32),
            "br_ops_latent_block_bytes": (size, p, i32), "br_ops_index_block_bytes": (size, p, i32),
            "br_ops_attn_alpha": (real, i32, i32), "br_ops_index_c": (real, i32, i32), "br_ops_kda_scale": (real, i32),
            "br_ops_hash": (STRUCTS["br_digest"], p, size), "br_ops_lora_s": (real, ctypes.c_double, i32, i32),
        }
        engine, size_out, digest = p, ctypes.POINTER(ctypes.c_int64), STRUCTS["br_digest"]
        signatures.update({
            "br_engine_open": (i32, p, ctypes.POINTER(p)), "br_engine_close": (None, engine),
            "br_engine_weights_digest": (digest, engine),
            "br_base_open": (i32, engine, text, ctypes.POINTER(p)), "br_base_close": (None, p), "br_base_begin": (i32, p),
            "br_base_find": (i32, p, text, size_out), "br_base_chunk": (i32, p, i64, ctypes.c_uint64, p, size), "br_base_end": (i32, p, digest),
            "br_base_commit": (i32, p),
            "br_engine_adapter_live_digest": (i32, engine, text, ctypes.POINTER(digest)),
            "br_sampling_default": (STRUCTS["br_sampling"],), "br_submit": (i32, engine, p, ctypes.POINTER(ctypes.c_uint64)),
            "br_poll": (i32, engine, p, i32, ctypes.POINTER(i32), ctypes.POINTER(i32)),
            "br_request_error": (i32, engine, ctypes.c_uint64, ctypes.POINTER(text)), "br_request_versions": (i32, engine, ctypes.c_uint64, p),
            "br_swap_manifest": (i32, engine, text, size_out, ctypes.POINTER(digest)),
            "br_swap_tensor_at": (i32, engine, text, i64, p),
            "br_swap_from_memory": (i32, engine, text, p, i64, p, i64, ctypes.c_uint32, ctypes.POINTER(ctypes.c_int)),
            "br_swap_commit": (i32, engine, text, i64, ctypes.c_int, ctypes.POINTER(ctypes.c_int)), "br_ipc_export": (i32, p, p),
            "br_job_digest": (i32, text, LINE, p, p), "br_report_free": (None, p),
        })
        signatures.update({
            "br_ledger_create": (i32, text, p, ctypes.POINTER(p)), "br_ledger_resume": (i32, text, p, i64, ctypes.POINTER(p)),
            "br_ledger_append": (i32, p, p, p), "br_ledger_steps": (i32, text, p),
            "br_ledger_step_count": (i64, p), "br_ledger_root": (None, p, p), "br_ledger_close": (i32, p),
        })
        for name, (result, *arguments) in signatures.items():
            function = getattr(self.c, name)
            function.restype, function.argtypes = result, arguments
        if self.c.br_abi_version() != ABI_VERSION:
            raise Error(0, f"libbitroll has ABI version {self.c.br_abi_version()}: this package is for version {ABI_VERSION}")

    def check(self, status):
        if status:
            raise Error(status, self.c.br_last_error().decode())

    def contract_digest(self):
        return text_of(self.c.br_contract_digest())

    def hash(self, data):
        """The digest of a bytes object, as the engine's files have it."""
        return self.c.br_ops_hash(data, len(data))

    def hash_at(self, address, n):
        """The same of memory."""
        return self.c.br_ops_hash(address, n)

    def weights_digest(self, model_dir):
        """Of a checkpoint's files: what an engine says that has loaded them. Reads every byte."""
        report = STRUCTS["br_report"]()
        status = self.c.br_job_digest(os.fsencode(model_dir), LINE(lambda context, line: None), None, ctypes.byref(report))
        digest = text_of(report.weights_digest)
        self.c.br_report_free(ctypes.byref(report))
        self.check(status)
        return digest

    def config(self, model_dir):
        config = STRUCTS["br_config"]()
        self.check(self.c.br_ops_config(os.fsencode(model_dir), ctypes.byref(config)))
        return config
