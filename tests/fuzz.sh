#!/usr/bin/env bash
# fuzz.sh TARGET SEEDS [SECONDS]: runs a libFuzzer target from its seeds, in a folder of its own. Finds are written to a temporary
# folder and lost: a run from the same seeds of a fixed budget is a test, not a campaign. What breaks stays in fuzz-NAME-*.
set -euo pipefail
target=$1 seeds=$2 seconds=${3:-20}
[ "${BITROLL_TEST_LONG:-0}" != 1 ] || seconds=600
[ -n "$(ls -A "$seeds")" ] || {
    echo "fuzz.sh: no seeds in $seeds" >&2
    exit 2
}
corpus=$(mktemp -d)
trap 'rm -rf "$corpus"' EXIT
"$target" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -print_final_stats=1 \
    -artifact_prefix="./$(basename "$target")-" "$corpus" "$seeds"
