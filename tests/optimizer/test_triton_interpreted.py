"""The tests of the Triton kernels, run by Triton's interpreter.

Triton decides when it is imported whether it interprets, so they run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = ("test_triton_adam.py", "test_triton_stats.py", "test_triton_low_precision.py")


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is interpreted already")
def test_kernels_when_they_are_interpreted_then_their_tests_pass() -> None:
    _check_interpreted("not long", 300)


@pytest.mark.long
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is interpreted already")
def test_kernels_when_they_are_interpreted_then_their_long_tests_pass() -> None:
    _check_interpreted("long", 3000)


def _check_interpreted(marker: str, seconds: int) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker]
    command += [str(FOLDER / name) for name in FILES]
    done = subprocess.run(
        command,
        cwd=FOLDER.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1]
