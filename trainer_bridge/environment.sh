#!/usr/bin/env bash
# environment.sh: makes the trainer's Python environment where it is not there yet, and prints the path of its interpreter, a script that
# sets the library path. The environment lies outside the tree, named by the hash of requirements.lock: built beside its place and
# renamed, so that a broken installation is never found. Needs Python 3.12 (with venv) and the libraries of a CUDA 13 toolkit with cuDNN 9,
# which torch loads when it is imported, with a GPU or without. Importing all takes ten seconds: it is done again only when a file of the
# environment, its Python or the toolkit's place is not as it was when that last succeeded.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
lock=$here/requirements.lock
KIB_NEEDED=$((6 * 1024 * 1024)) # download, unpacked, and the copy while building

die() {
    printf 'environment: %s\n' "$*" >&2
    exit 2
}

find_python() {
    local candidate
    for candidate in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.12 with venv was found: torch and megatron-core of requirements.lock need it"
}

has_libraries() {
    [ -e "$1/libcublas.so.13" ] && [ -e "$1/libcudnn.so.9" ]
}

find_toolkit() {
    local folder
    for folder in "$(dirname "$(command -v nvcc 2>/dev/null || echo /none/bin/nvcc)")/../lib64" /usr/local/cuda/lib64; do
        if has_libraries "$folder"; then
            (cd "$folder" && pwd -P)
            return
        fi
    done
    die "no CUDA 13 toolkit with cuDNN 9 was found: torch of requirements.lock loads its libraries"
}

cache=${XDG_CACHE_HOME:-$HOME/.cache}/bitroll
place=$cache/python-$(sha256sum "$lock" | cut -c1-16)
build() {
    local python toolkit free building
    python=$(find_python)
    toolkit=$(find_toolkit)
    free=$(df -Pk "$cache" | awk 'NR == 2 { print $4 }')
    [ "$free" -ge "$KIB_NEEDED" ] || die "$cache has $free KiB free: the environment needs $KIB_NEEDED"
    building=$(mktemp -d "$cache/building.XXXXXX")
    # shellcheck disable=SC2064 # its name is local
    trap "rm -rf '$building'" EXIT
    "$python" -m venv "$building/env" >&2
    "$building/env/bin/python" -m pip install -q --no-deps --require-hashes --only-binary=:all: --no-cache-dir --disable-pip-version-check \
        -r "$lock" >&2 || die "pip could not install requirements.lock"
    cat >"$building/env/bin/bitroll-python" <<TEXT
#!/bin/sh
LD_LIBRARY_PATH=$toolkit\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
exec "\$(dirname "\$0")/python" -B "\$@"
TEXT
    chmod +x "$building/env/bin/bitroll-python"
    rm -rf "$place"
    mv -T "$building/env" "$place"
}

if [ ! -x "$place/bin/bitroll-python" ]; then
    mkdir -p "$cache"
    exec {held}>"$cache/lock"
    flock "$held" # of two calls the second finds what the first has made
    [ -x "$place/bin/bitroll-python" ] || build
    exec {held}>&-
fi

works=$place/works # what the import said last
is_as_it_was() {
    local python
    has_libraries "$(sed -n 's/^LD_LIBRARY_PATH=\([^$]*\).*/\1/p' "$place/bin/bitroll-python")" || return 1
    python=$("$place/bin/bitroll-python" -c 'import sys; print(f"python {sys.version.split()[0]}")' 2>/dev/null) || return 1
    [[ -f $works && $(<"$works") == "$python, "* && -z $(find "$place/bin" "$place/lib" -newer "$works" -print -quit 2>&1) ]]
}

if ! is_as_it_was; then
    said=$("$place/bin/bitroll-python" -W ignore - <<'TEXT'
import sys, torch, megatron.core
from importlib.metadata import version
print(f"python {sys.version.split()[0]}, torch {torch.__version__}, megatron-core {megatron.core.__version__}, peft {version('peft')}")
TEXT
    ) || die "the environment does not work: if $place is broken, remove it and call again"
    # where it cannot be kept, as in a cache that is read-only, each call imports
    { printf '%s\n' "$said" >"$works.$$" && mv -fT "$works.$$" "$works"; } 2>/dev/null || rm -f "$works.$$" 2>/dev/null || true
else
    said=$(<"$works")
fi
printf '%s\n' "$said" >&2
printf '%s\n' "$place/bin/bitroll-python"
