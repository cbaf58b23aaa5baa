"""What a profiler and the log say of a step."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.profiler import profile

from megatron_distopt import DistOptConfig, distribute
from tests.support.spawn import run_ranks

RANKS, BUCKETS = 2, 2


def _ranges(*, overlap: bool) -> list[str]:
    """Names of the third step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    config = DistOptConfig(
        accelerator="torch",
        bucket_size=70,
        clip_grad=1.0,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        log_communication=2,
    )
    optimizer = distribute(model, config)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()

    step()
    step()
    with profile() as profiled:
        step()
        optimizer.finish_param_gather()
    names = {event.key for event in profiled.key_averages()}
    return sorted(name.removeprefix("megatron_distopt::") for name in names if name.startswith("megatron_distopt::"))


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _collect(rank: int, size: int) -> dict[str, Any]:
    lines = _Lines()
    logger = logging.getLogger("megatron_distopt")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    return {"at once": _ranges(overlap=False), "overlapped": _ranges(overlap=True), "lines": lines.lines}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(_collect, RANKS)


PHASES = ["measure gradients", "update"]
BOTH = [f"{kind} {number}" for kind in ("all-gather", "reduce-scatter") for number in range(BUCKETS)]


def test_profile_when_a_step_runs_then_every_phase_and_bucket_has_a_name(found: list[dict[str, Any]]) -> None:
    overlapped = [f"{what} {each}" for what in ("begin", "wait for") for each in BOTH]
    for each in found:
        assert each["at once"] == sorted([*BOTH, *PHASES])
        assert each["overlapped"] == sorted([*overlapped, *PHASES])


def test_log_when_asked_for_then_the_first_rank_says_what_was_hidden(found: list[dict[str, Any]]) -> None:
    lines = [line for line in found[0]["lines"] if line.startswith("communication of step 2: ")]
    assert len(lines) == 2
    assert all("reduce-scatter" in line and "all-gather" in line and "exposed" in line for line in lines)
    assert not [line for line in found[1]["lines"] if "communication" in line]
