#!/usr/bin/env bash
# Builds the documentation as a site in site/, with navigation, search and the API from docstrings; a broken link or an
# unknown name is an error. Needs Python 3.10 or newer and nothing else; what it installs goes to .venv.
# Arguments are handed to mkdocs: scripts/docs.sh serve, scripts/docs.sh build --site-dir FOLDER
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare docs
cd "$root"
if [ $# -eq 0 ]; then
    set -- build
fi
exec "$venv/bin/python" -m mkdocs "$1" --strict "${@:2}"
