#!/usr/bin/env bash
# end_to_end.sh BITROLL [PRESET...]: the same rollout and the same scoring on both backends, on a machine with a GPU.
#
# For every preset: a rollout of mixed adapters made by the oracle; the same on CUDA under several schedules (batch size, chunks,
# preemption, no prefix cache, order of arrival), each of which must give the same log-prob digest, and the one of the oracle's own schedule
# the same chain, which holds entropies and alternatives too; both scored on both backends; the hashes of all stages and the choices of
# experts and positions, of the scoring forward and of the paged engine, equal on both; the CUDA rollout verified by the oracle, its tokens
# drawn again. PRESET+recipe: weights made where they are used, which must give the log-probs of their files. Exit 1 at the first difference.
# BACKEND=oracle: a dry run without a GPU.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
bitroll=${1:-}
if ! [ -f "$bitroll" ] || ! [ -x "$bitroll" ]; then
    echo "end_to_end.sh: '$bitroll': expected BITROLL, the program" >&2
    exit 2
fi
shift
presets=("$@")
[ $# -gt 0 ] || presets=(pico nano nano+recipe k3-nano kimi-linear-nano mini small)
gpu=${BACKEND:-cuda}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

digest_of() { sed -n 's/.*"logprob_digest": "\([0-9a-f]*\)".*/\1/p' "$1" | tail -n 1; }

generate() {
    local name=$1 out=$2
    shift 2
    "$bitroll" generate --model "$dir/$name" --adapter "red=$dir/$name-red" --adapter "blue=$dir/$name-blue" --prompts "$dir/$name.jsonl" \
        --max-new 24 --n 2 --ignore-eos --entropy --top-logprobs 3 --seed 5 --out "$dir/$out.h5" --json "$@" >"$dir/$out.txt"
}

score() {
    local name=$1 in=$2 out=$3
    shift 3
    "$bitroll" score --model "$dir/$name" --adapter "red=$dir/$name-red" --adapter "blue=$dir/$name-blue" --in "$dir/$in.h5" \
        --out "$dir/$out.h5" --json "$@" >"$dir/$out.txt"
}

# The last link over what a file holds, in its order: the same schedule gives the same order.
chain_of() { "$bitroll" verify "$dir/$1.h5" | sed -n 's/^chain .* 0 faults, last link //p'; }

# dump NAME OUT OPTION...: of the oracle's rollout
dump() {
    local name=$1 out=$2
    shift 2
    "$bitroll" dump --stage-hash --choices --model "$dir/$name" --adapter "red=$dir/$name-red" --adapter "blue=$dir/$name-blue" \
        --in "$dir/oracle.h5" "$@" >"$dir/$out.stages"
}

# Stages of NAME on both backends and in both forms of the forward.
check_stages() {
    local name=$1 way
    shift
    dump "$name" wanted --backend oracle "$@"
    for way in score generate; do
        [ "$way" = score ] || dump "$name" oracle --backend oracle --as "$way" --chunk-tokens 100 "$@"
        [ "$way" = score ] || cmp "$dir/wanted.stages" "$dir/oracle.stages"
        dump "$name" found --backend "$gpu" --as "$way" "$@"
        diff "$dir/wanted.stages" "$dir/found.stages" >"$dir/stages.diff" || { head -n 4 "$dir/stages.diff" >&2; exit 1; }
    done
    printf '%-18s %-28s %s lines equal\n' "$name" "dump, both forms" "$(wc -l <"$dir/wanted.stages")"
}

expect() {
    local what=$1 found=$2 wanted=$3
    [ -n "$wanted" ] && [ "$found" = "$wanted" ] && return
    printf '%s: digest %s, wanted %s\n' "$what" "$found" "$wanted" >&2
    exit 1
}

declare -A of_preset
check_preset() {
    local name=$1 vocab=2000 n=9 longest=180 wanted scored chain
    local preset=${name%+recipe} recipe=() stages=()
    case $preset in
    pico) vocab=256 ;;
    mini | small) n=6 longest=900 stages=(--seq 3) ;; # a line a stage of a row: of one sequence
    esac
    [ "$preset" = "$name" ] || recipe=(--recipe)
    "$bitroll" init --preset "$preset" "${recipe[@]}" --seed 1 --out "$dir/$name" --lora-rank 32 --lora-seed 1 --lora-out "$dir/$name-red" >/dev/null
    "$bitroll" init --lora-only --out "$dir/$name" --lora-rank 8 --lora-seed 2 --lora-out "$dir/$name-blue" >/dev/null
    awk -v n="$n" -v low=1 -v high="$longest" -v vocab="$vocab" -v names='- red blue' -v top=1 -f "$here/../prompts.awk" >"$dir/$name.jsonl"
    generate "$name" oracle --backend oracle
    wanted=$(digest_of "$dir/oracle.txt")
    chain=$(chain_of oracle)
    printf '%-18s %-28s %s\n' "$name" "generate, oracle" "$wanted"
    expect "$name, generate, against files" "$wanted" "${of_preset[$preset]:=$wanted}"
    local schedule
    for schedule in "--max-seqs 64" "--max-seqs 1" "--max-seqs 5 --chunk-tokens 7" "--chunk-tokens 64 --preempt-every 9" \
        "--no-prefix-cache --chunk-tokens 700" "--shuffle-seed 3 --max-seqs 8 --state-every 64"; do
        # shellcheck disable=SC2086
        generate "$name" cuda --backend "$gpu" $schedule
        expect "$name, generate on CUDA, $schedule" "$(digest_of "$dir/cuda.txt")" "$wanted"
        [ "$schedule" != "--max-seqs 64" ] || expect "$name, chain of the rollout on CUDA" "$(chain_of cuda)" "$chain"
        printf '%-18s %-28s %s\n' "$name" "cuda $schedule" "equal"
    done
    score "$name" oracle scored-oracle --backend oracle
    scored=$(digest_of "$dir/scored-oracle.txt")
    for schedule in "--pack-tokens 8192" "--pack-tokens 1000"; do
        # shellcheck disable=SC2086
        score "$name" cuda scored-cuda --backend "$gpu" $schedule
        expect "$name, score on CUDA, $schedule" "$(digest_of "$dir/scored-cuda.txt")" "$scored"
    done
    check_stages "$name" "${stages[@]}"
    "$bitroll" parity "$dir/cuda.h5" "$dir/scored-oracle.h5" >"$dir/parity.txt"
    "$bitroll" verify "$dir/cuda.h5" --model "$dir/$name" --adapter "red=$dir/$name-red" --adapter "blue=$dir/$name-blue" --recompute 4 \
        --backend oracle >"$dir/verify.txt"
    printf '%-18s %-28s %s\n' "$name" "score, parity, verify" "$(tail -n 1 "$dir/parity.txt")"
}

for preset in "${presets[@]}"; do
    check_preset "$preset"
done
echo "end to end: ${#presets[@]} presets, equal bits on both backends"
