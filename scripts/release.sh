#!/usr/bin/env bash
# Makes what a release consists of, in dist/, and publishes nothing: scripts/release.sh [PYTHON:TORCH ...], by default the
# oldest and the newest that are served, whose Pythons are found in PATH. Source archive and wheel are built twice from
# the commit and must be equal byte for byte; each is installed into an empty environment of each pair, where two ranks
# train. dist/notes.md has the part of CHANGELOG.md that is about the version.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
[ $# -gt 0 ] || set -- 3.10:2.6.0 3.13:2.15.0
[ -z "$(git status --porcelain)" ] || { echo "release.sh: there are changes that no commit has. Commit them" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH

python3 -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet build twine

# Setuptools writes the times of the build into the source archive; here all of it has that of the commit.
_normalise() {
    gunzip "$1"
    mkdir "$work/sdist"
    tar --extract --directory "$work/sdist" --file "${1%.gz}"
    tar --create --directory "$work/sdist" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner \
        --format=ustar --mode=u=rwX,go=rX --file "${1%.gz}" "$(ls "$work/sdist")"
    gzip --no-name --best "${1%.gz}"
    rm -r "$work/sdist"
}

for number in first second; do
    mkdir -p "$work/$number/source"
    git archive HEAD | tar --extract --directory "$work/$number/source"
    "$work/tools/bin/python" -m build --outdir "$work/$number/dist" "$work/$number/source" >"$work/build.log" 2>&1 ||
        { cat "$work/build.log"; exit 1; }
    _normalise "$work/$number"/dist/*.tar.gz
done
for file in "$work"/first/dist/*; do
    cmp "$file" "$work/second/dist/$(basename "$file")"
    echo "built twice, equal: $(basename "$file")"
done
"$work/tools/bin/twine" check --strict "$work"/first/dist/*
rm -rf dist
cp -r "$work/first/dist" dist

# In a folder without the package's source.
_try() (
    VENV=$work/$1-$2-${3##*.} PYTHON=python$1
    source scripts/environment.sh
    _make_venv
    _pip_install uv
    _install "torch==$2" "$3"
    cp scripts/smoke_test.py "$work/smoke_test.py"
    cd "$work"
    OMP_NUM_THREADS=1 "$venv/bin/torchrun" --nproc-per-node 2 smoke_test.py >"$venv.log" 2>&1 || { cat "$venv.log"; exit 1; }
    grep "^two ranks trained with .*site-packages" "$venv.log" | sed "s|$work/||"
    "$venv/bin/megatron-distopt" plan --layers 2 --hidden 64 --vocab 128 >/dev/null
    rm -rf "$venv"
)
for pair in "$@"; do
    for file in dist/*; do
        _try "${pair%:*}" "${pair#*:}" "$root/$file"
    done
done

version=$("$work/tools/bin/python" -c 'import runpy; print(runpy.run_path("megatron_distopt/version.py")["VERSION"])')
awk -v version="$version" '/^## /{printing = ($2 == version)} printing' CHANGELOG.md >dist/notes.md
[ -s dist/notes.md ] || { echo "release.sh: CHANGELOG.md has nothing about $version. Write it" >&2; exit 1; }
ls -l dist
