#!/usr/bin/env python3
"""same_code.py NVCC SOURCE_DIR: every kernel's machine code is the same with --fmad=true and with --fmad=false.

A difference means that some product and sum were left to the compiler to join, so that the bits would hang on a flag. Compiles a few
files, with BITROLL_TEST_LONG=1 all of them. Exit 1 names each kernel that differs. The gradients, all but their plan, are under no bit
contract: for them it says how many do.
"""
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

QUICK = ("bi_norm.cu", "bi_glu.cu", "bi_route.cu", "bi_grad_experts_plan.cu", "device_view_cuda.cu")
SOURCES = ("kernels_batch_invariant", "kernels_batch_invariant/backward", "src/device")
FLAGS = ["-cubin", "-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-ftz=false", "-prec-div=true", "-prec-sqrt=true", "-D_GNU_SOURCE"]
FOLDERS = ("src", "src/base", "src/device", "kernels_batch_invariant", "kernels_batch_invariant/backward",
           "kernels_batch_invariant/numeric")


def sections(path):
    """Name and bytes of each section of a 64-bit ELF file."""
    data = path.read_bytes()
    table, = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    head = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    text = head[names][4]
    for name, kind, _, _, offset, length in head:
        end = data.index(b"\0", text + name)
        yield data[text + name:end].decode(), b"" if kind == 8 else data[offset:offset + length]


def code(nvcc, source, root, folder, fmad):
    out = folder / f"{source.stem}.{fmad}.cubin"
    include = [f"-I{root / name}" for name in FOLDERS]
    subprocess.run([nvcc, *FLAGS, *include, f"--fmad={fmad}", str(source), "-o", str(out)], check=True)
    return {name: body for name, body in sections(out) if name.startswith(".text.")}


def is_free(source):
    return source.parent.name == "backward" and source.name != "bi_grad_experts_plan.cu"


def main():
    nvcc, root = sys.argv[1], pathlib.Path(sys.argv[2])
    sources = [s for name in SOURCES for s in sorted((root / name).glob("*.cu"))]
    if os.environ.get("BITROLL_TEST_LONG") != "1":
        sources = [s for s in sources if s.name in QUICK]
    bad, count = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for source in sources:
            one, other = (code(nvcc, source, root, pathlib.Path(folder), fmad) for fmad in ("true", "false"))
            differ = [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
            count += len(one)
            if is_free(source):
                print(f"{source.name}: {len(differ)} of {len(one)} kernels are other code with --fmad=false: gradients")
                continue
            bad += len(differ)
            for name in differ:
                print(f"{source.name}: {name[6:]}: other code with --fmad=false")
    print(f"same code: {len(sources)} files, {count} kernels, {bad} differ")
    return 1 if bad or not count else 0


if __name__ == "__main__":
    sys.exit(main())
