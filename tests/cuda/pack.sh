#!/usr/bin/env bash
# pack.sh BUILD OUT: the folder OUT with all that all.sh, the bench and the training runs need on a machine that has a GPU, Python 3.12 with
# torch, Open MPI and HDF5, but neither compiler nor network. It is laid out as the tree is; `OUT/here COMMAND...` runs a command in it.
# PACK_PARTS="trainer swap tests" leaves out what is not named. Each program holds the kernels, some 30 MB; `tar c OUT | xz
# --lzma2=preset=3,dict=128MiB` finds them again and makes 15 MB of 160.
#   trainer   bitroll-worker, libbitroll.so, libbitroll_bridge.so, megatron-core
#   tests     bitroll_cuda_tests
#   swap      bitroll_cuda_swap
# and hw_probe, lab_digest and lab_index where they were built. Exit 2, before anything is written: no such part, or a program
# that was not built.
set -euo pipefail
tree=$(cd "$(dirname "$0")/../.." && pwd)
die() {
    printf 'pack.sh: %s\n' "$*" >&2
    exit 2
}

[ $# -eq 2 ] || die 'expected BUILD OUT'
build=$1 out=$2
parts=" ${PACK_PARTS:-trainer swap tests} "
for name in $parts; do
    case $name in trainer | swap | tests) ;; *) die "PACK_PARTS: there is no part '$name': expected some of trainer swap tests" ;; esac
done

programs=(bitroll)
case $parts in *' trainer '*) programs+=(bitroll-worker libbitroll.so libbitroll_bridge.so) ;; esac
case $parts in *' tests '*) programs+=(bitroll_cuda_tests) ;; esac
case $parts in *' swap '*) programs+=(bitroll_cuda_swap) ;; esac
for name in "${programs[@]}"; do [ -e "$build/$name" ] || die "$build: no $name in it: expected BUILD, a folder where it was built"; done
for lab in hw_probe lab_digest lab_index; do [ ! -x "$build/$lab" ] || programs+=("$lab"); done

mkdir -p "$out/build/lib"
# The package reads its interfaces out of the headers.
git -C "$tree" archive HEAD -- 'src/*.h' 'kernels_batch_invariant/*.h' trainer_bridge experiments tests/prompts.awk tests/cuda tests/trainer | tar -x -C "$out"
for name in "${programs[@]}"; do
    strip -g -o "$out/build/$name" "$build/$name"
    # Of its libraries those that such a machine may lack; glibc, Open MPI and HDF5 are its own.
    ldd "$build/$name" | awk '$1 ~ /^lib(jansson|check|subunit)[.]/ { print $3 }' | xargs -r cp -L -t "$out/build/lib"
done
if [ "${parts#* trainer }" != "$parts" ]; then
    python=$("$tree/trainer_bridge/environment.sh")
    mkdir -p "$out/site"
    cp -r "$("$python" -W ignore -c 'import megatron.core, os; print(os.path.dirname(os.path.dirname(megatron.core.__file__)))')" "$out/site"
    find "$out/site" -name __pycache__ -prune -exec rm -rf {} +
fi
cat >"$out/here" <<'TEXT'
#!/usr/bin/env bash
here=$(cd "$(dirname "$0")" && pwd)
cd "$here"
export LD_LIBRARY_PATH=$here/build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} PYTHONPATH=$here/trainer_bridge:$here/site PYTHON=$here/python
exec "$@"
TEXT
cat >"$out/python" <<'TEXT'
#!/usr/bin/env bash
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=$here/trainer_bridge:$here/site OMP_NUM_THREADS=1
exec python3 -B "$@"
TEXT
chmod +x "$out/here" "$out/python"
du -sm "$out"
