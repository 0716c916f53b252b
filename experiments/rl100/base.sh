#!/usr/bin/env bash
# base.sh OUT [BACKEND]: bases of the arithmetic runs, several at once on one GPU, each in OUT/NAME with its log. The one to keep has a
# sampled accuracy of 0.30 to 0.45 and the greatest greedy one. PYTHON names the interpreter with torch; BITROLL and BITROLL_LIBRARY,
# where they are set, the command and the library.
set -euo pipefail
out=${1:?base.sh OUT [BACKEND]}
backend=${2:-cuda}
seconds=${SECONDS_MAX:-230} # a base that takes longer ends there, with what it kept last
die() {
    printf 'base.sh: %s\n' "$*" >&2
    exit 2
}
case $backend in oracle | cuda) ;; *) die "BACKEND is '$backend': expected cuda or oracle" ;; esac
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=$here/../../trainer_bridge${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
python=${PYTHON:-$("$here/../../trainer_bridge/environment.sh")}
if [ "$backend" = cuda ]; then
    status=0
    "$python" -W ignore -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)' || status=$?
    [ "$status" -ne 3 ] || die 'torch finds no GPU on this machine: base.sh OUT oracle runs without one'
    [ "$status" -eq 0 ] || die "$python ended with $status when it imported torch: expected PYTHON, an interpreter with torch"
fi
mkdir -p "$out"

base() { # base NAME OPTION...
    local name=$1
    shift
    timeout "$seconds" "$python" -m bitroll.rl.train_base --backend "$backend" --out "$out/$name" --prompts 256 "$@" >"$out/$name.log" 2>&1 || true
    rm -rf "$out/$name/random" "$out/$name/model" "$out/$name/model.part" # bitroll.rl.base_model makes the folder again
}

base a --seed 1 --rank 32 --rows 2048 --steps 400 --lr 2e-3 &
base b --seed 1 --rank 32 --rows 2048 --steps 800 --lr 2e-3 &
base c --seed 1 --rank 64 --rows 2048 --steps 600 --lr 1e-3 &
base d --seed 1 --rank 64 --rows 2048 --steps 600 --lr 2e-3 --noise 0.8 &
base e --seed 2 --rank 64 --rows 4096 --steps 500 --lr 2e-3 &
base f --seed 2 --rank 64 --rows 2048 --steps 800 --lr 2e-3 --noise 0.8 --clean 0 &
wait
tail -n 3 "$out"/*/log.csv
