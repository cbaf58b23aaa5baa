"""Who owns what: every element has one owner, in four index spaces that agree, at a cost that ranks
do not raise."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any, SupportsIndex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distopt.errors import LayoutError
from megatron_distopt.layout import (
    BufferLayout,
    ParamShard,
    ParamSlot,
    ParamSpec,
    Span,
    lay_out,
    owned_shards,
)

LAYOUTS = st.builds(
    lay_out,
    st.lists(st.integers(1, 60), min_size=1, max_size=12).map(
        lambda numels: [ParamSpec(f"p{index}", numel) for index, numel in enumerate(numels)]
    ),
    num_shards=st.integers(1, 9),
    bucket_size=st.none() | st.integers(1, 120),
    alignment_numel=st.sampled_from((1, 2, 7, 64)),
)


def test_owned_shards_when_the_rank_is_none_of_the_group_then_refused() -> None:
    layout = lay_out([ParamSpec("a", 3), ParamSpec("b", 4)], num_shards=2)
    for rank in (-1, 2):
        with pytest.raises(
            LayoutError, match=f"Rank {rank} owns no shard, because there are only 2 shards"
        ):
            owned_shards(layout, rank)


@settings(deadline=None)
@given(layout=LAYOUTS)
def test_owned_shards_when_all_ranks_are_taken_then_every_param_is_tiled_once(
    layout: BufferLayout,
) -> None:
    shards: list[ParamShard] = []
    for rank in range(layout.num_shards):
        owned = owned_shards(layout, rank)
        assert all(left.in_buffer.stop <= right.in_buffer.start for left, right in pairwise(owned))
        assert {shard.rank for shard in owned} <= {rank}
        shards += owned
    for slot in layout.slots:
        pieces = sorted(shard.in_param for shard in shards if shard.name == slot.name)
        assert pieces[0].start == 0
        assert pieces[-1].stop == slot.in_buffer.numel
        assert all(left.stop == right.start for left, right in pairwise(pieces))
    for shard in shards:
        slot, bucket = layout.slot_of[shard.name], layout.buckets[shard.bucket]
        shard_numel = bucket.in_buffer.numel // layout.num_shards
        assert shard.in_param.numel > 0
        assert slot.bucket == shard.bucket
        assert shard.in_param.moved_by(slot.in_buffer.start) == shard.in_buffer
        assert shard.in_bucket.moved_by(bucket.in_buffer.start) == shard.in_buffer
        assert shard.in_shard.moved_by(shard.rank * shard_numel) == shard.in_bucket
        assert shard.in_shard.stop <= shard_numel
    # Each border between two ranks cuts at most one param of the bucket.
    assert len(shards) <= len(layout.slots) + (layout.num_shards - 1) * len(layout.buckets)


class CountedSlots(tuple[ParamSlot, ...]):
    """Counts how many slots are looked up and how often all of them are gone through."""

    lookups = 0
    passes = 0

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        self.lookups += len(range(len(self))[index]) if isinstance(index, slice) else 1
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        self.passes += 1
        return super().__iter__()


def large_layout(
    num_shards: int, *, num_params: int = 4000, bucket_size: int | None = None
) -> BufferLayout:
    """2 * 10^11 elements in 4,000 params of several sizes."""
    numels = [(index % 5 + 1) * (10**8 // 6) for index in range(num_params)]
    params = [ParamSpec(f"p{index}", numel) for index, numel in enumerate(numels)]
    return lay_out(params, num_shards=num_shards, bucket_size=bucket_size)


@pytest.mark.parametrize("bucket_size", [None, 40 * 10**9])
@pytest.mark.parametrize("num_shards", [2, 4096])
def test_owned_shards_when_the_model_is_large_then_a_rank_looks_only_at_what_it_owns(
    num_shards: int, bucket_size: int | None
) -> None:
    layout = large_layout(num_shards, bucket_size=bucket_size)
    slots = CountedSlots(layout.slots)
    counted = dataclasses.replace(layout, slots=slots)
    for rank in (0, num_shards // 2, num_shards - 1):
        slots.lookups = slots.passes = 0
        shards = owned_shards(counted, rank)
        assert shards
        # One pass for the starts, for the first rank; then in each bucket what is owned, and one
        # slot too many on either side.
        assert slots.passes == (rank == 0)
        assert slots.lookups <= len(shards) + 2 * len(layout.buckets)


def test_lay_out_when_ranks_are_4096_then_it_costs_what_two_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = 0
    prove = Span.__post_init__

    def count(span: Span) -> None:
        nonlocal made
        made += 1
        prove(span)

    monkeypatch.setattr(Span, "__post_init__", count)
    spans_of: dict[tuple[int, int], int] = {}
    for num_params in (1000, 2000):
        for num_shards in (2, 4096):
            made = 0
            large_layout(num_shards, num_params=num_params)
            spans_of[num_params, num_shards] = made
    # A span with its shift and its proof a param, and 3 for the bucket: nothing for the ranks,
    # linear in the params.
    assert spans_of[2000, 4096] == spans_of[2000, 2]
    assert spans_of[2000, 2] - spans_of[1000, 2] == 3 * 1000
