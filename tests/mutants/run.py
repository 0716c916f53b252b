#!/usr/bin/env python3
"""run: changes each constant of the contract in turn and expects named tests to fail.

Layer: tests. `run.py --build DIR [--quick] [--only NAME ...] [--table FILE]`. DIR is a finished build: its objects that do not
depend on the constant are linked as they are. What does depend on it (its preprocessed text changes) is compiled from a copy
of the sources with that one number changed, for the portable instruction set, which stands in for the other two. A mutant is
caught when every test named for it fails by a check of its own; a crash, a compiler's error or the digest of the contract do
not count. Exit 1 when a mutant survives or a constant has no mutant. --table writes the table that is committed."""
import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

import mutants

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FOLDERS = ("kernels_batch_invariant", "lora", "src", "tests")
HEADERS = {"BI_CONTRACT_CONSTANTS": "kernels_batch_invariant/bi_contract.h",
           "BI_FN_COEFFICIENTS": "kernels_batch_invariant/numeric/bi_fn.h"}
TARGETS = ("bitroll_objects", "oracle_portable", "test_rigs", "bitroll_tests", "no_cuda")
TEST_TIMEOUT_S = 300


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def write(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def fail(sentence):
    sys.exit(f"run.py: {sentence}")


# ---- constants ---------------------------------------------------------------------------------------------------------------

def header_of(name):
    return HEADERS["BI_FN_COEFFICIENTS" if name.startswith("BI_FN_") else "BI_CONTRACT_CONSTANTS"]


def definition(name):
    return re.compile(rf"^(#define {name}\s+)(\S+)", re.M)


def value_of(name):
    found = definition(name).search(read(os.path.join(ROOT, header_of(name))))
    return found.group(2) if found else fail(f"{header_of(name)} does not define {name}")


def last_bit_flipped(text):
    """A hexadecimal binary32 literal with the last of its 24 bits changed."""
    sign, digits, power = re.fullmatch(r"(-?)0x1(?:\.([0-9a-f]*))?p([+-]?\d+)f", as_hex(text)).groups()
    return f"{sign}0x1.{int((digits or '').ljust(6, '0'), 16) ^ 2:06x}p{power}f"


def as_hex(text):
    number = float(text.rstrip("f")) if "x" not in text else float.fromhex(text.rstrip("f"))
    sign, digits, power = re.fullmatch(r"(-?)0x1\.([0-9a-f]*)p([+-]\d+)", number.hex()).groups()
    return f"{sign}0x1.{digits[:6]}p{power}f"


def check_complete():
    """Every listed constant has one mutant, and the committed table shows its value."""
    table = read(os.path.join(ROOT, "tests/mutants/TABLE.md"))
    for macro, header in HEADERS.items():
        text = read(os.path.join(ROOT, header))
        listed = re.findall(r"X\((BI_\w+)\)", text[text.index(f"#define {macro}(X)"):].split("\n\n")[0])
        known = [m.name for m in (mutants.CONTRACT if macro == "BI_CONTRACT_CONSTANTS" else mutants.FUNCTIONS)]
        if sorted(listed) != sorted(known):
            fail(f"{macro} and mutants.py differ: {sorted(set(listed) ^ set(known))}")
        for name in listed:
            if f"| {name} | {value_of(name)} |" not in table:
                fail(f"TABLE.md does not show {name} with its value {value_of(name)}: run without --quick, with --table")


def target_of(words):
    """The CMake target that a command of compile_commands.json belongs to."""
    target = re.match(r"CMakeFiles/(\w+)\.dir/", words[words.index("-o") + 1]) if "-o" in words else None
    return target.group(1) if target else None


# ---- builds ------------------------------------------------------------------------------------------------------------------

class Tree:
    """A scratch copy of the sources, and one runner of the suites that are named."""

    def __init__(self, build, scratch, suites):
        self.build, self.scratch = build, scratch
        self.source = os.path.join(scratch, "source")
        for folder in FOLDERS:
            shutil.copytree(os.path.join(ROOT, folder), os.path.join(self.source, folder),
                            ignore=lambda at, names: [n for n in names if not (n.endswith((".c", ".h")) or
                                                                              os.path.isdir(os.path.join(at, n)))])
        write(os.path.join(self.source, "tests/suites.h"),
              "/* The suites that a mutant can fail. */\n" + "".join(f"SUITE({s})\n" for s in sorted(suites)))
        self.commands = self.commands_by_file(suites)
        self.objects = {}    # file -> object of the sources as they are; those of the build unless compiled here
        self.base_text = {}  # file -> hash of its preprocessed text
        self.prepare()

    def commands_by_file(self, suites):
        wanted = {}
        for entry in json.loads(read(os.path.join(self.build, "compile_commands.json"))):
            words, file = shlex.split(entry["command"]), os.path.relpath(entry["file"], ROOT)
            suite = re.fullmatch(r"tests/test_(\w+)\.c", file)
            if target_of(words) in TARGETS and (not suite or suite.group(1) in suites | {"main", "support"}):
                wanted[file] = words
        return wanted

    def command(self, file, *options):
        """The build's own command for a file, on the copy, without its optimisation, warnings and outputs."""
        words, out, skip = self.commands[file], [], False
        for word in words:
            if skip or word in ("-o", "-c", "-g", "-O3", "-Werror") or word.startswith("-W"):
                skip = not skip and word in ("-o", "-c")
            elif word.startswith("-I" + ROOT):
                out.append("-I" + self.source + word[len("-I" + ROOT):])
            else:
                out.append(word)
        return [*out, "-O1", "-w", *options, os.path.join(self.source, file)]

    def preprocessed(self, file):
        text = subprocess.run(self.command(file, "-E", "-P"), capture_output=True, check=False).stdout
        return hashlib.sha256(text).hexdigest()

    def compile(self, file, to):
        result = subprocess.run(self.command(file, "-c", "-o", to), capture_output=True, text=True, check=False)
        if result.returncode != 0:
            fail(f"{file} does not compile: {result.stderr.strip()}")
        return to

    def object_of_build(self, file, words):
        return os.path.join(self.build, words[words.index("-o") + 1])

    def prepare(self):
        """Which files can see a constant; what the runner links when nothing is changed."""
        for file, words in self.commands.items():
            includes = subprocess.run(self.command(file, "-MM"), capture_output=True, text=True, check=False).stdout
            if any(header in includes for header in HEADERS.values()):
                self.base_text[file] = self.preprocessed(file)
            if file.startswith("tests/") or target_of(words) == "no_cuda":
                self.objects[file] = self.object_of_build(file, words)
        main = os.path.join(self.scratch, "test_main.o")
        self.objects["tests/test_main.c"] = self.compile("tests/test_main.c", main)

    def link(self, changed, to):
        objects = {**self.objects, **changed}
        libraries = subprocess.run(["pkg-config", "--libs", "check", "hdf5", "jansson", "libcrypto"], capture_output=True, text=True,
                                   check=True).stdout.split()
        portable = [f"-Wl,--defsym=bi_ops_{isa}=bi_ops_portable" for isa in ("avx2", "avx512")]
        archives = [os.path.join(self.build, f"lib{name}_static.a") for name in ("bridge", "bitroll")]
        words = ["cc", *objects.values(), *portable, *archives, *libraries, "-lm", "-lpthread", "-o", to]
        result = subprocess.run(words, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            fail(f"the runner does not link: {result.stderr.strip()[-2000:]}")
        return to

    def runner(self, changed_files):
        """Compiles what changed and links it before the library, whose own copy is then left out."""
        changed = {}
        for file in changed_files:
            changed[file] = self.compile(file, os.path.join(self.scratch, file.replace("/", "-") + ".o"))
        return self.link(changed, os.path.join(self.scratch, "runner"))

    def mutate(self, mutant, value):
        path = os.path.join(self.source, header_of(mutant.name))
        original = read(path)
        text, n = definition(mutant.name).subn(lambda m: m.group(1) + value, original)
        if n != 1:
            fail(f"{mutant.name} is defined {n} times")
        if mutant.partner:
            if text.count(mutant.partner[0]) != 1:
                fail(f"{mutant.name}: its partner is not in {header_of(mutant.name)}")
            text = text.replace(*mutant.partner)
        write(path, text)
        try:
            changed = [file for file, digest in self.base_text.items() if self.preprocessed(file) != digest]
            return self.runner(needed(mutant, changed)), len(changed)
        finally:
            write(path, original)


def needed(mutant, changed):
    """A coefficient reaches the test of the functions by one file; the ops get theirs from the same header."""
    if mutant.name.startswith("BI_FN_"):
        return [file for file in changed if file.startswith("tests/golden_play_numeric")]
    return changed


def failures(runner, test):
    """The messages with which a named test fails; [] when it passes, None when it did not run."""
    suite, case, name = test.split("/")
    result = subprocess.run([runner, suite], env={**os.environ, "CK_RUN_CASE": case}, capture_output=True, text=True,
                            check=False, timeout=TEST_TIMEOUT_S)
    ran = re.search(r"Checks: ([1-9]\d*)", result.stdout)
    pattern = re.compile(rf"^\S+:\d+:F:{re.escape(case)}:{re.escape(name)}:\d+: (.*)$", re.M)
    return pattern.findall(result.stdout) if ran else None


# ---- the run -----------------------------------------------------------------------------------------------------------------

def check_baseline(tree, chosen):
    runner = tree.runner([])
    for test in sorted({t for m in chosen for t in m.tests}):
        found = failures(runner, test)
        if found is None or found:
            fail(f"{test} " + ("does not run" if found is None else f"fails already: {found[0]}"))


def row(mutant, value, caught):
    partner = f"; also `{mutant.partner[1].split('(', 1)[1]}`" if mutant.partner else ""
    return f"| {mutant.name} | {value_of(mutant.name)} | {value}{partner} | {'<br>'.join(caught)} | {mutant.why} |"


def run(tree, chosen):
    rows, survivors = [], []
    for mutant in chosen:
        value = mutant.value or last_bit_flipped(value_of(mutant.name))
        runner, n_changed = tree.mutate(mutant, value)
        found = {test: failures(runner, test) for test in mutant.tests}
        alive = [test for test, messages in found.items() if not messages]
        survivors += [f"{mutant.name} {value_of(mutant.name)} -> {value}: {test} passes" for test in alive]
        print(f"{mutant.name:24} {value_of(mutant.name):>16} -> {value:16} {'SURVIVES' if alive else 'caught'}  "
              f"({n_changed} files depend on it)", flush=True)
        for test, messages in found.items():
            print(f"    {test}: {messages[0][:150] if messages else 'passes'}", flush=True)
        rows.append(row(mutant, value, [t for t in mutant.tests if t not in alive]))
    return rows, survivors


def table_text(rows):
    head = ("# Contract mutants\n\nEach constant of `bi_contract.h` and each number of `numeric/bi_fn.h`, changed alone, and the "
            "named tests (suite/case/test)\nthat failed by a check of their own. Written by `tests/mutants/run.py --table`.\n\n"
            "| constant | value | mutant | tests that failed | note |\n| --- | --- | --- | --- | --- |\n")
    return head + "\n".join(rows) + "\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--table")
    args = parser.parse_args()
    chosen = [*mutants.CONTRACT, *mutants.FUNCTIONS]
    if args.quick or args.only:
        names = args.only or mutants.QUICK
        chosen = [m for m in chosen if m.name in names]
        if len(chosen) != len(names):
            fail(f"--only names what has no mutant: {sorted(set(names) - {m.name for m in chosen})}")
    if not args.table:
        check_complete()
    with tempfile.TemporaryDirectory(prefix="bitroll-mutants-") as scratch:
        tree = Tree(os.path.abspath(args.build), scratch, {t.split("/")[0] for m in chosen for t in m.tests})
        check_baseline(tree, chosen)
        rows, survivors = run(tree, chosen)
    if args.table:
        write(args.table, table_text(rows))
    if survivors:
        fail("mutants survive:\n  " + "\n  ".join(survivors))
    print(f"{len(chosen)} mutants, each caught by every test named for it")


if __name__ == "__main__":
    main()
