#!/usr/bin/env bash
# Runs the tests of megatron-core on other versions than the installed one: scripts/test_hosts.sh 0.12.1 0.19.2
# Without a version: the oldest and the newest that docs/hosts.md lists. Each is unpacked into a folder of its own, which
# comes first in PYTHONPATH; HOSTS_FOLDER names the place (.hosts). Prints one row of the table in docs/hosts.md for each
# version; the logs are beside the folders.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare dev
cd "$root"
export PATH="$venv/bin:$PATH" OMP_NUM_THREADS=1
folder=${HOSTS_FOLDER:-$root/.hosts}
[ $# -gt 0 ] || set -- 0.9.0 0.19.2
# Wheels from 0.17 on ask for Python 3.12 and run on 3.11 where they are unpacked; older ones are built for 3.11.
pythons="3.12 3.11 3.10"
columns="contract parity refusals options factories folders checkpoints"

unpack() {
    local version=$1 python wheel
    [ -d "$folder/$version/megatron" ] && return
    mkdir -p "$folder/wheels"
    for python in $pythons; do
        python -m pip download --quiet --no-deps --only-binary=:all: --python-version "$python" \
            --dest "$folder/wheels" "megatron-core==$version" 2>/dev/null && break
    done
    wheel=$(find "$folder/wheels" -name "megatron_core-$version-*.whl" | head -n 1)
    [ -n "$wheel" ] || fail "Invalid version: megatron-core $version. Must have a wheel for one of Python $pythons."
    python -m zipfile --extract "$wheel" "$folder/$version"
}

# 0.18 and later import triton on every machine.
unpack_triton() {
    python -c "import triton" 2>/dev/null && return
    [ -d "$folder/triton/triton" ] || _pip_install --no-deps --target "$folder/triton" triton
}

for version in "$@"; do
    unpack "$version"
    path=$folder/$version
    if find "$path" -name paged_stash.py | grep -q .; then
        unpack_triton
        path=$path:$folder/triton
    fi
    row="| $version |"
    for column in $columns; do
        marker=$([ "$column" = checkpoints ] && echo "long or not long" || echo "not long")
        result=$(PYTHONPATH="$path:$root" python -W ignore -m pytest -q -p no:cacheprovider -m "$marker" \
            "tests/hosts/test_megatron_core_$column.py" 2>&1 | tee "$folder/$version.$column.log" | tail -n 1) || true
        row="$row $(echo "$result" | sed 's/ in [0-9.]*s.*//; s/, [0-9]* deselected//; s/, [0-9]* warnings*//') |"
    done
    echo "$row"
done
