"""What `plan` says about time: what backward and the next forward can hide."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from megatron_distopt.cli.plan_choice import StagePlan, plan_choice
from megatron_distopt.cli.plan_model import Choice, ParallelSizes
from megatron_distopt.cli.plan_times import Assumed, TimelineLane, times_of
from megatron_distopt.layout.estimate import Collective, Kind, stats_collective
from tests.support.plan_command import BUCKET, GPT


def small_plan(dp: int = 4, bucket_size: int | None = BUCKET, **sizes: Any) -> StagePlan:
    return plan_choice(replace(GPT, **sizes), Choice(ParallelSizes(dp=dp), bucket_size=bucket_size)).fullest


def test_times_when_there_is_one_bucket_then_nothing_is_hidden() -> None:
    times = times_of(small_plan(bucket_size=None), Assumed(1e6, backward_seconds=10.0))
    assert times.timeline is not None
    assert times.timeline.exposed_scatter_seconds == pytest.approx(times.scatter_seconds)
    assert times.timeline.exposed_gather_seconds == pytest.approx(times.gather_seconds)
    assert times.exposed_seconds == pytest.approx(times.seconds)


def test_times_when_backward_takes_no_time_then_nothing_is_hidden() -> None:
    times = times_of(small_plan(), Assumed(1e6, backward_seconds=0.0))
    assert times.exposed_seconds == pytest.approx(times.seconds)


def test_times_when_backward_is_long_then_one_bucket_at_each_end_is_left() -> None:
    """Untied, so that a bucket that backward finishes early is first, and no bucket waits for a tied embedding."""
    plan = small_plan(is_tied=False)
    assumed = Assumed(1e6, backward_seconds=1e3)
    seconds = [assumed.seconds_of(each) for _, each in plan.collectives if each.kind is Kind.REDUCE_SCATTER]
    gathers = [assumed.seconds_of(each) for _, each in plan.collectives if each.kind is Kind.ALL_GATHER]
    times = times_of(plan, assumed)
    assert times.timeline is not None
    assert len(seconds) > 2
    assert times.timeline.exposed_scatter_seconds == pytest.approx(seconds[-1])
    assert times.timeline.exposed_gather_seconds == pytest.approx(gathers[-1])


def test_times_when_nobody_says_how_long_backward_is_then_no_timeline() -> None:
    times = times_of(small_plan(), Assumed(1e6))
    assert (times.timeline, times.exposed_seconds) == (None, None)
    assert times.seconds == pytest.approx(sum(each.sent_nbytes for _, each in small_plan().collectives) / 1e6)


@pytest.mark.parametrize("backward", [0.01, 0.1, 0.4, 2.0])
@pytest.mark.parametrize("sizes", [{}, {"is_tied": False}, {"experts": 4, "layers": 8}])
def test_timeline_when_drawn_then_no_lane_is_busy_twice_and_the_waits_are_those_told(
    backward: float, sizes: dict[str, Any]
) -> None:
    assumed = Assumed(1e6, hop_seconds=1e-4, backward_seconds=backward, update_seconds=0.01)
    times = times_of(small_plan(**sizes), assumed)
    assert times.timeline is not None
    ends = {}
    for lane in TimelineLane:
        spans = sorted((each.start, each.stop) for each in times.timeline.intervals if each.lane is lane)
        assert all(left[1] <= right[0] + 1e-12 for left, right in itertools.pairwise(spans))
        ends[lane] = spans[-1][1] if spans else 0.0
    computing = backward * 1.5 + (assumed.update_seconds or 0.0)
    assert ends[TimelineLane.COMPUTE] == pytest.approx(computing + (times.exposed_seconds or 0.0))
    assert max(times.seconds - backward * 1.5, 0.0) <= (times.exposed_seconds or 0.0) + 1e-9
    assert (times.exposed_seconds or 0.0) <= times.seconds + 1e-9


@pytest.mark.parametrize("is_tied", [True, False])
def test_timeline_when_the_output_layer_is_on_a_stage_of_its_own_then_a_tied_one_cannot_be_hidden(
    is_tied: bool,
) -> None:
    """Its gradient waits for the sum with the first stage's, after backward; an untied one's is the first of all."""
    choice = Choice(
        ParallelSizes(dp=4, pp=2), bucket_size=128 * 40
    )  # the output layer fills a bucket, the first in the buffer
    plan = plan_choice(replace(GPT, is_tied=is_tied, positions=0), choice).fullest
    layout = plan.parts[0].layout
    assert (plan.stage, layout.slots[0].name, layout.slots[1].bucket) == (1, "output_layer.weight", 1)
    times = times_of(plan, Assumed(1e9, backward_seconds=10.0))
    assert times.timeline is not None
    starts = {each.label: each.start for each in times.timeline.intervals if each.lane is TimelineLane.SEND}
    scatters = [start for label, start in starts.items() if label.startswith("reduce-scatter")]
    assert (starts["reduce-scatter 0"] >= 10.0, starts["reduce-scatter 0"] == min(scatters)) == (is_tied, not is_tied)
    assert starts["all-gather 0"] == max(starts.values())  # forward needs it last either way


def test_collective_when_ranks_are_many_then_hops_and_bytes_are_those_of_a_ring() -> None:
    ring = Collective(Kind.REDUCE_SCATTER, 4096 * 100, 4096)
    assert (ring.sent_nbytes, ring.num_hops) == (4095 * 100, 4095)
    (stats,) = stats_collective(4096)
    assert (stats.nbytes, stats.num_hops) == (24, 24)
    assert list(stats_collective(1)) == []
    assert Assumed(1e6, 1e-6).seconds_of(ring) == pytest.approx(0.4095 + 0.004095)
