"""What every process of a benchmark has to find before it imports torch. Importing this module sets
it.

The ranks inherit the environment, and `spawn` hands them the path.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
# Warnings of the peers are about the CPU and about their own imports.
warnings.simplefilter("ignore")
os.environ.update(
    PYTHONWARNINGS="ignore", DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"
)
