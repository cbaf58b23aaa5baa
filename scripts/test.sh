#!/usr/bin/env bash
# Lints, checks types and runs the tests. Needs Python 3.10 or newer and nothing else; what it installs goes to .venv.
# Arguments are handed to pytest: scripts/test.sh tests/layout. The long tests are left out: scripts/test.sh -m long
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare dev
# The oldest and the newest that is served, for tests/hosts/test_megatron_core_versions.py.
for version in 0.9.0 0.19.2; do unpack_core "$version"; done
cd "$root"
export PATH="$venv/bin:$PATH"
echo "ruff check" && ruff check .
echo "ruff format" && ruff format --check --quiet .
# At first, what the tests import and what only their processes do is imported beside mypy: it is compiled once then.
[ -d "$PYTHONPYCACHEPREFIX$root/tests" ] || { python -m pytest --collect-only -q >/dev/null 2>&1 & }
collecting=${!:-}
echo "mypy" && mypy
if [ "$collecting" ]; then
    PYTHONPATH=examples python -c "import deepspeed, recipes.lightning_module, recipes.huggingface_trainer" >/dev/null 2>&1 || true
    wait "$collecting" || true
fi
# Two files at a time, each with ranks of its own: two cores have no more to give. Files are taken in the order of
# conftest.py, those that take longest first.
python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -m "not long" "$@"
