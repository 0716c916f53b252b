#!/usr/bin/env bash
# sanitize.sh RUNNER [TOOL ...]: every suite of bitroll_cuda_tests under compute-sanitizer's memcheck, synccheck, initcheck and racecheck, but
# linear_table: up to 8,193 rows of cuBLASLt beside the tiles, whose kernels the suite linear has. initcheck sees no read of scratch that
# no kernel has written, since memory is cleared when it is taken and filled by the tests; such a read meets NaN and -1 instead.
# racecheck is slow: it takes a process for each case of a suite. Its tools of CUDA 13.0 and 13.5 have been run; where launches are left out
# (--launch-count, --kernel-name-exclude), that of 13.0 breaks off with an internal error. Exit 1 when one reports something.
# SECONDS_EACH cuts one off that is slow under a tool [600], which counts as a report. JOBS at once [6]. SUITES [all of them].
# CASES: those of racecheck, a pattern of names [all of them]. LOGS: a folder that keeps what the tools wrote.
# NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS, of the tool: the hazards of a process that racecheck looks at [10^9].
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
if [ -n "${LOGS:-}" ]; then
    mkdir -p "$LOGS"
    logs=$LOGS
else
    logs=$(mktemp -d)
    trap 'rm -rf "$logs"' EXIT
fi

# racecheck orders accesses by whole-block barriers; it follows neither mbarriers that another warp or an asynchronous copy arrives at nor,
# behind a barrier of part of a block, the whole-block barrier after it. What it reports of these pairs is such a hand-over, read and judged:
# where the first access is, where the second is, both as whole-word patterns, and what orders them. Every other pair is an error. In a ring
# of stages a reader waits for `full`, behind which the writer's stores and awaited copies are, and a writer for `empty`.
known_pairs() {
    cat <<'PAIRS'
nvjet_.*                              nvjet_.*                              cuBLASLt's kernels: tensor copies, barriers of a cluster
softmax                               mix|mix_wide                          bi_attnres.cu: __syncthreads between them, named barriers before
copy16|feed_rows                      ldmatrix[24]                          bi_experts_pipe.cuh, bi_experts_wide.cuh: `full`
ldmatrix[24]                          copy16|feed_rows                      `empty`
copy_block                            fp4_load                              bi_experts_wide.cuh: `full`, which counts the bytes of a bulk copy
copy16                                fp4_load                              bi_experts_wide.cuh: `full` of the stage of an adapter, a turn before
kda_rows8|kda_prepare                 kda_load_keys|kda_run_stage|bi_widen  bi_kda_prefill.cu: `full`; a column past the last reads beta for v
kda_load_keys|kda_run_stage|bi_widen  kda_copy16|kda_rows8|kda_prepare      `empty`
fused_join|fused_score                fused_value                           bi_attn_fused.cuh: `m_full`, `sum_full`
fused_join                            fused_join                            bi_attn_fused.cuh: m of the block before, `m_full`
iwide_load                            iwide_keys|index_score_wide           bi_index_score_wide.cuh: `full`, which counts the bytes of a bulk copy
PAIRS
}

# What a tool says that nobody has judged: pairs that are not among them, sentences of its own, as that something was left out, and a summary
# that is absent or counts more than was reported.
unjudged() {
    known_pairs | awk '
        function place(line) { # the function of an access
            if (!match(line, / access at /))
                return "?"
            line = substr(line, RSTART + RLENGTH)
            sub(/^void /, "", line)
            sub(/[(<+].*/, "", line)
            return line == "" ? "?" : line
        }
        function judge(to,  i) {
            for (i = 1; i <= n; i++)
                if (from ~ first[i] && to ~ second[i])
                    return
            count[from " -> " to]++
        }
        function close_report() {
            if (is_open && !n_second)
                judge("?")
            is_open = n_second = 0
        }
        NR == FNR { first[NR] = "^(" $1 ")$"; second[NR] = "^(" $2 ")$"; n = NR; next }
        !/^=========/ { next }
        /Race reported/ { close_report(); is_open = 1; n_report++; from = place($0); next }
        /^=========     and/ && is_open { n_second++; judge(place($0)); next }
        { close_report() }
        /^========= COMPUTE-SANITIZER$/ || /^=========( *$|     )/ { next }
        / SUMMARY: / { n_summary++; n_summed += $4; next }
        { n_report++; print "    " substr($0, 11) }
        END {
            close_report()
            for (pair in count)
                print "    " pair ", " count[pair] " times"
            if (!n_summary)
                print "    no summary"
            else if (n_summed > n_report)
                print "    " n_summed " reports, of which " n_report + 0 " were seen"
        }' - "$1"
}

one() { # TOOL SUITE [CASE]
    local tool=$1 suite=$2 name=$2${3:+ $3} start=$SECONDS status=0 found='' log=$logs/$2.${3:-all}.$1 options=(--print-limit 20 --error-exitcode 9)
    [ "$tool" != racecheck ] || options=(--print-limit 100000 --racecheck-report analysis)
    [ -z "${3:-}" ] || export CK_RUN_CASE=$3
    timeout "${SECONDS_EACH:-600}" compute-sanitizer --tool "$tool" "${options[@]}" "$runner" "$suite" >"$log" 2>&1 || status=$?
    found=$(unjudged "$log")
    printf '%-10s %-40s exit %d, %4d s, %s%s\n' "$tool" "$name" "$status" $((SECONDS - start)) "$(grep -h SUMMARY "$log" | tail -n 1 | tr -d =)" \
        "${found:+; not judged:}"
    [ -z "$found" ] || printf '%s\n' "$found"
    [ "$status" -eq 0 ] || grep -v 'Host Frame\|Race reported\|     and\|^========= *$' "$log" | tail -n 30
    [ "$status" -eq 0 ] && [ -z "$found" ]
}
export -f one known_pairs unjudged
export runner logs BITROLL_GPU_RUNS=1
# A case of experts has more hazards than the 10 million behind which the tool by itself leaves out the rest.
export NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS=${NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS:-1000000000}
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
work=$(for tool in "$@"; do
    for suite in $suites; do
        [ "$tool" != racecheck ] && printf '%s %s\n' "$tool" "$suite" && continue
        cases_of "$suite" | { grep -xE "${CASES:-.*}" || true; } | sed "s/^/$tool $suite /"
    done
done)
[ -n "$work" ] || die "no case of these suites is called '$CASES': expected CASES, a pattern of names"
command -v compute-sanitizer >/dev/null || die 'there is no compute-sanitizer: expected that of a CUDA toolkit in the path'
printf '%s\n' "$work" | xargs -P "${JOBS:-6}" -L 1 bash -c 'one "$@"' one || exit 1
