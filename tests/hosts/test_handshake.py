"""Launched programs in which one rank does not use the package: the others name it, and no rank hangs."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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
_EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain_gpt_core.py"
_FLAG = ("--use-distributed-optimizer",)
#: A fork's own distributed optimizer runs on a CPU with it.
_NATIVE = {"MINI_FORK_NATIVE": "1"}


@dataclass(frozen=True)
class Ended:
    """A job, and how long it took."""

    launched: Launched
    seconds: float


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("starts")
    (folder / "start.py").write_text(_START)
    return folder


def _start(folder: Path, how: str, script: Path, *flags: str) -> Ended:
    began = time.monotonic()
    launched = launch("torchrun", 2, [str(folder / "start.py"), how, str(script), *flags], environment=_NATIVE)
    return Ended(launched, time.monotonic() - began)


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    """Both beside each other."""
    words = {
        "2023, off": ("off", SCRIPT, *_FLAG),
        "core, without the flag": ("on", _EXAMPLE, "--train-iters", "1"),
    }
    with ThreadPoolExecutor(max_workers=2) as pool:
        jobs: dict[str, Future[Ended]] = {name: pool.submit(_start, folder, *each) for name, each in words.items()}
    return {name: job.result() for name, job in jobs.items()}


def _names_rank_1(ended: Ended, reason: str) -> bool:
    return f"megatron_distopt is not used on rank 1 ({reason})" in ended.launched.output


def test_rank_when_it_is_switched_off_then_the_job_ends_and_says_which(ended: dict[str, Ended]) -> None:
    """megatron-core says the same; see test_megatron_core_refusals.py."""
    job = ended["2023, off"]
    assert _names_rank_1(job, "MEGATRON_DISTOPT=0"), job.launched.output
    assert job.launched.status != 0


def test_job_when_no_rank_has_the_flag_then_it_trains_and_says_once_that_the_package_is_not_used(
    ended: dict[str, Ended],
) -> None:
    """A Megatron of 2023 says the same; see test_megatron_2023_install_methods.py."""
    job = ended["core, without the flag"]
    line = "megatron_distopt is loaded and not used: use_distributed_optimizer is not set"
    assert job.launched.output.count(line) == 1, job.launched.output
    assert job.launched.status == 0


@pytest.mark.long
def test_rank_when_it_runs_without_the_package_then_the_job_ends_within_a_minute_and_says_which(folder: Path) -> None:
    job = _start(folder, "absent", SCRIPT, *_FLAG)
    assert _names_rank_1(job, "not loaded"), job.launched.output
    assert job.seconds < 75  # a minute, and the start of two Pythons on a machine that is busy
