#!/bin/sh
# golden_again: GOLDEN_WRITE GOLDEN_DIR. The committed vectors are what their writer makes: writes them again beside a copy
# of the folder and compares. MANIFEST is left out, since it names the instruction sets of the processor that wrote it.
set -eu
again=$(mktemp -d)
trap 'rm -rf "$again"' EXIT
cp -r "$2/." "$again"
rm -r "$again/ops" "$again/inspect.txt"
"$1" "$again"
diff -r -x MANIFEST "$2" "$again"
