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
        with self.assertRaisesRegex(ValueError, f"{r.ops.limits.n_row + 1} rows, 2 of them in sequences: .* {r.ops.limits.n_row} at most"):
            Rows(r.ops, [0, 2], n_row=r.ops.limits.n_row + 1)
        for slot in (torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)[:, 0]):
            with self.assertRaisesRegex(ValueError, "expected 2 of torch.int32, one behind the other"):
                Rows(r.ops, [0, 2], slot=slot.to(rig.DEVICE))
        with self.assertRaisesRegex(AttributeError, "there is no op 'gluu'"):
            r.ops.gluu()
        r.close()


if __name__ == "__main__":
    unittest.main()
