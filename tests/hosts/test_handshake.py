"""A launched program in which one rank does not use the package: the others name it, and no rank
hangs.

A rank that is switched off: test_megatron_2023_refusals.py and test_megatron_core_refusals.py.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.mini_fork import SCRIPT, launch

#: Rank 1 runs the script without the package.
_START = """
import os
import runpy
import sys

script = sys.argv[1]
sys.argv[1:2] = []
os.chdir(os.path.dirname(script))
sys.path[0] = os.path.dirname(script)
if os.environ["RANK"] == "1":
    runpy.run_path(script, run_name="__main__")
else:
    from megatron_distopt.plugin.runner import main

    main([script, *sys.argv[1:]])
"""


@pytest.mark.long
def test_rank_when_it_runs_without_the_package_then_the_job_ends_within_a_minute_and_says_which(
    tmp_path: Path,
) -> None:
    file = tmp_path / "start.py"
    file.write_text(_START)
    words = [str(file), str(SCRIPT), "--use-distributed-optimizer"]
    began = time.monotonic()
    # the fork's own runs on a CPU with it
    job = launch("torchrun", 2, words, environment={"MINI_FORK_NATIVE": "1"})
    assert job.status != 0
    assert "megatron_distopt is not used on rank 1 (not loaded)" in job.output
    # a minute, and the start of two Pythons on a machine that is busy
    assert time.monotonic() - began < 75
