"""One report on whether this package is right and fast on a machine: `scripts/gpu_check.sh`, see
docs/hosts.md.

Importing it makes the repository importable, and what the script installed next to the user's
packages: at the end of the path, so that whatever the user has comes first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Names the folder into which scripts/gpu_check.sh installed what was missing.
PACKAGES_VARIABLE = "GPU_CHECK_PACKAGES"

_AFTER = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples")]
if os.environ.get(PACKAGES_VARIABLE):
    _AFTER.append(os.environ[PACKAGES_VARIABLE])
sys.path += [folder for folder in _AFTER if folder not in sys.path]
