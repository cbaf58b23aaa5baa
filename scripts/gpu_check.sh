#!/usr/bin/env bash
# Checks on this machine's devices whether the package is right and fast, in about ten minutes: see docs/hosts.md.
# Uses the torch of the Python that PYTHON names (python3). What is missing goes to runs/gpu_check_packages, next to the
# user's packages and after them on the path; nothing of the user's is changed. Without a network, it runs with what is there.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

python=${PYTHON:-python3}
has_torch() { "$1" -c 'import torch' >/dev/null 2>&1; }
if ! has_torch "$python"; then
    if [ -z "${PYTHON:-}" ] && has_torch "$venv/bin/python"; then
        python=$venv/bin/python
    else
        fail "Invalid Python: $python has no torch. Must have the torch of your device. Name one that has: PYTHON=/path/to/python $0" 2
    fi
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "Invalid interpreter: $("$python" --version 2>&1). Must be Python 3.10 or newer. Name one: PYTHON=python3.11 $0" 2

packages=$root/runs/gpu_check_packages/$("$python" -c 'import sys; print("py%d%d" % sys.version_info[:2])')
export GPU_CHECK_PACKAGES=$packages
export PYTHONPATH=$root/benchmarks:$root${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$packages"

# Quick to give up: a machine with GPUs often has no network.
pip_install() {
    DS_BUILD_OPS=0 timeout 240 "$python" -m pip install --quiet --quiet --disable-pip-version-check --no-input \
        --retries 1 --timeout 10 --target "$packages" --upgrade "$@" >>"$packages/pip.log" 2>&1
}

case " $* " in *" -h "* | *" --help "*) exec "$python" -m gpu_check --help ;; esac
wanted=$("$python" -m gpu_check.missing "$@")
while read -r dependencies requirements; do
    [ -n "$dependencies" ] || continue
    echo "installing $requirements next to your packages"
    flags=()
    [ "$dependencies" = with ] || flags=(--no-deps)
    # shellcheck disable=SC2086 # several requirements
    pip_install "${flags[@]+"${flags[@]}"}" $requirements || echo "could not be installed, see $packages/pip.log; going on without"
done <<<"$wanted"

# What DeepSpeed compiles for itself stays here as well.
if [ -d "$packages/deepspeed" ]; then
    export TORCH_EXTENSIONS_DIR=$packages/torch_extensions
fi

# The small fork of 2023 in tests/hosts stands on a megatron-core of its own.
if [ -z "${MINI_FORK_CORE:-}" ] && [ -d "$root/tests/hosts/mini_fork" ]; then
    fork_core=$packages/megatron-core-0.2.0
    if [ ! -d "$fork_core/megatron" ]; then
        echo "installing megatron-core==0.2.0 for the small fork of 2023"
        "$python" -m pip install --quiet --quiet --disable-pip-version-check --no-input --retries 1 --timeout 10 --no-deps \
            --target "$fork_core" megatron-core==0.2.0 >>"$packages/pip.log" 2>&1 ||
            echo "could not be installed, see $packages/pip.log; going on without"
    fi
    export MINI_FORK_CORE=$fork_core
fi
exec "$python" -m gpu_check "$@"
