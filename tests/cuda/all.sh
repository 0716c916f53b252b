#!/usr/bin/env bash
# all.sh OUT [PART..]: what a machine with a GPU has to show of this tree, each part with its log in OUT and one line here; built or packed
# (pack.sh) before. Checks first, then times, one after the other. Exit 1 when a part failed; 2, before any starts, when there is no such part or
# nothing built.
#   suites     every kernel against the oracle                           ends      six presets end to end on both backends
#   slice      slice-full, 1 to 256 sequences a step                     swap      swaps, digests of live memory, streaming, and their times
#   slice-oracle  some of it computed again by the oracle: 90 GB of host memory, minutes of 16 cores
#   base       the committed base model, trained again                   train     GRPO with ragged and with long prompts
#   model      the trainer's model and its gradients beside the oracle; swaps and texts over the bridge, values by CUDA IPC
#   bench      every row beside its peer, with torch also forwards       sanitize  the four tools of compute-sanitizer
set -euo pipefail
tree=$(cd "$(dirname "$0")/../.." && pwd)
build=${BUILD:-$tree/build}
parts=(suites ends slice slice-oracle swap base train model bench sanitize)
die() {
    printf 'all.sh: %s\n' "$*" >&2
    exit 2
}

[ -n "${1:-}" ] || die 'expected OUT [PART..]'
out=$1
shift
[ $# -gt 0 ] || set -- "${parts[@]}"
for name in "$@"; do
    printf '%s\n' "${parts[@]}" | grep -qxFe "$name" || die "there is no part '$name': expected some of ${parts[*]}"
done
[ -f "$build/bitroll" ] || die "$build: no bitroll in it: expected BUILD, a folder that was built or packed"
commit=${COMMIT:-$(git -C "$tree" rev-parse --short HEAD 2>/dev/null || true)}
mkdir -p "$out"
out=$(cd "$out" && pwd) # parts run elsewhere

# Each suite in a process of its own, some at once: the oracle beside them takes most of the time.
suites() {
    sed -n 's/^SUITE(\(.*\))$/\1/p' "$tree/tests/cuda/cuda_suites.h" | RUNNER=$build/bitroll_cuda_tests xargs -P 5 -I{} bash -c '
        said=$("$RUNNER" {} 2>&1)
        status=$?
        printf "%s, exit %d\n" "$said" "$status"
        exit "$status"'
}

base() {
    local python
    python=${PYTHON:-$("$tree/trainer_bridge/environment.sh")}
    PYTHONPATH=$tree/trainer_bridge${PYTHONPATH:+:$PYTHONPATH} BITROLL=$build/bitroll BITROLL_LIBRARY=$build/libbitroll.so \
        "$python" -W ignore -m bitroll.rl.train_base --backend cuda --out "$out/base"
    cmp "$out/base/recipe.json" "$tree/experiments/rl100/base/recipe.json"
}

train() {
    "$tree/experiments/rl100/rl100.sh" "$out/rl100" ragged:1 small600:1 || true # five steps may miss a bar; what they must show follows
    for run in ragged small600; do
        tail -n 1 "$out/rl100/${run}_seed1/log.txt" | grep -q ' 0 of [1-9][0-9]* log-probs differ'
    done
}

model() {
    local python test
    python=${PYTHON:-$("$tree/trainer_bridge/environment.sh")}
    export BITROLL=$build/bitroll BITROLL_LIBRARY=$build/libbitroll.so BITROLL_BACKEND=${BITROLL_BACKEND:-cuda}
    for test in forward recompute gradient dump; do
        "$python" -W ignore "$tree/tests/trainer/test_$test.py"
    done
    "$python" -W ignore "$tree/tests/trainer/test_bridge.py" -k test_the_engines_bytes
}

# The forward passes that have a peer of their own, into the same table.
bench() {
    local python=${PYTHON:-python3} trainer table=(--csv "$out/bench.csv" --commit "$commit")
    (cd "$tree" && "$build/bitroll" bench "${table[@]}")
    if ! "$python" -c 'import torch' 2>/dev/null; then
        echo "no torch: kimi_linear and trainer.forward are left out"
        return
    fi
    "$python" "$tree/experiments/bench/kimi_linear_peer.py" --bitroll "$build/bitroll" "${table[@]}"
    trainer=${PYTHON:-$("$tree/trainer_bridge/environment.sh")}
    "$trainer" -W ignore "$tree/experiments/bench/megatron_forward.py" --bitroll "$build/bitroll" --library "$build/libbitroll.so" "${table[@]}"
}

part() {
    case $1 in
    suites) suites ;;
    ends) "$tree/tests/cuda/end_to_end.sh" "$build/bitroll" ;;
    slice) "$tree/tests/cuda/slice.sh" "$build/bitroll" ;;
    slice-oracle) "$tree/tests/cuda/slice.sh" "$build/bitroll" --oracle ;;
    swap) "$build/bitroll_cuda_swap" --csv "$out/swap.csv" --commit "$commit" ;;
    base) base ;;
    train) train ;;
    model) model ;;
    bench) bench ;;
    sanitize) "$tree/tests/cuda/sanitize.sh" "$build/bitroll_cuda_tests" ;;
    esac
}

failed=0
for name in "$@"; do
    start=$SECONDS
    set +e # behind || or in a condition, the part would go on after a command that failed
    (set -e; part "$name") >"$out/$name.log" 2>&1
    status=$?
    set -e
    printf '%-12s exit %d, %4d s: %s\n' "$name" "$status" $((SECONDS - start)) "$(tail -n 1 "$out/$name.log")"
    [ "$status" -eq 0 ] || failed=1
done
exit "$failed"
