#!/usr/bin/env bash
# rl100.sh OUT [NAME:SEED..]: training runs, all at once on one GPU, each in OUT/NAME_seedSEED with its log. Names are those of the YAML files
# beside this script. Rows, ledger and checkpoints are written as the runs go; what stands when one is cut off is kept. In the end OUT/results
# has the rows, OUT/report the plots, and every ledger has been verified.
#   PYTHON    interpreter with torch and megatron-core     BUILD   folder of bitroll, bitroll-worker and the two libraries [the tree's]
#   BASE      checkpoint of the arithmetic runs            SMALL   checkpoint of the preset small [made]
#   BACKEND   cuda or oracle [cuda]                        STEPS   of every run [as its file says]
#   MORE      options of every trainer, such as --resume
# Nothing is compiled here. Status 2: a run that cannot be meant, said before any starts. 1: a run failed, its name and why are the last lines. A
# control arm (M1 to M3) has failed when it did not come to its last step, or when its ledger shows no difference after three steps.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
die() {
    printf 'rl100: %s\n' "$*" >&2
    exit 2
}

form='^[A-Za-z0-9_]+:(0|[1-9][0-9]{0,9})$'
case ${1:-} in '' | -*) die 'expected OUT [NAME:SEED..]' ;; esac
[[ ! $1 =~ $form ]] || die "'$1': expected OUT, a folder, before the runs"
out=$1
shift
[ $# -gt 0 ] || set -- E:1 E:2 E:3 M1:1 M2:1 M3:1 ragged:1 small600:1
seen=' '
for run in "$@"; do
    if ! [[ $run =~ $form ]] || ((${run#*:} >= 1 << 31)); then
        die "'$run': expected NAME:SEED, a name and a whole number below 2^31, such as E:1"
    fi
    [ -e "$here/${run%:*}.yaml" ] || die "'$run': there is no ${run%:*}.yaml: expected one of $(cd "$here" && echo *.yaml)"
    case $seen in *" $run "*) die "'$run' is named twice: two runs cannot share a folder" ;; esac
    seen+="$run "
done
build=${BUILD:-$here/../../build}
backend=${BACKEND:-cuda}
case $backend in oracle | cuda) ;; *) die "BACKEND is '$backend': expected cuda or oracle" ;; esac
export PYTHONPATH=$here/../../trainer_bridge${PYTHONPATH:+:$PYTHONPATH} BITROLL=$build/bitroll BITROLL_LIBRARY=$build/libbitroll.so
python=${PYTHON:-$("$here/../../trainer_bridge/environment.sh")}
if [ "$backend" = cuda ]; then
    status=0
    "$python" -W ignore -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)' || status=$?
    [ "$status" -ne 3 ] || die 'BACKEND is cuda, and torch finds no GPU on this machine: BACKEND=oracle runs without one'
    [ "$status" -eq 0 ] || die "$python ended with $status when it imported torch: expected PYTHON, an interpreter with torch"
fi
mkdir -p "$out/results"

base=${BASE:-$out/base}
[ -e "$base/config.json" ] || "$python" -m bitroll.rl.base_model --out "$base"
case " $* " in
*' M1:'*) [ -e "$out/base-bf16/config.json" ] || "$python" -m bitroll.rl.expand --model "$base" --out "$out/base-bf16" ;;
esac
small=${SMALL:-$out/small}
case " $* " in
*' small600:'*) [ -e "$small/config.json" ] || "$BITROLL" init --preset small --seed 1 --out "$small" ;;
esac

one() { # one NAME SEED: worker and trainer of one run
    local name=$1 seed=$2 model=$base rollout=$base
    [ "$name" = small600 ] && model=$small rollout=$small
    [ "$name" = M1 ] && rollout=$out/base-bf16
    # shellcheck disable=SC2086 # MORE is a list of options
    "$here/../../trainer_bridge/launch.sh" "$build/bitroll-worker" --model "$rollout" --adapter policy= --swap-rank 32 --swap-alpha 64 \
        --backend "$backend" --max-seqs 256 --chunk-tokens 1024 --requests 2048 -- "$python" -W ignore -m bitroll.rl.train \
        --config "$here/$name.yaml" --backend "$backend" --seed "$seed" ${STEPS:+--steps "$STEPS"} --model "$model" --rollout-model "$rollout" \
        --rollout mpi:0 --out "$out/${name}_seed$seed" ${MORE:-}
}

# fault NAME STATUS VERIFY: in WHY what is wrong with a run that ended with STATUS, whose ledger's verification ended with VERIFY; else empty.
fault() {
    local folder=$out/$1
    WHY=
    case $1 in
    M[123]_*) # may miss a bar; from the third step on each of them differs
        if [ "$2" -gt 1 ] || [ ! -e "$folder/adapter" ]; then
            WHY="did not come to its last step: status $2, see $folder/log.txt"
        elif [ "$3" -gt 1 ]; then
            WHY="bitroll verify ended with $3, see $folder/verify.txt"
        elif [ "$3" -eq 0 ] && [ "$(wc -l <"$folder/metrics.csv")" -gt 3 ]; then
            WHY="a control arm whose ledger shows no difference, see $folder/verify.txt"
        fi
        ;;
    *)
        if [ "$2" -ne 0 ]; then
            WHY="status $2, see $folder/log.txt"
        elif [ "$3" -ne 0 ]; then
            WHY="bitroll verify ended with $3, see $folder/verify.txt"
        fi
        ;;
    esac
}

jobs=()
for run in "$@"; do
    mkdir -p "$out/${run%:*}_seed${run#*:}"
    one "${run%:*}" "${run#*:}" >"$out/${run%:*}_seed${run#*:}/log.txt" 2>&1 &
    jobs+=("$!")
done

folders=() failed=()
for run in "$@"; do
    name=${run%:*}_seed${run#*:} status=0 verified=0
    wait "${jobs[0]}" || status=$?
    jobs=("${jobs[@]:1}")
    printf '%-16s %s\n' "$name" "$(tail -n 1 "$out/$name/log.txt")"
    "$BITROLL" verify "$out/$name/ledger.h5" >"$out/$name/verify.txt" 2>&1 || verified=$?
    fault "$name" "$status" "$verified"
    [ -z "$WHY" ] || failed+=("$name: $WHY")
    [ -e "$out/$name/metrics.csv" ] || continue
    cp "$out/$name/metrics.csv" "$out/results/$name.csv"
    folders+=("$out/$name")
done
[ ${#folders[@]} -eq 0 ] || "$python" -m bitroll.rl.report "${folders[@]}" --out "$out/report" || failed+=("report: not written")
[ ${#failed[@]} -eq 0 ] || {
    printf 'rl100: failed: %s\n' "${failed[@]}" >&2
    exit 1
}
