#!/usr/bin/env bash
# Runs the tests of megatron-core on other versions than the installed one, and writes their rows in docs/versions.md.
#
#   scripts/test_hosts.sh                      all versions that docs/versions.md lists
#   scripts/test_hosts.sh 0.12.1 0.19.2        these releases, each unpacked into a folder of .venv
#   scripts/test_hosts.sh ../Megatron-LM       a checkout of the main line
#
# The reports of pytest are left in .hosts; `python scripts/hosts_table.py` writes the table from them once more.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare dev
cd "$root"
export PATH="$venv/bin:$PATH" OMP_NUM_THREADS=1
mkdir -p .hosts
if [ $# -eq 0 ]; then
    # shellcheck disable=SC2046 -- one word each
    set -- $(python scripts/hosts_table.py --versions)
fi

# megatron-core 0.14 and 0.15 use a name in their checkpoints that numpy 2 does not have.
old_numpy() {
    grep -rqs "np\.product" "$1/megatron/core/dist_checkpointing" || return 0
    [ -d "$core_folders/numpy1" ] || _pip_install --no-deps --target "$core_folders/numpy1" "numpy<2"
    echo "$core_folders/numpy1:"
}

for wanted in "$@"; do
    if [ -d "$wanted/megatron/core" ]; then
        folder=$(cd "$wanted" && pwd)
    else
        unpack_core "$wanted"
        folder=$core_folders/$wanted
    fi
    path=$folder:$root:$root/examples
    version=$(PYTHONPATH=$path python -W ignore -c "from megatron.core.package_info import __version__ as v; print(v.partition('+')[0])")
    echo "megatron-core $version"
    for file in tests/hosts/test_megatron_core_*.py tests/formats/test_foreign_core.py; do
        marker="not long" first=
        case $file in
            *_versions.py) continue ;;
            *_models.py | *_parity.py) marker="long or not long" ;;
            *_checkpoints.py | *_foreign_core.py) marker="long or not long" first=$(old_numpy "$folder") ;;
        esac
        name=$(basename "$file" .py)
        name=${name#test_megatron_core_}
        name=${name#test_}
        PYTHONPATH=$first$path python -W ignore -m pytest -q -p no:cacheprovider -m "$marker" \
            --junitxml ".hosts/$version/$name.xml" "$file" 2>&1 | grep -E "(passed|failed|skipped|error).* in " || true
    done
done
python scripts/hosts_table.py
