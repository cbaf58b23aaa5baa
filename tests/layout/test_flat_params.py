"""Flat params: neighbours with equal keys become one flat tensor, padding between them included."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distopt.layout import (
    BufferLayout,
    FlatParamPlan,
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


def planned(layout: BufferLayout, rank: int, keys: Sequence[int | None]) -> tuple[FlatParamPlan[int], ...]:
    """Those of a rank; `keys` by number of the param, None for one that is not updated."""
    return plan_flat_params(owned_shards(layout, rank), lambda name: keys[int(name.removeprefix("p"))])


@pytest.mark.parametrize(
    ("keys", "bucket_size", "expected"),
    [
        pytest.param([0, 0, 0], None, [(0, 0, 11, ["p0", "p1", "p2"])], id="all alike"),
        pytest.param([0, 0, 1], None, [(0, 0, 7, ["p0", "p1"]), (1, 8, 11, ["p2"])], id="a key changes"),
        pytest.param(
            [0, 1, 0], None, [(0, 0, 3, ["p0"]), (1, 4, 7, ["p1"]), (0, 8, 11, ["p2"])], id="only neighbours are joined"
        ),
        pytest.param([0, 0, 0], 5, [(0, 0, 7, ["p0", "p1"]), (0, 8, 11, ["p2"])], id="a bucket ends"),
        pytest.param([None, 0, 0], None, [(0, 4, 11, ["p1", "p2"])], id="the first is not updated"),
        pytest.param([0, None, 0], None, [(0, 0, 3, ["p0"]), (0, 8, 11, ["p2"])], id="the middle is not updated"),
        pytest.param([0, 0, None], None, [(0, 0, 7, ["p0", "p1"])], id="the last is not updated"),
        pytest.param([None, None, None], None, [], id="none is updated"),
    ],
)
def test_flat_params_when_given_an_example_then_these(
    keys: list[int | None], bucket_size: int | None, expected: list[tuple[int, int, int, list[str]]]
) -> None:
    params = [ParamSpec(f"p{index}", 3) for index in range(3)]
    layout = lay_out(params, num_shards=1, bucket_size=bucket_size, alignment_numel=4)
    flats = planned(layout, 0, keys)
    found = [(flat.key, flat.in_buffer, [shard.name for shard in flat.shards]) for flat in flats]
    assert found == [(key, Span(start, stop), names) for key, start, stop, names in expected]


@settings(deadline=None)
@given(layout=LAYOUTS, keys=KEYS)
def test_flat_params_when_random_then_they_hold_the_owned_shards_and_each_is_as_long_as_can_be(
    layout: BufferLayout, keys: list[int]
) -> None:
    in_params = {i for slot in layout.slots for i in range(slot.in_buffer.start, slot.in_buffer.stop)}
    buffer = list(range(layout.numel))
    for rank in range(layout.num_shards):
        flats = planned(layout, rank, keys)
        assert tuple(shard for flat in flats for shard in flat.shards) == owned_shards(layout, rank)
        assert all(left.in_buffer.stop <= right.in_buffer.start for left, right in pairwise(flats))
        kinds = [(flat.bucket, flat.key) for flat in flats]
        assert len(list(groupby(kinds))) == len(kinds)
        for flat in flats:
            assert {shard.bucket for shard in flat.shards} == {flat.bucket}
            assert {keys[int(shard.name.removeprefix("p"))] for shard in flat.shards} == {flat.key}
            owned = layout.buckets[flat.bucket].shard(rank, layout.num_shards)
            assert flat.in_buffer.intersect(owned) == flat.in_buffer
            elements = buffer[flat.in_buffer.as_slice()]
            assert flat.padding_numel == sum(element not in in_params for element in elements)
            assert flat.in_flat_param(flat.shards[0]).start == 0
            assert flat.in_flat_param(flat.shards[-1]).stop == len(elements)
            for shard in flat.shards:
                # From the place in the param alone.
                start = layout.slot_of[shard.name].in_buffer.start
                expected = [start + element for element in range(shard.in_param.start, shard.in_param.stop)]
                assert elements[flat.in_flat_param(shard).as_slice()] == expected
