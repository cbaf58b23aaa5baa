"""Runs: neighbours with equal keys become one flat tensor, padding between them included."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distopt.errors import LayoutError
from megatron_distopt.layout import (
    BufferLayout,
    FlatParamPlan,
    ParamShard,
    ParamSpec,
    Span,
    lay_out,
    owned_shards,
    plan_flat_params,
)

LAYOUTS = st.builds(
    lay_out,
    st.lists(st.integers(1, 40), min_size=1, max_size=12).map(
        lambda numels: [ParamSpec(f"p{index}", numel) for index, numel in enumerate(numels)]
    ),
    num_shards=st.integers(1, 5),
    bucket_size=st.none() | st.integers(1, 120),
    alignment_numel=st.sampled_from((1, 2, 7, 16)),
)
#: By number of the param: which of three groups it is in.
KEYS = st.lists(st.integers(0, 2), min_size=12, max_size=12)


def key_by_number(keys: list[int], name: str) -> int:
    return keys[int(name.removeprefix("p"))]


def runs_of(layout: BufferLayout, rank: int, keys: list[int]) -> tuple[FlatParamPlan[int], ...]:
    return plan_flat_params(owned_shards(layout, rank), lambda name: key_by_number(keys, name))


@pytest.mark.parametrize(
    ("keys", "bucket_size", "runs"),
    [
        pytest.param([0, 0, 0], None, [(0, 0, 11, ["p0", "p1", "p2"])], id="all alike"),
        pytest.param([0, 0, 1], None, [(0, 0, 7, ["p0", "p1"]), (1, 8, 11, ["p2"])], id="a key changes"),
        pytest.param(
            [0, 1, 0], None, [(0, 0, 3, ["p0"]), (1, 4, 7, ["p1"]), (0, 8, 11, ["p2"])], id="only neighbours are joined"
        ),
        pytest.param([0, 0, 0], 5, [(0, 0, 7, ["p0", "p1"]), (0, 8, 11, ["p2"])], id="a bucket ends"),
    ],
)
def test_plan_runs_when_given_an_example_then_these_runs(
    keys: list[int], bucket_size: int | None, runs: list[tuple[int, int, int, list[str]]]
) -> None:
    params = [ParamSpec(f"p{index}", 3) for index in range(3)]
    layout = lay_out(params, num_shards=1, bucket_size=bucket_size, alignment_numel=4)
    planned = runs_of(layout, 0, keys)
    found = [
        (run.key, run.in_buffer.start, run.in_buffer.stop, [shard.name for shard in run.shards]) for run in planned
    ]
    assert found == runs


def test_flat_param_when_params_are_aligned_then_the_gap_between_them_is_padding_and_the_end_is_not() -> None:
    params = [ParamSpec("p0", 3), ParamSpec("p1", 3), ParamSpec("p2", 2)]
    layout = lay_out(params, num_shards=4, alignment_numel=4)
    assert layout.numel == 12  # 3, a gap of 1, 3, a gap of 1, 2, and 2 at the end of the bucket
    (run,) = runs_of(lay_out(params, num_shards=1, alignment_numel=4), 0, [0, 0, 0])
    assert (run.in_buffer, run.padding_numel) == (Span(0, 10), 2)
    assert [run.in_flat_param(shard) for shard in run.shards] == [Span(0, 3), Span(4, 7), Span(8, 10)]
    (last,) = runs_of(layout, 3, [0, 0, 0])  # the rank owns 9 to 12
    assert (last.in_buffer, last.padding_numel) == (Span(9, 10), 0)


def test_flat_param_when_it_starts_inside_a_param_then_in_run_counts_from_there() -> None:
    layout = lay_out([ParamSpec("p0", 5), ParamSpec("p1", 5)], num_shards=2, bucket_size=5, alignment_numel=1)
    first, second = runs_of(layout, 1, [0, 0])
    assert (first.bucket, first.in_buffer, first.in_flat_param(first.shards[0])) == (0, Span(3, 5), Span(0, 2))
    assert (second.bucket, second.in_buffer, second.in_flat_param(second.shards[0])) == (1, Span(9, 11), Span(0, 2))


def test_in_run_when_the_shard_lies_before_the_run_then_refused() -> None:
    layout = lay_out([ParamSpec("p0", 4), ParamSpec("p1", 4)], num_shards=1, alignment_numel=1)
    first, second = runs_of(layout, 0, [0, 1])
    with pytest.raises(LayoutError, match=r"\[-4, 0\)"):
        second.in_flat_param(first.shards[0])


def test_plan_runs_when_a_rank_owns_nothing_then_no_runs() -> None:
    layout = lay_out([ParamSpec("p0", 1)], num_shards=3)
    assert [len(runs_of(layout, rank, [0])) for rank in range(3)] == [1, 0, 0]


@settings(deadline=None)
@given(layout=LAYOUTS, keys=KEYS)
def test_plan_runs_when_random_then_they_hold_the_owned_shards_in_order(layout: BufferLayout, keys: list[int]) -> None:
    for rank in range(layout.num_shards):
        runs = runs_of(layout, rank, keys)
        assert tuple(shard for run in runs for shard in run.shards) == owned_shards(layout, rank)
        assert all(left.in_buffer.stop <= right.in_buffer.start for left, right in pairwise(runs))


@settings(deadline=None)
@given(layout=LAYOUTS, keys=KEYS)
def test_plan_runs_when_random_then_each_has_one_bucket_and_one_key_and_is_as_long_as_can_be(
    layout: BufferLayout, keys: list[int]
) -> None:
    for rank in range(layout.num_shards):
        runs = runs_of(layout, rank, keys)
        for run in runs:
            assert {shard.bucket for shard in run.shards} == {run.bucket}
            assert {key_by_number(keys, shard.name) for shard in run.shards} == {run.key}
            shard = layout.buckets[run.bucket].shard(rank, layout.num_shards)
            assert run.in_buffer.intersect(shard) == run.in_buffer
        kinds = [(run.bucket, run.key) for run in runs]
        assert len(list(groupby(kinds))) == len(kinds)


@settings(deadline=None)
@given(layout=LAYOUTS, keys=KEYS)
def test_flat_param_when_random_then_padding_belongs_to_no_param(layout: BufferLayout, keys: list[int]) -> None:
    in_params = {i for slot in layout.slots for i in range(slot.in_buffer.start, slot.in_buffer.stop)}
    for rank in range(layout.num_shards):
        for run in runs_of(layout, rank, keys):
            covered = range(run.in_buffer.start, run.in_buffer.stop)
            assert run.padding_numel == sum(element not in in_params for element in covered)


@settings(deadline=None)
@given(layout=LAYOUTS, keys=KEYS)
def test_in_run_when_random_then_it_points_at_the_elements_of_the_shard(layout: BufferLayout, keys: list[int]) -> None:
    buffer = list(range(layout.numel))
    for rank in range(layout.num_shards):
        for run in runs_of(layout, rank, keys):
            flat = buffer[run.in_buffer.as_slice()]
            assert run.in_flat_param(run.shards[0]).start == 0
            assert run.in_flat_param(run.shards[-1]).stop == run.in_buffer.numel
            for shard in run.shards:
                assert flat[run.in_flat_param(shard).as_slice()] == elements_of(shard, layout)


def elements_of(shard: ParamShard, layout: BufferLayout) -> list[int]:
    """The positions in the buffer, from the place in the param alone."""
    start = layout.slot_of[shard.name].in_buffer.start
    return [start + element for element in range(shard.in_param.start, shard.in_param.stop)]


@pytest.mark.parametrize(
    ("keys", "runs"),
    [
        pytest.param([None, 0, 0], [(0, 4, 11, ["p1", "p2"])], id="first"),
        pytest.param([0, None, 0], [(0, 0, 3, ["p0"]), (0, 8, 11, ["p2"])], id="between two alike"),
        pytest.param([0, 0, None], [(0, 0, 7, ["p0", "p1"])], id="last"),
        pytest.param([None, None, None], [], id="all"),
    ],
)
def test_plan_runs_when_a_param_is_not_updated_then_no_run_spans_it(
    keys: list[int | None], runs: list[tuple[int, int, int, list[str]]]
) -> None:
    layout = lay_out([ParamSpec(f"p{index}", 3) for index in range(3)], num_shards=1, alignment_numel=4)
    planned = plan_flat_params(owned_shards(layout, 0), lambda name: keys[int(name.removeprefix("p"))])
    found = [
        (run.key, run.in_buffer.start, run.in_buffer.stop, [shard.name for shard in run.shards]) for run in planned
    ]
    assert found == runs
