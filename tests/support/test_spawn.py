"""The harness that runs every distributed test: results, failures and time limits reach the
parent."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.facts import Facts, outcomes
from tests.support.spawn import RankError, run_ranks


def _sum_of_ranks(rank: int, size: int, extra: float) -> dict[str, object]:
    total = torch.tensor([float(rank) + extra])
    dist.all_reduce(total)
    return {
        "rank": rank,
        "total": total,
        "threads": os.environ["OMP_NUM_THREADS"],
        "world": dist.get_world_size(),
    }


def _fail_on_rank_one(rank: int, size: int) -> None:
    if rank == 1:
        raise ValueError("the reason")
    dist.barrier()  # never completes: the peer is gone


def _hang(rank: int, size: int) -> None:
    time.sleep(60)


def _die(rank: int, size: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_run_ranks_when_all_return_then_results_come_in_rank_order() -> None:
    results = run_ranks(_sum_of_ranks, 2, 0.5)
    assert [result["rank"] for result in results] == [0, 1]
    assert all(torch.equal(result["total"], torch.tensor([2.0])) for result in results)
    assert {result["threads"] for result in results} == {"1"}
    assert {result["world"] for result in results} == {2}


def test_run_ranks_when_one_raises_then_its_traceback_comes_first_and_its_error_is_the_cause() -> (
    None
):
    with pytest.raises(RankError, match=r"_fail_on_rank_one failed on rank 1") as caught:
        run_ranks(_fail_on_rank_one, 2)
    assert "in _fail_on_rank_one" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
    assert str(caught.value.__cause__) == "the reason"


def test_run_ranks_when_the_time_limit_passes_then_the_ranks_are_named() -> None:
    with pytest.raises(RankError, match=r"_hang was still running on ranks \[0\] after 0.5 s"):
        run_ranks(_hang, 1, seconds=0.5)


def test_run_ranks_when_a_rank_is_killed_then_its_exit_code_is_told() -> None:
    with pytest.raises(RankError, match=r"left no result on ranks \[0\]; exit codes \{0: -9\}"):
        run_ranks(_die, 1)


def test_facts_when_a_rank_lacks_one_then_only_of_some_leaves_it_out() -> None:
    facts = Facts([{"own": 1}, {}], Path())
    with pytest.raises(KeyError):
        facts["own"]
    assert facts.of_some("own") == [1]
    with pytest.raises(KeyError):
        facts.of_some("nobody's")


def test_facts_when_a_check_fails_on_a_rank_then_its_traceback_is_the_error() -> None:
    found = outcomes({"fails": lambda: pytest.fail("the reason"), "passes": lambda: None})
    facts = Facts([{"fails": "", "passes": ""}, found], Path())
    facts.assert_passed("passes")
    with pytest.raises(AssertionError, match="the reason"):
        facts.assert_passed("fails")


def test_map_of_this_folder_when_read_then_it_names_every_file_that_is_there() -> None:
    folder = Path(__file__).parent
    named = re.findall(r"`(\w+)(?:\.py|/)`", (folder / "README.md").read_text(encoding="utf-8"))
    there = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert there - set(named) - {"__pycache__"} == {"__init__", "conftest", "test_spawn"}
    assert set(named) <= there
