#!/usr/bin/env bash
# The test command with other releases of Python and torch, in environments of their own in .venv/versions:
# scripts/test_versions.sh [PYTHON:TORCH ...], by default the oldest and the newest that are served. Prints a line for
# each; what a run said is beside its environment. Pythons are found in PATH.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ $# -gt 0 ] || set -- 3.10:2.6.0 3.12:2.13.0 3.13:2.15.0
status=0
mkdir -p "$root/.venv/versions"
for pair in "$@"; do
    folder=$root/.venv/versions/${pair/:/-}
    VENV=$folder PYTHON=python${pair%:*} TORCH=${pair#*:} "$root/scripts/test.sh" >"$folder.log" 2>&1 || status=1
    echo "Python ${pair%:*}, torch ${pair#*:}: $(tail -n 1 "$folder.log")"
done
exit $status
