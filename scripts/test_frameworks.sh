#!/usr/bin/env bash
# Runs code of frameworks that train with megatron-core, from checkouts of them, and prints their rows of docs/hosts.md.
#
#   scripts/test_frameworks.sh FOLDER...       checkouts: verl, SkyRL, ROLL, RL (NeMo-RL), slime, miles, Megatron-Bridge, MindSpeed
#
# Nothing of them is installed or built; what each piece needs of the rest of its framework is in
# tests/support/frameworks.py. MEGATRON_CORE=0.19.2 runs them on that version.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare dev
folders=$(realpath "$@")
cd "$root"
core=
[ -z "${MEGATRON_CORE:-}" ] || { unpack_core "$MEGATRON_CORE" && core=$core_folders/$MEGATRON_CORE:; }
# shellcheck disable=SC2086 -- one word each
PYTHONPATH=$core$root:$root/examples OMP_NUM_THREADS=1 "$venv/bin/python" -W ignore -m tests.support.frameworks $folders \
    2>/dev/null | grep '^| '
