"""What benchmarks/digests.py measures."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.spawn import run_ranks

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import digests


def read(rank: int, size: int) -> digests.Reading:
    return digests.read(*digests.QUICK[0], rounds=2)


def test_record_when_measured_then_it_is_beside_the_step_of_the_same_model() -> None:
    (found,) = run_ranks(read, 1)
    assert (found.numel, found.tokens) == (99_520, 256)
    assert found.step_ns > 0


def test_share_when_fewer_steps_have_a_record_then_it_is_less() -> None:
    reading = digests.Reading(1000, 10, step_ns=50.0, record_ns=5.0)
    assert [reading.share(every) for every in digests.EVERY] == [0.1, 0.01, 0.001]
    assert [*digests.lines([reading])][1].split()[-3:] == ["10.00%", "1.00%", "0.10%"]
