"""What the installed megatron-core has, read off its files: the test process never imports it.

The tests run on any megatron-core that comes first in PYTHONPATH; `scripts/test_hosts.sh
VERSION...` prepares others than the installed one and runs them. A test of something that a version
lacks asks here and is skipped.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

__all__ = ["core_folder", "core_mentions"]


@cache
def core_folder() -> Path:
    """Where megatron/core is."""
    found = importlib.util.find_spec("megatron.core")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("megatron.core")
    return Path(found.origin).parent


def core_mentions(file: str, word: str) -> bool:
    """Whether a file of megatron/core has this text."""
    path = core_folder() / file
    return path.exists() and word in path.read_text()
