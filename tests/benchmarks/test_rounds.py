"""Ratios of benchmarks/step.py and benchmarks/train.py: of the same round, also where a contestant
failed in one."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from peers import step_readings, train_readings
from peers.adam import torch_adam
from peers.machine import MemoryRates
from peers.report import Spread
from peers.step_readings import StepReading, read
from peers.steppers import StepEntry, StepSetting, Undistributed
from peers.train_contestants import FORWARD_BACKWARD
from peers.train_readings import TrainReading

NUMEL = 2**20
WHY_NOT = "RuntimeError: no memory"
#: In powers of two, so that ratios are exact: ours gets slower from round to round, the peer takes
#: twice as long.
OURS, PEER = (1.0, 4.0, 16.0), (2.0, 8.0, 32.0)


def _step(
    name: str, seconds: Sequence[float | None], first: float | None = 0.0
) -> list[StepReading]:
    """A reading a round; None for one that failed."""
    return [
        StepReading(name, NUMEL, number, why_not=WHY_NOT)
        if each is None
        else StepReading(name, NUMEL, number, (each,), None if number else first)
        for number, each in enumerate(seconds)
    ]


def _train(
    name: str, seconds: Sequence[float | None], losses: tuple[float, ...] = (4.0, 2.0)
) -> list[TrainReading]:
    return [
        TrainReading(name, 2, NUMEL, number, why_not=WHY_NOT)
        if each is None
        else TrainReading(name, 2, NUMEL, number, (each,), 2 * each, 3.0 * NUMEL, losses)
        for number, each in enumerate(seconds)
    ]


def _of_step(
    ours: Sequence[float | None], peer: Sequence[float | None], first: float | None = 0.0
) -> dict[str, Any]:
    """The peer is compared with ours where that has run in the first round."""
    rates = [MemoryRates(2.0**25, 2.0**26)] * len(ours)
    peers = _step("peer", peer, None if ours[0] is None else first)
    return step_readings.summary(NUMEL, [*_step("ours", ours), *peers], rates)


def _of_train(ours: Sequence[float | None], peer: Sequence[float | None]) -> dict[str, Any]:
    alone = _train(FORWARD_BACKWARD.name, [0.5] * len(ours), losses=())
    return train_readings.summary([*alone, *_train("ours", ours), *_train("peer", peer)])


Summary = Callable[[Sequence[float | None], Sequence[float | None]], dict[str, Any]]
Lines = Callable[[Sequence[Mapping[str, Any]]], Iterator[str]]
SCRIPTS: dict[str, tuple[Summary, Lines]] = {
    "step": (_of_step, step_readings.lines),
    "train": (_of_train, train_readings.lines),
}
each_script = pytest.mark.parametrize(("summary", "lines"), SCRIPTS.values(), ids=SCRIPTS)


def _row_of(name: str, said: Sequence[str]) -> str:
    return next(line for line in said if line.startswith(f"{name} "))


@each_script
@pytest.mark.parametrize("who", ("ours", "peer"))
def test_ratio_when_one_round_failed_then_is_that_of_the_rounds_of_both(
    summary: Summary, lines: Lines, who: str
) -> None:
    for missing in range(3):
        rounds: dict[str, Sequence[float | None]] = {"ours": OURS, "peer": PEER}
        rounds[who] = [
            None if number == missing else each for number, each in enumerate(rounds[who])
        ]
        found = summary(rounds["ours"], rounds["peer"])
        assert found["peer / ours"] == {"peer": Spread(2.0, 2.0, 2.0)}
        said = list(lines([found]))
        assert f"failed in 1 round: {WHY_NOT}" in _row_of(who, said)
        assert "peer)/ours 2.00" in said[-1] or "peer/ours 2.00" in said[-1]


@each_script
def test_lines_when_one_never_ran_or_nothing_was_run_then_say_so_and_why(
    summary: Summary, lines: Lines
) -> None:
    said = list(lines([summary([None, None], [1.0, 1.0])]))
    assert _row_of("ours", said).endswith(WHY_NOT)
    assert said[-1].endswith("ours did not run")
    assert "NOT COMPARED" in _row_of("peer", said)
    said = list(lines([summary([1.0, 1.0], [None, None])]))
    assert _row_of("peer", said).endswith(WHY_NOT)
    assert "peer" not in said[-1]
    assert list(lines([]))[-1] == "nothing was run"


@pytest.mark.parametrize(
    ("peer", "off", "said"),
    [
        ((None, 8.0, 32.0), 0.0, "NOT COMPARED: it or ours failed in the first round"),
        (PEER, 2e-3, "NOT THE SAME WORK: params differ by more than 0.1% of their change"),
        (PEER, math.nan, "NOT THE SAME WORK: params differ by more than 0.1% of their change"),
    ],
)
def test_step_when_params_are_apart_or_not_compared_then_says_so(
    peer: Sequence[float | None], off: float, said: str
) -> None:
    assert said in _row_of("peer", list(step_readings.lines([_of_step(OURS, peer, off)])))


def _fails(setting: StepSetting) -> NoReturn:
    raise RuntimeError("no memory")


@pytest.mark.parametrize("runs", (False, True))
def test_reading_when_ours_failed_then_no_peer_takes_its_place_as_the_reference(runs: bool) -> None:
    setting, reference = StepSetting(1, 64, 0, 1), list[Tensor]()
    peer = partial(Undistributed, adam=torch_adam(fused=True))
    entries = StepEntry("ours", peer if runs else _fails), StepEntry("peer", peer)
    readings = [read(entry, setting, 0, 1, reference) for entry in entries]
    assert [each.deviation for each in readings] == ([0.0, 0.0] if runs else [None, None])
    assert [each.why_not for each in readings] == ["" if runs else WHY_NOT, ""]
    assert bool(reference) is runs
