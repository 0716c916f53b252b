#!/usr/bin/env bash
# slice.sh BITROLL [--oracle]: slice-full, four layers at the full width of K3.1 with 896 experts each, on one GPU.
#
# 288 sequences: 24 samples of each of 12 prompts from 64 to 4,096 tokens, base and a rank-32 adapter in turn. Rolled out with 256 and with
# 64 sequences in a step, in two orders of arrival: one digest. 24 of them again with 8 and with 1 in a step, in two other orders: one
# digest, and sequence by sequence the bits of the large rollout. Scored as the trainer does: the same bits. How many sequences a step
# really held is asked of the engine each time.
#
# With --oracle only this: two short sequences from the GPU, 208 log-probs, computed again by the oracle, tokens drawn again; that takes
# 90 GB of host memory and some minutes of 16 cores.
#
# PRESET=pico BACKEND=oracle LONGEST=600: the same schedules without a GPU.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
die() {
    echo "slice.sh: $*" >&2
    exit 2
}
bitroll=${1:-}
if ! [ -f "$bitroll" ] || ! [ -x "$bitroll" ]; then die "'$bitroll': expected BITROLL, the program"; fi
[ "${2:---oracle}" = --oracle ] || die "'$2': expected --oracle or nothing"
preset=${PRESET:-slice-full} backend=${BACKEND:-cuda} longest=${LONGEST:-4096}
vocab=$([ "$preset" = slice-full ] && echo 163840 || echo 250)
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
fail() {
    echo "slice.sh: $*" >&2
    exit 1
}

make_prompts() { # N SHORTEST LONGEST
    awk -v n="$1" -v low="$2" -v high="$3" -v vocab="$vocab" -v names='- red' -f "$here/../prompts.awk"
}

# generate NAME SAMPLES PEAK OPTION...: $dir/NAME.jsonl into $dir/NAME.h5, with PEAK sequences in the largest step; equal digests for one NAME.
# Pages: 12 prompts of 65, and of each sequence that runs the page it writes and the next.
declare -A wanted
generate() {
    local name=$1 samples=$2 peak=$3 said digest seconds
    shift 3
    said=$("$bitroll" generate "${model[@]}" --backend "$backend" --prompts "$dir/$name.jsonl" --n "$samples" --max-new 16 --ignore-eos --seed 5 \
        --kv-pages 2048 --json --out "$dir/$name.h5" --max-seqs "$peak" "$@" | tail -n 1) || fail "generate $name: $said"
    digest=$(sed -n 's/.*"logprob_digest": "\([0-9a-f]*\)".*/\1/p' <<<"$said")
    seconds=$(sed -n 's/.*"seconds": \([0-9.]*\).*/\1/p' <<<"$said")
    printf '%s generate %s, %3d sequences in a step, %-40s %6.1f s  %s\n' "$preset" "$name" "$peak" "$*" "$seconds" "$digest"
    [[ $said == *"\"peak_seqs\": $peak,"* ]] || fail "the largest step held another number of sequences: $said"
    [ "${digest:-none}" = "${wanted[$name]:=$digest}" ] || fail "another digest: wanted ${wanted[$name]}"
}

"$bitroll" init --preset "$preset" --seed 1 --out "$dir/model" --lora-rank 32 --lora-seed 1 --lora-out "$dir/red" >/dev/null
model=(--model "$dir/model" --adapter "red=$dir/red")
if [ "${2:-}" = --oracle ]; then
    make_prompts 2 6 11 >"$dir/short.jsonl"
    "$bitroll" generate "${model[@]}" --backend "$backend" --prompts "$dir/short.jsonl" --max-new 104 --ignore-eos --seed 6 --kv-pages 100 \
        --out "$dir/short.h5" >/dev/null
    "$bitroll" verify "$dir/short.h5" "${model[@]}" --backend oracle --recompute 2 | tail -n 2
    exit
fi

make_prompts 12 64 "$longest" >"$dir/all.jsonl"
head -n 6 "$dir/all.jsonl" >"$dir/few.jsonl"
generate all 24 256 --chunk-tokens 4096
generate all 24 64 --chunk-tokens 1024 --shuffle-seed 1
generate few 4 8 --shuffle-seed 2
generate few 4 1 --chunk-tokens 2048 --shuffle-seed 3
# Files of two runs: parity joins them as foreign ones, and says that the larger one holds more.
"$bitroll" parity --foreign "$dir/all.h5" "$dir/few.h5" >"$dir/said.txt" 2>&1 || true
for line in '^sequences   24 joined, 264 only in the first file, 0 only in the second' '^parity: 0 of 384 log-probs differ, KL 0$'; do
    grep -q "$line" "$dir/said.txt" || fail "few sequences against all: $(cat "$dir/said.txt")"
done
echo "$preset: the 24 sequences have the same log-probs among all 288"
"$bitroll" score "${model[@]}" --backend "$backend" --in "$dir/all.h5" --out "$dir/scored.h5" --pack-tokens 8192 >/dev/null
"$bitroll" parity "$dir/all.h5" "$dir/scored.h5" | tail -n 1
