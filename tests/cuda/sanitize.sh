#!/usr/bin/env bash
# sanitize.sh RUNNER [TOOL ...]: every suite of bitroll_cuda_tests under compute-sanitizer's memcheck, synccheck, initcheck and racecheck, but
# linear_table: up to 8,193 rows of cuBLASLt beside the tiles, whose kernels the suite linear has. initcheck sees no read of scratch that
# no kernel has written, since memory is cleared when it is taken and filled by the tests; such a read meets NaN and -1 instead.
# racecheck is slow: it takes a process for each case of a suite. It has to see every launch: where some are left out (--launch-count,
# --kernel-name-exclude), the tool itself breaks off with an internal error. Exit 1 when one reports something. SECONDS_EACH cuts one off that
# is slow under a tool [600], which counts as a report. JOBS at once [6]. SUITES [all of them].
#
# racecheck orders accesses by whole-block barriers; it follows neither mbarriers that another warp or an asynchronous copy arrives at nor,
# behind a barrier of part of a block, the whole-block barrier after it. What it reports of the pairs below is such a hand-over, read and
# judged; every other pair is an error.
#   nvjet_*                                cuBLASLt's kernels, in the self-test of the backend: tensor copies, barriers of a cluster
#   softmax -> mix, mix_wide               bi_attnres.cu: __syncthreads between them, named barriers before
#   copy16 -> ldmatrix2, ldmatrix4         bi_experts_pipe.cuh: cp.async.mbarrier.arrive on `full`; bi_experts_wide.cuh: all copies awaited, a
#                                          barrier of the copying warps, one arrival on `full`; both back over `empty`
#   copy_block -> fp4_load                 bi_experts_wide.cuh: `full` counts the bytes of a bulk copy; back over `empty`
#   kda_rows8 -> kda_load_keys             bi_kda_prefill.cu: `full`
#   kda_run_stage -> kda_prepare           bi_kda_prefill.cu: `empty`
#   fused_join, fused_score -> fused_value bi_attn_fused.cuh: `m_full`, `sum_full`; back over `p_empty`
#   fused_join -> fused_join               bi_attn_fused.cuh: m of the block before, `m_full`
set -euo pipefail

die() {
    echo "sanitize.sh: $*" >&2
    exit 2
}
runner=${1:-}
if ! [ -f "$runner" ] || ! [ -x "$runner" ]; then die "'$runner': expected RUNNER, the program bitroll_cuda_tests"; fi
shift
for tool in "$@"; do
    case $tool in memcheck | synccheck | initcheck | racecheck) ;; *) die "there is no tool '$tool'" ;; esac
done
[ $# -gt 0 ] || set -- memcheck synccheck initcheck racecheck
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

# The pairs of one report that are not in the list above.
unknown_pairs() {
    awk '
        function judge() {
            if (pair != "" && pair !~ /nvjet_/ && pair !~ /softmax.* mix/ && pair !~ /copy16.*ldmatrix/ &&
                pair !~ /ldmatrix.*copy16/ && pair !~ /copy_block.*fp4_load/ &&
                pair !~ /kda_rows8.*kda_load_keys/ && pair !~ /kda_run_stage.*kda_prepare/ && pair !~ /fused_(join|score).*fused_value/ &&
                pair !~ /fused_join.*fused_join/)
                print pair
            pair = ""
        }
        /Race reported/ { judge(); pair = $0; next }
        /^=========     and/ { pair = pair " " $0; next }
        { judge() }
        END { judge() }' "$1"
}

one() { # TOOL SUITE [CASE]
    local tool=$1 suite=$2 name=$2${3:+ $3} start=$SECONDS status=0 found='' log=$logs/$2.${3:-all}.$1 options=(--print-limit 20 --error-exitcode 9)
    [ "$tool" != racecheck ] || options=(--print-limit 100000 --racecheck-report analysis)
    [ -z "${3:-}" ] || export CK_RUN_CASE=$3
    timeout "${SECONDS_EACH:-600}" compute-sanitizer --tool "$tool" "${options[@]}" "$runner" "$suite" >"$log" 2>&1 || status=$?
    [ "$tool" != racecheck ] || found=$(unknown_pairs "$log")
    printf '%-10s %-40s exit %d, %4d s, %s%s\n' "$tool" "$name" "$status" $((SECONDS - start)) "$(grep -h SUMMARY "$log" | tail -n 1 | tr -d =)" \
        "${found:+; unknown pairs:}"
    [ -z "$found" ] || printf '%s\n' "$found" | head -n 20
    [ "$status" -eq 0 ] || grep -v 'Host Frame\|Race reported\|     and\|^========= *$' "$log" | tail -n 30
    [ "$status" -eq 0 ] && [ -z "$found" ]
}
export -f one unknown_pairs
export runner logs BITROLL_GPU_RUNS=1
here=$(cd "$(dirname "$0")" && pwd)

cases_of() { # of a suite, by the function that makes it
    cat "$here"/cuda_*.c | awk -v suite="Suite *cuda_$1_suite(void) {" '
        $0 == suite { is_in = 1 }
        is_in && /CUDA_CASE/ { gsub(/.*\(suite, |[,)].*/, ""); print }
        /^}/ { is_in = 0 }'
}

suites=${SUITES:-$(sed -n 's/^SUITE(\(.*\))$/\1/p' "$here/cuda_suites.h" | grep -vx linear_table)}
for suite in $suites; do
    [ -n "$(cases_of "$suite")" ] || die "there is no suite '$suite': expected SUITES, names out of cuda_suites.h"
done
command -v compute-sanitizer >/dev/null || die 'there is no compute-sanitizer: expected that of a CUDA toolkit in the path'
for tool in "$@"; do
    for suite in $suites; do
        [ "$tool" != racecheck ] && printf '%s %s\n' "$tool" "$suite" && continue
        cases_of "$suite" | sed "s/^/$tool $suite /"
    done
done | xargs -P "${JOBS:-6}" -L 1 bash -c 'one "$@"' one || exit 1
