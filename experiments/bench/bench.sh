#!/usr/bin/env bash
# bench.sh: the recorded speeds. Prints "what,how,value,unit" and appends each with date and commit to
# experiments/bench/results/<cpu>.csv. Called by `./run bench` once build/ is made; quiet machines give better numbers.
set -euo pipefail
cd "$(dirname "$0")/../.."

BITROLL=build/bitroll
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

cpu=$(sed -n 's/^model name[[:space:]]*: //p' /proc/cpuinfo | head -n 1 | tr -cs 'A-Za-z0-9' '-' | sed 's/^-*//; s/-*$//')
results=experiments/bench/results/${cpu:-unknown}.csv
date=$(date -u +%Y-%m-%d)
commit=$(git rev-parse --short HEAD 2>/dev/null || echo none)
mkdir -p experiments/bench/results
[ -f "$results" ] || echo "date,commit,what,how,value,unit" >"$results"

record() {
    printf '%s\n' "$1"
    printf '%s,%s,%s\n' "$date" "$commit" "$1" >>"$results"
}

prompts() { # COUNT LENGTH VOCABULARY
    awk -v n="$1" -v low="$2" -v high="$2" -v vocab="$3" -v names=- -f tests/prompts.awk
}

tok_per_s() { tail -n 1 | sed -n 's/.*"tok_per_s": \([0-9.]*\).*/\1/p'; }

build/bench_chain | while IFS= read -r line; do record "$line,GMAC/s a core"; done

"$BITROLL" init --preset nano --seed 1 --out "$WORK/nano" >/dev/null
prompts 64 16 2304 >"$WORK/nano.jsonl"
speed=$("$BITROLL" generate --json --model "$WORK/nano" --prompts "$WORK/nano.jsonl" --max-new 64 --ignore-eos --max-seqs 64 \
    --out "$WORK/nano.h5" | tok_per_s)
record "nano_generate,64 sequences x 64 tokens $(nproc) threads,$speed,tok/s"

"$BITROLL" init --preset small --seed 1 --out "$WORK/small" >/dev/null
prompts 4 512 16384 >"$WORK/small.jsonl"
speed=$("$BITROLL" score --json --model "$WORK/small" --in "$WORK/small.jsonl" --out "$WORK/small.h5" | tok_per_s)
record "small_score,4 x 512 tokens $(nproc) threads,$speed,tok/s"
echo "appended to $results"
