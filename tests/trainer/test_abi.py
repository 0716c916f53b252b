"""The structs that Python reads from the headers against the compiler's own layout."""
import ctypes
import os
import re
import subprocess
import unittest

import numpy
import torch

import rig
from bitroll import abi, wire
from bitroll.digests import digest_of_bits
from bitroll.rows import Rows


class Layout(unittest.TestCase):
    def test_every_field(self):
        headers = ("bitroll_ledger.h", "bitroll_ops.h", "tb_mpi.h", "tb_trainer.h")
        lines = ["#include <stddef.h>", "#include <stdio.h>", *(f'#include "{h}"' for h in headers), "int main(void) {"]
        for name, struct in abi.STRUCTS.items():
            lines.append(f'printf("{name} - %zu\\n", sizeof({name}));')
            lines += [f'printf("{name} {field} %zu\\n", offsetof({name}, {field}));' for field, _ in struct._fields_]
        source, program = os.path.join(rig.PLACE, "layout.c"), os.path.join(rig.PLACE, "layout")
        with open(source, "w", encoding="ascii") as file:
            file.write("\n".join([*lines, "return 0; }"]))
        folders = [os.path.join(rig.TREE, f) for f in (*abi.HEADER_DIRS, "src/device", "kernels_batch_invariant/numeric")]
        subprocess.run(["cc", "-std=gnu11", "-D_GNU_SOURCE", *(f"-I{f}" for f in folders), source, "-o", program, "-lm"], check=True)
        compiled = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split("\n")
        ours = []
        for name, struct in abi.STRUCTS.items():
            ours.append(f"{name} - {ctypes.sizeof(struct)}")
            ours += [f"{name} {field} {getattr(struct, field).offset}" for field, _ in struct._fields_]
        self.assertEqual(compiled[:-1], ours)

    def test_a_number_that_c_does_not_hold_is_refused_by_name(self):
        """ctypes takes its low bits; a version that the worker never saw was then live."""
        made = abi.STRUCTS["br_ledger_step"](step=1)
        for make, said in ((lambda: abi.STRUCTS["br_ledger_step"](version=1 << 64), f"version {1 << 64}: expected {-1 << 63} to {(1 << 63) - 1}"),
                           (lambda: setattr(made, "n_seq", -1 << 64), f"n_seq {-1 << 64}: expected {-1 << 63} to {(1 << 63) - 1}"),
                           (lambda: wire.made("gen_req", sample=1 << 32), f"sample {1 << 32}: expected 0 to {(1 << 32) - 1}"),
                           (lambda: wire.made("gen_req", prompt=[1, -1]), f"prompt -1: expected 0 to {(1 << 32) - 1}"),
                           (lambda: setattr(abi.STRUCTS["br_sampling"](), "stop", (5, 1 << 32)), f"stop {1 << 32}: expected {-1 << 31} to "),
                           (lambda: abi.STRUCTS["br_ledger_step"](step=numpy.uint64(1 << 63)), f"step {1 << 63}: expected "),
                           (lambda: abi.STRUCTS["br_sampling"](top_k=torch.tensor(1 << 32)), f"top_k {1 << 32}: expected "),
                           (lambda: abi.array("token", ctypes.c_int32, [numpy.int64(1 << 32)]), f"token {1 << 32}: expected "),
                           (lambda: wire.Bridge(rig.LIBRARY).transport(f"mpi:{1 << 32}", 0), f"rank {1 << 32}: expected "),
                           (lambda: abi.array("token", ctypes.c_int32, [1 << 31]), f"token {1 << 31}: expected ")):
            with self.assertRaisesRegex(abi.Error, re.escape(said)):
                make()
        for make, said in ((lambda: setattr(made, "step", 1.5), "step 1.5: expected a whole number, "),
                           (lambda: setattr(made, "step", None), "step None: expected a whole number, "),
                           (lambda: abi.array("token", ctypes.c_int32, [1, 2.5, 3]), "token 2.5: expected a whole number, "),
                           (lambda: abi.array("token", ctypes.c_int32, [1, float("nan"), 7]), "token nan: expected a whole number, "),
                           (lambda: abi.array("token", ctypes.c_int32, [1, "2", 3]), "token '2': expected a whole number, "),
                           (lambda: abi.array("token", ctypes.c_int32, torch.tensor([1.0])), "token tensor(1.): expected a whole number, "),
                           (lambda: digest_of_bits(rig.LIBRARY, [7, 1 << 32]), f"log-prob {1 << 32}: expected 0 to {(1 << 32) - 1}")):
            with self.assertRaisesRegex(ValueError, re.escape(said)):
                make()
        self.assertEqual(abi.array("token", ctypes.c_int32, numpy.array([3, -4]))[:], [3, -4])
        made.step = (1 << 63) - 1
        self.assertEqual(made.step, (1 << 63) - 1)

    def test_errors_are_sentences(self):
        r = rig.Rig("pico", False)
        with self.assertRaisesRegex(abi.Error, "there is none of this name"):
            r.ops.library.check(r.ops.library.c.br_ops_call(r.ops.handle, b"no_op", None, 0))
        with self.assertRaisesRegex(abi.Error, "the caller was built for another version"):
            r.ops.library.check(r.ops.library.c.br_ops_call(r.ops.handle, b"glu", None, 3))
        with self.assertRaisesRegex(abi.Error, "opened without gradients"):
            r.ops.grad_glu()
        with self.assertRaisesRegex(TypeError, "bi_glu_args.. got an unexpected keyword argument 'gg'"):
            r.ops.glu(gg=None)
        with self.assertRaisesRegex(ValueError, "a tensor on meta: expected " + rig.DEVICE):
            Rows(r.ops, [0, 2], slot=torch.zeros(2, dtype=torch.int32, device="meta"))
        with self.assertRaisesRegex(AttributeError, "there is no op 'gluu'"):
            r.ops.gluu()
        r.close()

    def test_rows_that_no_op_could_take(self):
        """Each was a crash, a read behind a tensor's end, or other bits."""
        r, i32 = rig.Rig("pico", True), torch.int32
        n_max, most = r.ops.limits.n_row, f"expected at most {r.ops.limits.n_row}, {r.ops.limits.n_pos}"
        for cu, more, said in (
                ([0], {}, "expected at least one, of one row or more"), ([], {}, "expected at least one, of one row or more"),
                ([0, 2, 2], {}, "expected at least one, of one row or more"), ([1, 3], {}, "from row 1: expected"),
                ([0, 3], dict(n_row=5), "3 rows in sequences: expected 5"), ([0, 3], dict(n_row=2), "3 rows in sequences: expected 2"),
                ([0, n_max, n_max + 1], {}, most), ([0, n_max + 1], {}, most),
                ([0, 3], dict(slot=1), "slot 1: expected 0, the adapter, or -1, the base"), ([0, 3], dict(slot=-2), "slot -2: expected"),
                ([0, 3], dict(slot=None), "slot None: expected"),
                *(([0, 3], dict(slot=slot), f"slots: {slot.dtype} .*: expected torch.int32 .3,., one behind the other") for slot in (
                    torch.zeros(2, dtype=i32), torch.zeros(4, dtype=i32), torch.zeros(3, dtype=torch.int64), torch.zeros(3, 1, dtype=i32),
                    torch.zeros(6, dtype=i32)[::2]))):
            with self.subTest(cu=cu, **more), self.assertRaisesRegex(ValueError, said):
                Rows(r.ops, cu, **{k: v.to(rig.DEVICE) if isinstance(v, torch.Tensor) else v for k, v in more.items()})
        rows, token, t = Rows(r.ops, [0, 3]), torch.tensor([3, 4, 5], dtype=i32, device=rig.DEVICE), rig.ones(3)
        for arguments, said in (((token.long(), token, t), "token ids: torch.int64"), ((token[:2], token, t), "token ids: torch.int32 .2,."),
                                ((token, token.long(), t), "target ids: torch.int64"), ((token, token, t.double()), "temperatures: torch.float64"),
                                ((token, token, rig.ones(1).expand(3)), "temperatures: torch.float32 .3,. with gaps")):
            with self.subTest(said), self.assertRaisesRegex(ValueError, said):
                r.model.log_probs(rows, *arguments)
        r.model.log_probs(rows, token, token, t)
        r.close()

    @unittest.skipUnless(rig.BACKEND == "oracle", "on a GPU the values are not looked at")
    def test_slots_that_no_adapter_has(self):
        """The oracle read an adapter's matrices from wherever such a slot points."""
        r, lowest = rig.Rig("pico", True), -(1 << 31)
        for values, said in (([0, -1, 1], "1 at row 2"), ([0, 7, -2], "7 at row 1"), ([-2, 0, 9], "-2 at row 0"), ([0, 0, lowest], f"{lowest} at row 2")):
            with self.subTest(values), self.assertRaises(ValueError) as found:
                Rows(r.ops, [0, 3], slot=torch.tensor(values, dtype=torch.int32))
            self.assertEqual(str(found.exception), f"slots: {said}: expected 0, the adapter, or -1, the base")
        for values in ([0, 0, 0], [-1, -1, -1], [0, -1, 0]):
            Rows(r.ops, [0, 3], slot=torch.tensor(values, dtype=torch.int32))
        r.close()


if __name__ == "__main__":
    unittest.main()
