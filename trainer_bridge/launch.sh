#!/usr/bin/env bash
# launch.sh [--grace SECONDS] WORKER OPTION.. -- TRAINER ARGUMENT..: a training run of two processes under one mpirun. Rank 0 is
# bitroll-worker, which gets --mpi 1 behind its options; rank 1 is any command that talks to mpi:0. The trainer's output comes through as
# it is written; the worker's is shown at the end when the run failed.
#
# Each rank is watched by a copy of this script, so that neither side waits for one that is gone: when the worker failed or the trainer
# has ended, the other has so many seconds [15] to find out by its own deadlines, and is killed then. mpirun itself kills nothing. When mpirun
# or the launcher is gone, however it was killed, both sides get SIGTERM, and are killed after as many seconds.
# Status: 0; 3 the trainer was killed from outside or went silent; 4 the protocol was broken; 5 the two run different models or adapters; 6 the worker
# failed or was killed; else the trainer's own, or the worker's when it could not start.
set -euo pipefail
GRACE=15
HOPELESS=124 # in place of the status of a side that this script has killed
FOLDER= # of this run: which process mpirun is, who watches each rank and how it ended, the worker's output
LAUNCHER= # as `running` tells processes apart
RUNNING=

die() {
    printf 'launch: %s\n' "$*" >&2
    exit 2
}

# running PID: has it not ended? A process that nobody waited for has. RUNNING then names it, not another one that gets its number later.
running() {
    local stat
    { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
    # shellcheck disable=SC2086 # fields, from the state on
    set -- "$1" ${stat##*) }
    [ "$2" != Z ] && [ "$2" != X ] && RUNNING=$1:${21}
}

# is_running NAME: as `running` named it.
is_running() {
    running "${1%:*}" && [ "$RUNNING" = "$1" ]
}

# note NAME TEXT: a file of FOLDER, whole from the first moment; without FOLDER nobody wants to know.
note() {
    { printf '%s\n' "$2" >"$FOLDER/$1.part" && mv "$FOLDER/$1.part" "$FOLDER/$1"; } 2>/dev/null || true
}

# noted NAME: what is noted, if anything is.
noted() {
    { read -r NOTED <"$FOLDER/$1"; } 2>/dev/null
}

# ---- one rank --------------------------------------------------------------------------------------------------------------

# The side that waits for the other in vain: the peer's status is in its file once it has ended.
is_over() {
    noted "$1" && { [ "$1" = trainer ] || [ "$NOTED" != 0 ]; }
}

# Nobody is left who started the run or waits for its end.
is_orphan() {
    ! is_running "$LAUNCHER" || { noted mpirun && ! is_running "$NOTED"; }
}

# watch ROLE PEER PID: waits for a child of this shell and notes how it ended.
watch() {
    local code=0 since="" killed="" gone=""
    trap '' HUP PIPE # mpirun, which has the other end of what is said here, may be gone
    ! running $$ || note "$1.watcher" "$RUNNING"
    while running "$3"; do
        if [ -z "$gone" ] && is_orphan; then
            gone='launcher or mpirun'
            since=$SECONDS
            kill -TERM "$3" 2>/dev/null || true
        elif [ -z "$since" ] && is_over "$2"; then
            gone=$2
            since=$SECONDS
        elif [ -n "$since" ] && [ $((SECONDS - since)) -ge "$GRACE" ]; then
            printf 'launch: the %s still ran %s s after the %s had ended: killed\n' "$1" "$GRACE" "$gone" >&2 || true
            kill -KILL "$3" 2>/dev/null || true
            killed=$HOPELESS
        fi
        sleep 0.1
    done
    wait "$3" || code=$?
    note "$1" "${killed:-$code}"
    if ! is_running "$LAUNCHER" && noted "$2"; then
        rm -rf "$FOLDER"
    fi
}

# Ends with 0 whatever happened: to mpirun anything else is a reason to kill the other rank.
as_rank() {
    local rank=${OMPI_COMM_WORLD_RANK:?} worker=()
    while [ "$1" != -- ]; do
        worker+=("$1")
        shift
    done
    shift
    if [ "$rank" = 0 ]; then
        "${worker[@]}" --mpi 1 --own-status >"$FOLDER/worker.log" 2>&1 &
        printf 'launch: rank 0 is the worker, pid %s: %s\n' "$!" "${worker[0]}"
        watch worker trainer "$!"
    else
        PYTHONUNBUFFERED=1 "$@" &
        printf 'launch: rank 1 is the trainer, pid %s: %s\n' "$!" "$1"
        watch trainer worker "$!"
    fi
}

# ---- the whole -------------------------------------------------------------------------------------------------------------

# status_of WORKER TRAINER
status_of() {
    if [ "$2" -gt 128 ]; then
        printf 3
    elif [ "$1" -gt 128 ] || [ "$1 $2" = "$HOPELESS 0" ]; then
        printf 6
    elif [ "$1" -ne 0 ] && [ "$1" -ne "$HOPELESS" ] && { [ "$1" -ne 3 ] || [ "$2" -eq 0 ] || [ "$2" -eq "$HOPELESS" ]; }; then
        printf '%s' "$1"
    else
        printf '%s' "$2"
    fi
}

launch() {
    local version btl=self,vader job role worker_code=137 trainer_code=137 status
    command -v mpirun >/dev/null || die "there is no mpirun"
    version=$(mpirun --version | head -n 1)
    case $version in
    *' 4.'*) ;;
    *) btl=self,sm ;;
    esac
    running $$
    FOLDER=$(mktemp -d)
    trap 'rm -rf "$FOLDER"' EXIT
    printf 'launch: %s: the worker is rank 0, the trainer rank 1\n' "$version"
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
        mpirun -n 2 --mca pml ob1 --mca btl "$btl" --oversubscribe --bind-to none --enable-recovery --quiet \
        "$0" --as-rank "$FOLDER" "$GRACE" "$RUNNING" "$@" </dev/null &
    job=$!
    trap 'kill "$job" 2>/dev/null || true' HUP INT TERM
    ! running "$job" || note mpirun "$RUNNING"
    wait "$job" || true
    wait "$job" || true # a signal ends the first wait, not the job
    for role in worker trainer; do # mpirun may have been killed
        while ! noted "$role" && noted "$role.watcher" && is_running "$NOTED"; do
            sleep 0.1
        done
    done
    ! noted worker || worker_code=$NOTED
    ! noted trainer || trainer_code=$NOTED
    status=$(status_of "$worker_code" "$trainer_code")
    if [ "$status" -ne 0 ]; then
        cat "$FOLDER/worker.log" >&2 || true
        printf 'launch: the worker ended with status %s, the trainer with %s\n' "$worker_code" "$trainer_code" >&2
    fi
    return "$status"
}

if [ "${1:-}" = --as-rank ]; then
    FOLDER=$2
    GRACE=$3
    LAUNCHER=$4
    shift 4
    as_rank "$@"
    exit 0
fi
if [ "${1:-}" = --grace ]; then
    GRACE=${2:-}
    [ "$GRACE" -ge 0 ] 2>/dev/null || die "--grace: expected seconds, found '$GRACE'"
    shift 2
fi
case " $* " in
*' -- '*) ;;
*) die "expected [--grace SECONDS] WORKER OPTION.. -- TRAINER ARGUMENT.." ;;
esac
launch "$@"
