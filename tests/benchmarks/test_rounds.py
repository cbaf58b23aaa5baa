"""Ratios of benchmarks/step.py and benchmarks/train.py: of the same round, also where a contestant failed in one."""

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

from peers import step_report, train_report
from peers.adam import torch_adam
from peers.machine import MemoryRates
from peers.report import Spread, over
from peers.step_contestants import StepEntry
from peers.step_reading import StepReading, read
from peers.steppers import StepSetting, Undistributed
from peers.train_contestants import FORWARD_BACKWARD
from peers.train_reading import TrainReading, losses_apart

NUMEL = 2**20
WHY_NOT = "RuntimeError: no memory"
#: In powers of two, so that ratios are exact: ours gets slower from round to round, the peer takes twice as long.
OURS, PEER = (1.0, 4.0, 16.0), (2.0, 8.0, 32.0)


def _step(name: str, seconds: Sequence[float | None], first: float | None = 0.0) -> list[StepReading]:
    """A reading a round; None for one that failed."""
    return [
        StepReading(name, NUMEL, number, why_not=WHY_NOT)
        if each is None
        else StepReading(name, NUMEL, number, (each,), None if number else first)
        for number, each in enumerate(seconds)
    ]


def _train(name: str, seconds: Sequence[float | None], losses: tuple[float, ...] = (4.0, 2.0)) -> list[TrainReading]:
    return [
        TrainReading(name, 2, NUMEL, number, why_not=WHY_NOT)
        if each is None
        else TrainReading(name, 2, NUMEL, number, (each,), 2 * each, 3.0 * NUMEL, losses)
        for number, each in enumerate(seconds)
    ]


def _alone(seconds: Sequence[float | None]) -> list[TrainReading]:
    return _train(FORWARD_BACKWARD.name, seconds, losses=())


def _of_step(ours: Sequence[float | None], peer: Sequence[float | None], first: float | None = 0.0) -> dict[str, Any]:
    """The peer is compared with ours where that has run in the first round."""
    rates = [MemoryRates(2.0**25, 2.0**26)] * len(ours)
    peers = _step("peer", peer, None if ours[0] is None else first)
    return step_report.summary(NUMEL, [*_step("ours", ours), *peers], rates)


def _of_train(ours: Sequence[float | None], peer: Sequence[float | None]) -> dict[str, Any]:
    alone = _alone([0.5] * len(ours))
    return train_report.summary([*alone, *_train("ours", ours), *_train("peer", peer)])


Summary = Callable[[Sequence[float | None], Sequence[float | None]], dict[str, Any]]
Lines = Callable[[Sequence[Mapping[str, Any]]], Iterator[str]]
SCRIPTS: dict[str, tuple[Summary, Lines]] = {
    "step": (_of_step, step_report.lines),
    "train": (_of_train, train_report.lines),
}
each_script = pytest.mark.parametrize(("summary", "lines"), SCRIPTS.values(), ids=SCRIPTS)


def _row_of(name: str, said: Sequence[str]) -> str:
    return next(line for line in said if line.startswith(f"{name} "))


def test_over_when_rounds_are_missing_then_is_of_those_that_both_have() -> None:
    assert over({0: 2.0, 2: 12.0}, {1: 4.0, 2: 3.0}) == Spread(4.0, 4.0, 4.0)
    assert over({0: 2.0}, {1: 4.0}) is None
    assert over({0: 1.0, 1: 6.0}, {0: 0.0, 1: 2.0}) == Spread(3.0, 3.0, 3.0)  # ours took no time in a round


@each_script
@pytest.mark.parametrize("missing", (0, 2))
@pytest.mark.parametrize("who", ("ours", "peer"))
def test_ratio_when_one_round_failed_then_is_that_of_the_rounds_of_both(
    summary: Summary, lines: Lines, missing: int, who: str
) -> None:
    rounds = {"ours": OURS, "peer": PEER}
    rounds[who] = tuple(None if number == missing else each for number, each in enumerate(rounds[who]))  # type: ignore[assignment]
    found = summary(rounds["ours"], rounds["peer"])
    assert found["peer / ours"] == {"peer": Spread(2.0, 2.0, 2.0)}
    said = list(lines([found]))
    assert f"failed in 1 round: {WHY_NOT}" in _row_of(who, said)
    assert "peer)/ours 2.00" in said[-1] or "peer/ours 2.00" in said[-1]


@each_script
def test_lines_when_ours_never_ran_then_say_so_and_why(summary: Summary, lines: Lines) -> None:
    said = list(lines([summary([None, None], [1.0, 1.0])]))
    assert _row_of("ours", said).endswith(WHY_NOT)
    assert said[-1].endswith("ours did not run")
    assert "NOT COMPARED" in _row_of("peer", said)


@each_script
def test_lines_when_a_peer_never_ran_then_say_why_and_it_has_no_ratio(summary: Summary, lines: Lines) -> None:
    said = list(lines([summary([1.0, 1.0], [None, None])]))
    assert _row_of("peer", said).endswith(WHY_NOT)
    assert "peer" not in said[-1]


def test_step_when_the_first_round_failed_then_params_were_not_compared() -> None:
    found = _of_step(OURS, (None, 8.0, 32.0))
    assert found["deviation"] == {"ours": 0.0, "peer": None}
    assert "NOT COMPARED: it or ours failed in the first round" in _row_of("peer", list(step_report.lines([found])))


def _fails(setting: StepSetting) -> NoReturn:
    raise RuntimeError("no memory")


def test_reading_when_ours_failed_then_no_peer_takes_its_place_as_the_reference() -> None:
    setting, reference = StepSetting(1, 64, 0, 1), list[Tensor]()
    peer = partial(Undistributed, adam=torch_adam(fused=True))
    readings = [
        read(StepEntry(name, build), setting, 0, 1, reference) for name, build in (("ours", _fails), ("peer", peer))
    ]
    assert [(reading.deviation, reading.why_not) for reading in readings] == [(None, WHY_NOT), (None, "")]
    assert reference == []


def test_reading_when_ours_ran_then_peers_are_compared_with_it() -> None:
    setting, reference = StepSetting(1, 64, 0, 1), list[Tensor]()
    names, build = ("ours", "peer"), partial(Undistributed, adam=torch_adam(fused=True))
    assert [read(StepEntry(name, build), setting, 0, 1, reference).deviation for name in names] == [0.0, 0.0]


@pytest.mark.parametrize("off", (2e-3, math.nan))
def test_step_when_params_are_apart_then_says_that_it_is_not_the_same_work(off: float) -> None:
    said = _row_of("peer", list(step_report.lines([_of_step(OURS, PEER, off)])))
    assert said.endswith("NOT THE SAME WORK: params differ by more than 0.1% of their change")


def test_step_when_a_round_failed_then_shares_are_of_the_rates_of_the_others() -> None:
    # 30 * 2**20 bytes in 1 s and in 4 s; memory was twice as fast in the second round.
    rates = [MemoryRates(30 * 2.0**20, 60 * 2.0**20), MemoryRates(60 * 2.0**20, 120 * 2.0**20)]
    found = step_report.summary(NUMEL, [*_step("ours", (1.0, 4.0)), *_step("peer", (None, 4.0))], rates)
    assert found["share of the copy bandwidth"]["peer"] == Spread(0.125, 0.125, 0.125)
    assert found["share of the in-place bandwidth"]["ours"] == Spread(0.28125, 0.0625, 0.5)


def test_step_when_read_then_last_line_has_both_shares_of_ours() -> None:
    # 30 MiB in a second are 30/32 of what a copy moves, and half as much of what a product in place moves.
    said = list(step_report.lines([_of_step((1.0,), (2.0,))]))
    assert said[-1] == (
        "1 M: best peer (peer)/ours 2.00, ours at 94% of a copy's bandwidth, 47% of a product's in place"
    )


def test_training_when_forward_alone_failed_in_a_round_then_what_is_beyond_it_is_of_the_others() -> None:
    readings = [*_alone((None, 2.0, 8.0)), *_train("ours", OURS), *_train("peer", PEER)]
    found = train_report.summary(readings)
    assert found["beyond forward and backward, peer / ours"] == {"peer": Spread(3.0, 3.0, 3.0)}
    assert found["peer / ours"] == {"peer": Spread(2.0, 2.0, 2.0)}


def test_losses_when_rounds_are_missing_then_are_compared_with_the_same_round() -> None:
    ours = [TrainReading("ours", 2, 8, number, (1.0,), losses=(4.0 + number,)) for number in range(3)]
    peer = [TrainReading("peer", 2, 8, 2, (1.0,), losses=(9.0,))]
    assert losses_apart(peer, ours) == 0.5
    assert losses_apart(peer, ours[:2]) is None


def test_losses_when_one_is_not_a_number_then_are_infinitely_apart() -> None:
    assert losses_apart(_train("peer", (1.0,), (4.0, math.nan)), _train("ours", (1.0,))) == math.inf
