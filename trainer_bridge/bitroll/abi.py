"""libbitroll through ctypes. Structs, enums, constants and functions are read from the library's own headers, so that each is written down
once, in C; the library compares the size of an op's struct at the call."""
import ctypes
import operator
import os
import re

from .errors import Error

HERE = os.path.dirname(os.path.abspath(__file__))
TREE = os.path.dirname(os.path.dirname(HERE))
HEADER_DIRS = ("src", "src/base", "kernels_batch_invariant", "kernels_batch_invariant/backward", "trainer_bridge")
# In the order of their use of one another.
HEADERS = ("bitroll.h", "bitroll_ledger.h", "br_config.h", "bi_types.h", "bi_attn.h", "bi_attnres.h", "bi_conv.h", "bi_embed.h", "bi_glu.h", "bi_experts.h",
           "bi_head.h", "bi_index.h", "bi_kda.h", "bi_linear.h", "bi_norm.h", "bi_pack.h", "bi_route.h", "bi_grad.h",
           "bitroll_ops.h", "tb_frame.h", "tb_message.h", "tb_transport.h", "tb_mpi.h", "tb_trainer.h")
ABI_VERSION = 3

SCALAR = {"uint16_t": ctypes.c_uint16, "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64,
          "uint8_t": ctypes.c_uint8, "char": ctypes.c_char, "int": ctypes.c_int, "float": ctypes.c_float, "double": ctypes.c_double,
          "size_t": ctypes.c_size_t}
WHOLE = {}  # {ctype of whole numbers: (least, most)}
for _name, _kind in SCALAR.items():
    if _name not in ("char", "float", "double"):
        _bits, _signed = 8 * ctypes.sizeof(_kind), _name in ("int", "int32_t", "int64_t")
        WHOLE[_kind] = (-1 << _bits - 1, (1 << _bits - 1) - 1) if _signed else (0, (1 << _bits) - 1)
LINE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)

STRUCT = re.compile(r"typedef (struct|union) (\w+) \{([^{}]*)\} \2;", re.S)
ENUM = re.compile(r"(?:typedef )?enum(?: (\w+))? \{(.*?)\}", re.S)
FUNCTION = re.compile(r"^((?:const )?\w+ \*?)(\w+)\((?:void|([^()]*))\);", re.M)


class Unfit(Error, ValueError):
    """A number that its place in C does not hold."""


def fitting(name, kind, value):
    """value, on its way to a C number of the type `kind`: one that is too large for it ctypes would cut without a word, numpy's and torch's
    as well."""
    if kind not in WHOLE:
        return value
    least, most = WHOLE[kind]
    try:
        whole = operator.index(value)
    except TypeError:
        raise Unfit(CONSTANTS["BR_E_ARG"], f"{name} {value!r:.80}: expected a whole number, {least} to {most}") from None
    if not least <= whole <= most:
        raise Unfit(CONSTANTS["BR_E_ARG"], f"{name} {whole}: expected {least} to {most}")
    return whole


def array(name, kind, values):
    """A C array of whole numbers."""
    try:
        for end in (min(values), max(values)) if len(values) else ():
            fitting(name, kind, end)
        return (kind * len(values))(*values)
    except TypeError:  # of one among them that is no whole number
        return (kind * len(values))(*(fitting(name, kind, value) for value in values))


class Struct(ctypes.Structure):
    def __setattr__(self, name, value):
        kind = self.kinds.get(name)
        if isinstance(value, tuple):  # of a field that is an array
            value = tuple(fitting(name, getattr(kind, "_type_", None), item) for item in value)
        super().__setattr__(name, fitting(name, kind, value))


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


def _fields(body, types, constants):
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
            if word not in types:
                raise TypeError(f"field '{line}': the type {word} is not known")
            ctype = types[word]
            if array:
                size = array.group(2)
                ctype = ctype * (int(size) if size.isdigit() else constants[size])
            yield name, ctype


def _ctype(declared, types, structs):
    """Of a function's result or parameter: a pointer to a struct is one, a text is bytes, any other pointer an address."""
    word, n_star = re.match(r"\s*(?:const )?(\w+)", declared).group(1), len(re.findall(r"[*[]", declared))
    if not n_star:
        return types[word]
    if n_star == 1 and word in structs:
        return ctypes.POINTER(structs[word])
    return ctypes.c_char_p if n_star == 1 and "const char *" in declared else ctypes.c_void_p


def read_headers():
    """{name: ctypes.Structure or Union}, {enum: {constant: value}}, {constant: value} and {function: [ctype of the result, then of each
    parameter]} of them all."""
    structs, enums, constants, functions, types = {}, {}, {}, {}, {**SCALAR, "br_line": LINE, "void": None}
    for header in HEADERS:
        text = _header(header)
        for name, body in ENUM.findall(text):
            enums[name], types[name] = _enum_values(body, constants), ctypes.c_int
            constants.update(enums[name])
        for kind, name, body in STRUCT.findall(text):
            if "(*" in body:
                continue  # a table of functions
            try:
                base, fields = Struct if kind == "struct" else ctypes.Union, list(_fields(body, types, constants))
                types[name] = structs[name] = type(name, (base,), {"_fields_": fields, "kinds": dict(fields)})
            except TypeError:  # of the jobs, which Python leaves to the command
                if header != "bitroll.h":
                    raise
        for result, name, parameters in FUNCTION.findall(text):
            functions[name] = [_ctype(declared, types, structs) for declared in (result, *filter(None, parameters.split(",")))]
    return structs, enums, constants, functions


STRUCTS, ENUMS, CONSTANTS, FUNCTIONS = read_headers()


def default_library():
    """$BITROLL_LIBRARY, or the tree's own, or the one that is installed."""
    built = os.path.join(TREE, "build", "libbitroll.so")
    return os.environ.get("BITROLL_LIBRARY") or (built if os.path.exists(built) else "libbitroll.so.0")


def command(*arguments):
    """Of the command line: $BITROLL, or the tree's own."""
    return [os.environ.get("BITROLL") or os.path.join(TREE, "build", "bitroll"), *arguments]


def address_of(data):
    """Of a bytes object or an array, which a struct that holds the address keeps as long as itself; None: NULL."""
    return ctypes.cast(ctypes.c_char_p(data) if isinstance(data, bytes) else data, ctypes.c_void_p)


def text_of(digest):
    """A br_digest as files and summaries print it."""
    return f"{digest.hi:016x}{digest.lo:016x}"


def digest_of(text):
    if not isinstance(text, str) or not re.fullmatch("[0-9a-f]{32}", text):
        raise ValueError(f"digest {text!r}: expected 32 hex digits")
    return STRUCTS["br_digest"](hi=int(text[:16], 16), lo=int(text[16:], 16))


class Loaded:
    """One loaded library of ours, with the functions of the headers that it has."""

    def __init__(self, path):
        self.c = ctypes.CDLL(path)
        for name, (result, *arguments) in FUNCTIONS.items():
            function = getattr(self.c, name, None)
            if function:
                function.restype, function.argtypes = result, arguments

    def check(self, status, error=Error):
        if status:
            raise error(status, self.c.br_last_error().decode())


class Library(Loaded):
    """libbitroll."""

    def __init__(self, path=None):
        super().__init__(path or default_library())
        self.c.H5dont_atexit()  # all files are closed by then, and of a damaged one the handler says more lines behind our sentence
        if self.c.br_abi_version() != ABI_VERSION:
            raise Error(0, f"libbitroll has ABI version {self.c.br_abi_version()}: this package is for version {ABI_VERSION}")

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
