"""Rules of the Python package: a torch.autograd.Function calls one op, torch adds gradients up and computes nothing else of a model's rows, and
float arithmetic of torch stands in the files that are meant to have some."""
import ast
import contextlib
import glob
import os
import unittest

import torch

import rig
from bitroll import functions, mcore, ops
from bitroll.model import Model
from bitroll.node import Op
from bitroll.rows import Rows
from test_forward import PRESETS, NoArithmetic

NO_OP = {"Enter", "Leave"}  # a change of type or of place
# What autograd does with several gradients of one input, maps that share a matrix with theirs, a gradient's way between f32 and bf16, and the
# zeros around a part of a tensor.
ADDS_UP = {"add", "add_", "sum", "_to_copy of a floating-point tensor", "slice_backward", "select_backward"}
ARITHMETIC = set("""abs add addcmul addmm addmv baddbmm bmm clamp conv1d cumprod cumsum div dot einsum erf exp exp2 expm1 functional layer_norm
    lerp log log1p log2 log_softmax logsumexp matmul maximum mean minimum mm mul mv neg norm outer pow prod reciprocal relu rms_norm rsqrt sigmoid
    silu softmax softplus sqrt std sub sum tanh var @""".split())
MAY = {  # by file: the float64 twin, the control arms and what lies outside a model's rows, then what the rest calls by such a name
    "float64.py": ARITHMETIC, "torch_ops.py": {"matmul"}, "peft.py": {"@"},
    "rl/metrics.py": {"mean", "std"}, "rl/objective.py": ARITHMETIC, "rl/policy.py": {"@", "add", "sum"}, "rl/train.py": {"mean"},
    "rl/train_base.py": {"mean"},
    "functions.py": {"add", "sum"},  # of gradients
    "abi.py": {"sub"}, "importers/dump_file.py": {"add", "cumsum"}, "rl/report.py": {"mean", "sub"}}  # of texts, of sets and offsets, of columns


def backward(preset, around=contextlib.nullcontext, model=Model):
    """A forward and, in `around`, its backward."""
    r = rig.Rig(preset, True, model, gradients=True)
    lengths, token, target = rig.rows_of(rig.sequences(r.config, (20, 31)))
    place = mcore.pack(lengths) if model is mcore.BitrollModel else Rows(r.ops, [0, lengths[0], sum(lengths)])
    first = (token, place) if model is mcore.BitrollModel else (place, token)
    logprob = r.model.log_probs(*first, target, rig.ones(len(token)))[0]
    with around():
        logprob.backward(rig.ones(len(token)))
    r.close()


class Counted:
    """While it is entered: {Function: how many ops each call of its forward made}."""

    def __init__(self):
        self.found, self.n, self.stack = {}, 0, contextlib.ExitStack()
        self.kinds = [kind for kind in Op.__subclasses__() if kind.__module__ == functions.__name__]

    def replace(self, owner, name, made):
        plain = owner.__dict__[name]
        setattr(owner, name, made)
        self.stack.callback(setattr, owner, name, plain)

    def forward(self, kind):
        plain = kind.forward

        def forward(*given):
            before = self.n
            out = plain(*given)
            self.found.setdefault(kind.__name__, set()).add(self.n - before)
            return out
        return staticmethod(forward)

    def __enter__(self):
        plain = ops.Ops.__getattr__

        def get(owner, name):
            call = plain(owner, name)

            def counting(**values):
                self.n += 1
                return call(**values)
            setattr(owner, name, counting)  # found there from now on
            return counting
        self.replace(ops.Ops, "__getattr__", get)
        for kind in self.kinds:
            self.replace(kind, "forward", self.forward(kind))
        return self.found

    def __exit__(self, *_):
        self.stack.close()


class OneOp(unittest.TestCase):
    def test_a_function_calls_one_op(self):
        counted = Counted()
        with counted as found:
            mcore.initialize(rig.BACKEND)
            for preset in PRESETS:
                backward(preset)
            backward(PRESETS[0], model=mcore.BitrollModel)
        self.assertEqual(found, {kind.__name__: {int(kind.__name__ not in NO_OP)} for kind in counted.kinds})

    def test_the_count_sees_two(self):
        class Twice(Op):
            @staticmethod
            def forward(ctx, fn):
                fn()
                fn()

        counted = Counted()
        counted.kinds = [Twice]
        with counted as found:
            r = rig.Rig("pico", False)
            x = torch.zeros(2, 8, dtype=torch.bfloat16, device=rig.DEVICE)
            with torch.no_grad():
                Twice.run(lambda: r.ops.residual(n_row=2, d=8, a=x, b=x, y=x.clone(), fault=Rows(r.ops, [0, 2]).fault_at("here")))
            r.close()
        self.assertEqual(found, {"Twice": {2}})


class Arithmetic(unittest.TestCase):
    def test_a_backward_adds_gradients_up(self):
        mcore.initialize(rig.BACKEND)
        for preset in PRESETS:
            for model in (Model, mcore.BitrollModel):
                with self.subTest(preset=preset, model=model):
                    watch = NoArithmetic()
                    backward(preset, lambda: watch, model)  # noqa: B023 called in this round
                    self.assertIn("add", watch.found)
                    self.assertLessEqual(set(watch.found), ADDS_UP)

    def test_files(self):
        """By the names of calls: what a value is, these do not tell, and the watch over a forward does."""
        root = os.path.join(rig.TREE, "trainer_bridge", "bitroll")
        paths = glob.glob(os.path.join(root, "**", "*.py"), recursive=True)
        self.assertGreater(len(paths), 40)
        for path in paths:
            name = os.path.relpath(path, root)
            with open(path, encoding="utf-8") as file, self.subTest(name):
                self.assertLessEqual(arithmetic(file.read()), MAY.get(name, set()))

    def test_names_are_found(self):
        for text, wanted in (("y = x @ w", {"@"}), ("x @= w", {"@"}), ("x.add_(y)", {"add"}),
                             ("y = torch.nn.functional.silu(x)", {"functional", "silu"}),
                             ("from torch.nn import functional as f", {"functional"}), ("import torch.nn.functional", {"functional"}),
                             ("x.exp().sum(0)", {"exp", "sum"}), ("math.log(3); sum([1, 2]); rows.fn.linear(x)", set())):
            with self.subTest(text):
                self.assertEqual(arithmetic(text), wanted)


def arithmetic(text):
    """Names of ARITHMETIC, in place or not, that are called as methods or imported."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.MatMult):
            found.add("@")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = node.func.value
            found.update(() if isinstance(of, ast.Name) and of.id == "math" else [node.func.attr.removesuffix("_")])
        elif isinstance(node, ast.Attribute) and node.attr == "functional":
            found.add("functional")
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update(part for name in node.names for part in name.name.split("."))
    return found & ARITHMETIC


if __name__ == "__main__":
    unittest.main()
