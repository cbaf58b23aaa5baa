# Sourced by the other scripts: `prepare EXTRA` makes .venv in the root of the repository and installs the package with
# that extra. Sets: root, venv, gpus. Needs Python 3.10 or newer (PYTHON names the interpreter; python3). VENV and TORCH
# name another folder and another release, see test_versions.sh.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$root/.venv}
gpus=0
if nvidia-smi -L >/dev/null 2>&1; then
    gpus=$(nvidia-smi -L | wc -l)
fi

# What is imported is compiled once, whatever the caller's environment says, and all of it is kept in .venv.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=$venv/bytecode

fail() {
    echo "$(basename "$0"): $1" >&2
    exit "${2:-1}"
}

# The release that this was tried with on CPUs; with a GPU the newest, built for the CUDA of the day.
_torch() { [ "$gpus" -gt 0 ] && [ -z "${TORCH:-}" ] && echo torch || echo "torch==${TORCH:-2.13.0}"; }

_pip_install() {
    "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-input --no-compile "$@"
}

# One of pip's settings, from its files or its environment; nothing where it has none.
_pip_setting() {
    "$venv/bin/python" -m pip config list 2>/dev/null | sed -n "s/^[^=]*\.$1='\(.*\)'\$/\1/p" | tail -n 1 | sed 's/\\n/ /g'
}

# uv does in seconds what takes pip a minute. It does not read pip's settings, so it is told those that name a place, and
# to look into all of them as pip does; where it cannot, pip installs.
_install() {
    UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$(_pip_setting index-url)} UV_INDEX=${UV_INDEX:-$(_pip_setting extra-index-url)} \
        UV_INDEX_STRATEGY=unsafe-best-match UV_FIND_LINKS=${UV_FIND_LINKS:-$(_pip_setting find-links)} \
        UV_CONSTRAINT=${UV_CONSTRAINT:-$(_pip_setting constraint)} SSL_CERT_FILE=${SSL_CERT_FILE:-$(_pip_setting cert)} \
        "$venv/bin/python" -m uv pip install --quiet --python "$venv/bin/python" "$@" 2>"$venv/uv.log" || _pip_install "$@"
}

_make_venv() {
    local python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "Invalid interpreter: $("$python" --version 2>&1). Must be Python 3.10 or newer. Name one: PYTHON=python3.11 $0"
    "$python" -m venv "$venv" || {
        rm -rf "$venv"
        fail "Invalid Python: it has no venv. Must have it. On Debian and Ubuntu: apt-get install python3-venv"
    }
}

# torch goes first and is then held: deepspeed and megatron-core ask for any torch, and must not move it.
prepare() {
    local extra=$1 wanted
    [ -x "$venv/bin/python" ] || { echo "making $venv"; _make_venv; }
    wanted="$(_torch) $(cat "$root/setup.py" "$root/pyproject.toml" | cksum)"
    if [ "$(cat "$venv/$extra.installed" 2>/dev/null || true)" = "$wanted" ]; then
        return
    fi
    echo "installing megatron-distopt[$extra]: minutes, once"
    _pip_install uv || true
    _install "$(_torch)"
    "$venv/bin/python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >"$venv/constraints"
    _install --constraint "$venv/constraints" --editable "$root[$extra]"
    echo "$wanted" >"$venv/$extra.installed"
}

# `unpack_core VERSION`: megatron-core in a folder of its own, which goes first into PYTHONPATH; what it needs is in the
# dev extra. From 0.17 on it asks for Python 3.12 and runs on 3.11; older ones have no wheel for 3.12.
core_folders=$venv/megatron-core
unpack_core() {
    local version=$1 folder=$core_folders/$1 python
    [ -d "$folder/megatron" ] && return
    echo "unpacking megatron-core $version"
    for python in 3.12 3.11 3.10; do
        _pip_install --ignore-requires-python --no-deps --only-binary=:all: --python-version "$python" \
            --target "$folder" "megatron-core==$version" 2>/dev/null && break
    done
    [ -d "$folder/megatron" ] || fail "Invalid version: megatron-core $version. Must have a wheel for Python 3.10 to 3.12"
}
