#!/usr/bin/env bash
# The tests with other releases of Python and torch, in environments of their own in .venv/versions, without lint and
# types, which know one torch: scripts/test_versions.sh [PYTHON:TORCH ...], by default the oldest and the newest that are
# served. Prints a line for each; what a run said is beside its environment. Pythons are found in PATH.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ $# -gt 0 ] || set -- 3.10:2.6.0 3.12:2.13.0 3.13:2.15.0

# In a shell of its own: VENV, PYTHON and TORCH are those of environment.sh.
_test() (
    set -e
    source "$root/scripts/environment.sh"
    prepare dev
    for version in 0.9.0 0.19.2; do unpack_core "$version"; done
    cd "$root"
    PATH="$venv/bin:$PATH" python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -m "not long"
)

status=0
mkdir -p "$root/.venv/versions"
for pair in "$@"; do
    folder=$root/.venv/versions/${pair/:/-}
    VENV=$folder PYTHON=python${pair%:*} TORCH=${pair#*:} _test >"$folder.log" 2>&1
    [ $? = 0 ] || status=1
    echo "Python ${pair%:*}, torch ${pair#*:}: $(grep -E "passed|failed|error" "$folder.log" | tail -n 1)"
done
exit $status
