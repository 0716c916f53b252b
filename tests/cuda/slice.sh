#!/usr/bin/env bash
# slice.sh BITROLL [--oracle]: slice-full, four layers at the full width of K3.1 with 896 experts each, on one GPU.
#
# A rollout of prompts from 64 to 4,096 tokens, base and a rank-32 adapter mixed, at 1, 8, 64 and 256 sequences a step and in three
# orders of arrival: one digest. Scored as the trainer does: the same digest. With --oracle two short sequences, 208 log-probs,
# are computed again by the oracle, tokens drawn again; that takes 90 GB of host memory and some minutes of 16 cores.
set -euo pipefail

bitroll=$1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
digest_of() { sed -n 's/.*"logprob_digest": "\([0-9a-f]*\)".*/\1/p' "$1" | tail -n 1; }

# make_prompts N SHORTEST LONGEST
make_prompts() {
    awk -v n="$1" -v low="$2" -v high="$3" 'BEGIN { srand(11); for (i = 0; i < n; i++) { len = i == 0 ? low : i == 1 ? high : low + int(rand() * (high - low));
        printf "{\"prompt\": ["; for (t = 0; t < len; t++) printf "%s%d", t ? ", " : "", 3 + int(rand() * 163000);
        printf "], \"uid\": \"p%d\"%s}\n", i, i % 2 ? ", \"adapter\": \"red\"" : "" } }'
}

"$bitroll" init --preset slice-full --seed 1 --out "$dir/slice" --lora-rank 32 --lora-seed 1 --lora-out "$dir/red" >/dev/null
model=(--model "$dir/slice" --adapter "red=$dir/red")
make_prompts 12 64 4096 >"$dir/prompts.jsonl"
wanted=
for schedule in "--max-seqs 256 --chunk-tokens 4096" "--max-seqs 64 --shuffle-seed 1 --chunk-tokens 1024" "--max-seqs 8 --shuffle-seed 2" \
    "--max-seqs 1 --shuffle-seed 3 --chunk-tokens 2048"; do
    # shellcheck disable=SC2086
    "$bitroll" generate "${model[@]}" --backend cuda --prompts "$dir/prompts.jsonl" --max-new 16 --ignore-eos --seed 5 --kv-pages 1200 --json \
        --out "$dir/rollout.h5" $schedule >"$dir/said.txt"
    found=$(digest_of "$dir/said.txt")
    printf 'slice-full generate %-48s %s\n' "$schedule" "$found"
    [ -n "$found" ] && [ "$found" = "${wanted:=$found}" ] || { echo "another digest" >&2; exit 1; }
done
"$bitroll" score "${model[@]}" --backend cuda --in "$dir/rollout.h5" --out "$dir/scored.h5" --pack-tokens 8192 --json >"$dir/said.txt"
"$bitroll" parity "$dir/rollout.h5" "$dir/scored.h5" | tail -n 1
if [ "${2:-}" = --oracle ]; then
    make_prompts 2 6 11 >"$dir/short.jsonl"
    "$bitroll" generate "${model[@]}" --backend cuda --prompts "$dir/short.jsonl" --max-new 104 --ignore-eos --seed 6 --kv-pages 100 \
        --out "$dir/short.h5" >/dev/null
    "$bitroll" verify "$dir/short.h5" "${model[@]}" --backend oracle --recompute 2 | tail -n 2
fi
