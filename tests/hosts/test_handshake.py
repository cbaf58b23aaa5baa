"""Launched programs in which one rank does not use the package: the others name it, and no rank hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mini_fork import SCRIPT, Launched, launch

#: How rank 1 is started: "off", or "absent" for one that runs the script without the package.
_START = """
import os
import runpy
import sys

how, script = sys.argv[1:3]
sys.argv[1:3] = []
os.chdir(os.path.dirname(script))
sys.path[0] = os.path.dirname(script)
is_odd = os.environ["RANK"] == "1"
if is_odd and how == "off":
    os.environ["MEGATRON_DISTOPT"] = "0"
if is_odd and how == "absent":
    runpy.run_path(script, run_name="__main__")
else:
    from megatron_distopt.plugin.runner import main

    main([script, *sys.argv[1:]])
"""
_FLAG = ("--use-distributed-optimizer",)
#: A fork's own distributed optimizer runs on a CPU with it.
_NATIVE = {"MINI_FORK_NATIVE": "1"}


@pytest.fixture
def start(tmp_path: Path) -> Callable[[str], Launched]:
    """Starts a fork of 2023 on two ranks, the second one as the word says."""
    file = tmp_path / "start.py"
    file.write_text(_START)
    return lambda how: launch("torchrun", 2, [str(file), how, str(SCRIPT), *_FLAG], environment=_NATIVE)


def test_rank_when_it_is_switched_off_then_the_job_ends_and_says_which(start: Callable[[str], Launched]) -> None:
    """megatron-core says the same; see test_megatron_core_refusals.py."""
    job = start("off")
    assert "megatron_distopt is not used on rank 1 (MEGATRON_DISTOPT=0)" in job.output
    assert job.status != 0


@pytest.mark.long
def test_rank_when_it_runs_without_the_package_then_the_job_ends_within_a_minute_and_says_which(
    start: Callable[[str], Launched],
) -> None:
    began = time.monotonic()
    job = start("absent")
    assert "megatron_distopt is not used on rank 1 (not loaded)" in job.output
    assert time.monotonic() - began < 75  # a minute, and the start of two Pythons on a machine that is busy
