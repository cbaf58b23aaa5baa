"""Where params lie and how the buffer is cut: examples, laws, and every refusal."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distopt.errors import LayoutError
from megatron_distopt.layout import Bucket, BufferLayout, ParamSlot, ParamSpec, Span, adopt, lay_out

NUM_SHARDS = st.integers(1, 9)
BUCKET_SIZE = st.none() | st.integers(1, 120)
ALIGNMENT = st.sampled_from((1, 2, 7, 64))


def params_of(numels: Sequence[int]) -> list[ParamSpec]:
    return [ParamSpec(f"p{index}", numel) for index, numel in enumerate(numels)]


PARAMS = st.lists(st.integers(1, 60), min_size=1, max_size=12).map(params_of)


@settings(deadline=None)
@given(
    params=PARAMS,
    num_shards=NUM_SHARDS,
    bucket_size=BUCKET_SIZE,
    alignment_numel=ALIGNMENT,
    random=st.randoms(use_true_random=False),
)
def test_lay_out_when_random_then_buckets_tile_the_buffer_hold_their_params_and_can_be_adopted(
    params: list[ParamSpec],
    num_shards: int,
    bucket_size: int | None,
    alignment_numel: int,
    random: Random,
) -> None:
    layout = lay_out(
        params, num_shards=num_shards, bucket_size=bucket_size, alignment_numel=alignment_numel
    )
    spans = [bucket.in_buffer for bucket in layout.buckets]
    assert [bucket.index for bucket in layout.buckets] == list(range(len(spans)))
    assert (spans[0].start, spans[-1].stop) == (0, layout.numel)
    assert layout.shard_numel * num_shards == layout.numel
    assert all(left.stop == right.start for left, right in pairwise(spans))
    assert [(slot.name, slot.in_buffer.numel) for slot in layout.slots] == [
        (p.name, p.numel) for p in params
    ]
    assert all(
        left.in_buffer.stop <= right.in_buffer.start for left, right in pairwise(layout.slots)
    )
    assert all(slot.in_buffer.start % alignment_numel == 0 for slot in layout.slots)
    assert bucket_size is not None or len(layout.buckets) == 1
    unit = 1 if alignment_numel % 8 else 8
    for bucket in layout.buckets:
        shards = [bucket.shard(rank, num_shards) for rank in range(num_shards)]
        assert len({shard.numel for shard in shards}) == 1
        assert (shards[0].start, shards[-1].stop) == (bucket.in_buffer.start, bucket.in_buffer.stop)
        assert all(left.stop == right.start for left, right in pairwise(shards))
        assert all(shard.start % unit == 0 for shard in shards)
        slots = [slot.in_buffer for slot in layout.slots if slot.bucket == bucket.index]
        stops = [slot.stop - bucket.in_buffer.start for slot in slots]
        starts = [bucket.in_buffer.start, *(slot.stop for slot in slots)]
        assert all(
            0 <= slot.start - at < alignment_numel for at, slot in zip(starts, slots, strict=False)
        )
        assert bucket.numel_unpadded == stops[-1]
        assert bucket.in_buffer.numel - bucket.numel_unpadded < num_shards * unit
        if bucket_size is not None:  # a bucket is closed by the first param that fills it
            assert all(stop < bucket_size for stop in stops[:-1])
            assert stops[-1] >= bucket_size or bucket is layout.buckets[-1]
    shuffled = list(layout.slots)
    random.shuffle(shuffled)
    unpadded = [bucket.numel_unpadded for bucket in layout.buckets]
    assert adopt(shuffled, spans, num_shards=num_shards, numel_unpadded=unpadded) == layout


def a_layout(
    *slots: tuple[str, int, int, int],
    buckets: Sequence[Bucket] = (Bucket(0, Span(0, 4), 4), Bucket(1, Span(4, 8), 4)),
    num_shards: int = 2,
) -> BufferLayout:
    """A layout by hand; a slot is (name, bucket, start, stop)."""
    placed = tuple(
        ParamSlot(name, bucket, Span(start, stop)) for name, bucket, start, stop in slots
    )
    return BufferLayout(placed, tuple(buckets), num_shards)


REFUSALS: list[tuple[Callable[[], object], str]] = [
    (lambda: ParamSpec("w", 0), "'w' has 0 elements"),
    (lambda: ParamSpec("w", 6, (2, 4)), "'w' has 6 elements, which does not fit its shape (2, 4)"),
    (lambda: Bucket(3, Span(0, 8), 0), "bucket 3 is 0, but it must be from 1 to its 8 elements"),
    (lambda: Bucket(3, Span(0, 8), 9), "bucket 3 is 9, but it must be from 1 to its 8 elements"),
    (lambda: a_layout(num_shards=0), "num_shards is 0"),
    (
        lambda: a_layout(num_shards=3),
        "Bucket 0 has 4 elements, which cannot be divided into 3 equal shards",
    ),
    (lambda: a_layout(buckets=()), "no bucket"),
    (
        lambda: a_layout(buckets=(Bucket(0, Span(0, 4), 4), Bucket(1, Span(6, 8), 2))),
        "Bucket 1 is at Span(start=6, stop=8), but bucket 1 must start at 4",
    ),
    (lambda: a_layout(("w", 0, 0, 2), ("w", 0, 2, 4)), "same name"),
    (
        lambda: a_layout(("v", 0, 0, 3), ("w", 0, 2, 4)),
        "v at Span(start=0, stop=3) does not end before param w",
    ),
    (lambda: a_layout(("w", 2, 0, 2)), "w is in bucket 2, but there are only 2 buckets"),
    (lambda: a_layout(("w", 0, 2, 6)), "w at Span(start=2, stop=6) is not inside"),
    (
        lambda: adopt(
            [ParamSlot("w", 0, Span(0, 4))], [Span(0, 4)], num_shards=2, numel_unpadded=[3]
        ),
        "not inside the unpadded part of bucket 0 at Span(start=0, stop=3)",
    ),
    (
        lambda: lay_out(params_of([3]), num_shards=0),
        "num_shards is 0, but it must be at least 1. Write num_shards=1",
    ),
    (lambda: lay_out(params_of([3]), num_shards=2, alignment_numel=-64), "alignment_numel is -64"),
    (lambda: lay_out(params_of([3]), num_shards=2, bucket_size=0), "bucket_size is 0"),
]


@pytest.mark.parametrize(("make", "text"), REFUSALS)
def test_layout_when_it_would_be_wrong_then_refused_with_what_and_why(
    make: Callable[[], object], text: str
) -> None:
    with pytest.raises(LayoutError, match=re.escape(text)):
        make()


def test_adopt_when_two_params_overlap_then_refused_whatever_the_order() -> None:
    slots = [ParamSlot("w", 0, Span(2, 4)), ParamSlot("v", 0, Span(0, 3))]
    with pytest.raises(LayoutError, match=r"v at .* does not end before param w"):
        adopt(slots, [Span(0, 4)], num_shards=2, numel_unpadded=[4])
