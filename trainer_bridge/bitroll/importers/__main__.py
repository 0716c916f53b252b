"""Which importers there are; each is a program of its own."""
import os
import sys

from .. import importers, program

HERE = os.path.dirname(importers.__file__)
NAMES = sorted(name[:-3] for name in os.listdir(HERE) if name.endswith(".py") and name[0] != "_" and name != "dump_file.py")


def usage():
    lines = [line.strip() for line in importers.__doc__.splitlines()]
    return "\n".join(["usage: python -m bitroll.importers.NAME IN --out F.h5 ..., NAME one of",
                      *(f"  {line}" for line in lines if line.split(" ")[0] in NAMES), "python -m bitroll.importers.NAME --help tells more"])


def main(argv):
    if argv in (["--help"], ["-h"]):
        program.say(usage())
        return 0
    if argv and argv[0] in NAMES:
        return program.failed("importers", ValueError(f"{argv[0]} is a program of its own: python -m bitroll.importers.{argv[0]}"))
    print(usage() if not argv else f"importers: there is no importer '{argv[0]}'\n{usage()}", file=sys.stderr)
    return program.FAILED


if __name__ == "__main__":
    sys.exit(program.status_of("importers", lambda: main(sys.argv[1:])))
