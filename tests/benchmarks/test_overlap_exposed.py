"""The arithmetic of benchmarks/overlap.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from peers.overlap_contestants import best_of, is_ours, overlap_entries, picked
from peers.overlap_probe import Probe
from peers.overlap_report import (
    Context,
    WiredReading,
    WireTimes,
    exposed_part,
    lines,
    processor_part,
    slowest,
    summary,
    wire_times,
)
from peers.report import Rounds
from peers.train_reading import TrainReading

RANKS, NUMEL = 2, 10_000_000


def _reading(name: str, seconds: float, losses: tuple[float, ...] = (4.0, 2.0)) -> TrainReading:
    return TrainReading(name, RANKS, NUMEL, 0, (seconds,), 2 * seconds, 3.0 * NUMEL, losses)


def _readings() -> list[WiredReading]:
    """In quarters of a second, so that what comes out is exact."""
    mute = {"ours": 0.5, "ours, overlap": 0.5, "fork of 2023": 1.0}
    wired = {"ours": 1.0, "ours, overlap": 0.625, "fork of 2023": 2.0}
    found = [WiredReading(None, 1.0, _reading(name, seconds)) for name, seconds in mute.items()]
    return found + [WiredReading(5.0, 2.0, _reading(name, seconds)) for name, seconds in wired.items()]


def _summary(gigabits: float) -> dict[str, Any]:
    context = Context(Probe(gigabits, 50.0), forward=[0.125], both=[0.375], best="ours, overlap", cores=2)
    return summary(5.0, _readings(), context)


def test_wire_times_when_two_ranks_then_half_the_model_is_sent() -> None:
    # 10 M elements, of which 5 M are sent: 20 MB of fp32 and 10 MB of bf16 at 0.625 GB/s.
    assert wire_times(NUMEL, 2, 5.0) == WireTimes(reduce_scatter=0.032, all_gather=0.016)


def _rounds(*seconds: float | None) -> Rounds[TrainReading]:
    """Of one contestant, whose processor time is twice its time; None for a round that failed."""
    found = [
        TrainReading("ours", RANKS, NUMEL, number, why_not="not run")
        if each is None
        else TrainReading("ours", RANKS, NUMEL, number, (each,), 2 * each)
        for number, each in enumerate(seconds)
    ]
    return Rounds(found)


def test_exposed_when_a_round_is_faster_than_without_communication_then_is_below_zero() -> None:
    steps, mute = _rounds(1.0, 2.0), _rounds(0.75, 2.5)
    assert [exposed_part(mute, each) for each in steps.of["ours"]] == [0.25, -0.25]


def test_processor_part_when_both_cores_share_it_then_is_half_of_it_over_the_step() -> None:
    [step] = _rounds(2.0).of["ours"]
    assert processor_part(_rounds(1.5), 2, step) == 0.25  # 4 s of processor time, of which 3 without communication


def test_parts_when_a_round_failed_on_one_side_then_there_are_none_of_it() -> None:
    for steps, mute in ((_rounds(None, 2.0), _rounds(1.0, 1.0)), (_rounds(9.0, 2.0), _rounds(None, 1.0))):
        assert [exposed_part(mute, each) for each in steps.of["ours"]] == [None, 0.5]
        assert [processor_part(mute, 2, each) for each in steps.of["ours"]] == [None, 0.5]


def test_summary_when_read_then_compares_each_with_itself_and_with_ours() -> None:
    found = _summary(5.0)
    exposed = {name: part.median for name, part in found["exposed part of the step"].items()}
    assert exposed == {"ours": 0.5, "ours, overlap": 0.2, "fork of 2023": 0.5}
    ratios = {name: ratio.median for name, ratio in found["peer / ours with overlap"].items()}
    assert ratios == {"ours": 1.6, "fork of 2023": 3.2}


@pytest.mark.parametrize(("gigabits", "is_longer"), [(1.0, True), (0.9, False)])
def test_summary_when_rate_is_low_then_backward_is_shorter(gigabits: float, is_longer: bool) -> None:
    # Backward takes 0.25 s; 30 MB take 0.24 s at 1 Gbit/s.
    assert _summary(gigabits)["backward_is_longer"] is is_longer


def test_last_line_when_too_much_is_exposed_then_says_so() -> None:
    assert list(lines([_summary(5.0)]))[-1] == (
        "5 Gbit/s: no overlap/ours 1.60, exposed 20% (NOT below 10%), fork of 2023/ours 3.20"
    )


def test_last_line_when_backward_is_shorter_then_goal_does_not_apply() -> None:
    assert "exposed 20% (backward is shorter than the communication), fork of 2023" in list(lines([_summary(0.5)]))[-1]


def test_lines_when_losses_differ_or_a_contestant_was_not_run_then_says_so() -> None:
    failed = TrainReading("DeepSpeed", RANKS, NUMEL, 0, why_not="not installed")
    readings = [*_readings(), WiredReading(5.0, 2.0, _reading("torch FSDP2", 1.0, losses=(4.0, 2.5)))]
    readings.append(WiredReading(5.0, 2.0, failed))
    context = Context(Probe(5.0, 50.0), forward=[0.125], both=[0.375], best="ours, overlap", cores=2)
    rows = {line.split("  ")[0]: line for line in lines([summary(5.0, readings, context)])}
    assert rows["torch FSDP2"].endswith("NOT THE SAME WORK: losses differ by more than 0.1%")
    assert "NOT" not in rows["fork of 2023"]
    assert rows["DeepSpeed"].endswith("not installed")


def test_slowest_when_ranks_were_timed_apart_then_takes_the_longer_of_each_block() -> None:
    ranks = [TrainReading("ours", 2, 8, 0, seconds, 1.0) for seconds in ((0.5, 2.0), (1.0, 1.5))]
    assert slowest(ranks) == TrainReading("ours", 2, 8, 0, (1.0, 2.0), 1.0)
    failed = TrainReading("ours", 2, 8, 0, why_not="not installed")
    assert slowest([ranks[0], failed]) is failed


def test_picked_when_peers_are_named_then_this_package_runs_with_and_without_overlap() -> None:
    names = [entry.name for entry in picked([], ["fork of 2023"])]
    assert names[:2] == ["ours", "ours, overlap"]
    assert [name for name in names if not is_ours(name)] == ["fork of 2023"]
    # In networks of their own ranks send messages anyway.
    assert "ours, messages" not in [entry.name for entry in picked([], [])]


def test_best_when_all_are_there_then_has_every_overlap_that_there_is() -> None:
    entries = overlap_entries([])
    names = [entry.name for entry in entries]
    assert best_of(entries) == ("ours, both overlaps" if "ours, both overlaps" in names else "ours, overlap")
