"""Tables of benchmarks/slow_networks.py: ratios of steps to bf16's of the same round, and whether
the goals are met."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from peers.train_contestants import BF16, FP32
from peers.train_readings import TrainReading
from slow_networks import NodeReading, lines, summary


def _readings(name: str, *rounds: float | None) -> list[NodeReading]:
    """A round each of three steps, or one that failed; the seconds are in powers of two, so that
    ratios are exact."""
    found = [
        TrainReading(name, 4, 1000, number, why_not="OSError: gone")
        if each is None
        else TrainReading(
            name, 4, 1000, number, (each, 2 * each, 4 * each), sent_nbytes=2500.0, losses=(2.0, 1.0)
        )
        for number, each in enumerate(rounds)
    ]
    return [NodeReading(1.0, 2, reading) for reading in found]


def test_ratios_when_a_round_failed_then_they_are_of_the_others_each_to_its_own_round() -> None:
    readings = [*_readings(FP32, 2.0, 8.0, 32.0), *_readings(BF16, 1.0, 4.0, None)]
    found = summary(1.0, 2, readings)
    assert found["contestants"][FP32]["over bf16's"] == {"lower": 1.25, "median": 2.0, "upper": 3.5}
    assert found["contestants"][BF16]["losses apart"] == 0.0
    assert found["contestants"][BF16]["why_not"] == "OSError: gone"
    text = "\n".join(lines([found], {1.0: 0.95}))
    assert (
        "1 Gbit/s (0.95 reached), 2 nodes of 2" in text
        and "2.50" in text
        and "OSError: gone" in text
    )
    met = [line.rpartition("; ")[2] for line in text.splitlines() if line.startswith("goal")]
    assert met == ["met"]


@pytest.mark.parametrize("name", [FP32, BF16])
def test_table_when_a_contestant_never_ran_then_it_says_why_and_the_goals_are_not_met(
    name: str,
) -> None:
    readings = [
        reading
        for each in (FP32, BF16)
        for reading in _readings(each, None if each == name else 1.0)
    ]
    text = "\n".join(lines([summary(1.0, 2, readings)], {1.0: 1.0}))
    assert "OSError: gone" in text
    assert text.count("NOT met") == 1
