"""Where every param lies in a contiguous buffer, and how the buffer is cut into buckets.

One type serves every generation of Megatron: the 2023 forks split a whole buffer, which is a layout
of *one* bucket, and megatron-core has many buckets. `lay_out` makes a layout; `adopt` makes one for
buffers that a host has already allocated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from megatron_distopt.errors import LayoutError
from megatron_distopt.layout.spans import Span

#: Number of buckets of a buffer, within the bounds below.
_USUAL_BUCKETS = 8
#: Smaller shards of a bucket are not worth a message, and in a larger bucket the last reduction
#: would take long.
_LEAST_SHARD_NUMEL, _MOST_BUCKET_SIZE = 1 << 17, 40_000_000
#: How many 16-bit elements a device loads or stores at a time, and how many elements share a scale
#: in low precision.
VECTOR_NUMEL, BLOCK_NUMEL = 8, 128
#: Each param begins at a multiple of this, in elements: enough for the kernels of all accelerators.
ALIGNMENT_NUMEL = 64


def alignment_for(*forms: str) -> int:
    """The alignment of params in elements, for state in these forms. Elements that share a scale
    are not cut apart."""
    return ALIGNMENT_NUMEL if set(forms) <= {"float32"} else BLOCK_NUMEL


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A param without its tensor."""

    name: str  # unique among the params of one optimizer
    numel: int
    shape: tuple[int, ...] = ()  # as in the module; `()` if it does not matter
    dtype: str = ""  # of the model param, e.g. "bfloat16"

    def __post_init__(self) -> None:
        if self.numel < 1:
            raise LayoutError(
                f"Param {self.name!r} has {self.numel} elements, but it needs at least 1. Freeze "
                "or drop params without elements."
            )
        if self.shape and math.prod(self.shape) != self.numel:
            raise LayoutError(
                f"Param {self.name!r} has {self.numel} elements, which does not fit its shape "
                f"{self.shape}. Give the param's own shape."
            )


@dataclass(frozen=True, slots=True)
class ParamSlot:
    """The place of one param in a buffer. A param lies in one bucket."""

    name: str
    bucket: int
    in_buffer: Span


@dataclass(frozen=True, slots=True)
class Bucket:
    """The unit of one collective: a stretch of the buffer, padded at its end so that all shards are
    equal."""

    index: int
    in_buffer: Span
    numel_unpadded: int  # up to the end of its last param

    def __post_init__(self) -> None:
        if not 0 < self.numel_unpadded <= self.in_buffer.numel:
            raise LayoutError(
                f"numel_unpadded of bucket {self.index} is {self.numel_unpadded}, but it must be "
                f"from 1 to its {self.in_buffer.numel} elements. Give the end of its last param."
            )

    def shard(self, rank: int, num_shards: int) -> Span:
        """The part of the buffer that `rank` owns in this bucket."""
        numel = self.in_buffer.numel // num_shards
        return Span(rank * numel, (rank + 1) * numel).moved_by(self.in_buffer.start)

    def holders(self, in_buffer: Span, num_shards: int) -> range:
        """The ranks that own elements of a non-empty stretch of the bucket."""
        numel, in_bucket = (
            self.in_buffer.numel // num_shards,
            in_buffer.relative_to(self.in_buffer.start),
        )
        return range(in_bucket.start // numel, (in_bucket.stop - 1) // numel + 1)


@dataclass(frozen=True)
class BufferLayout:
    """Slots in buffer order and the buckets that tile the buffer. The constructor checks them."""

    slots: tuple[ParamSlot, ...]  # disjoint, in buffer order, each inside its bucket
    buckets: tuple[Bucket, ...]  # tile the buffer from 0, each divisible by `num_shards`
    num_shards: int  # size of the data-parallel group

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise LayoutError(
                f"num_shards is {self.num_shards}, but it must be at least 1. Give the "
                "data-parallel size."
            )
        if not self.buckets:
            raise LayoutError("The buffer has no buckets. Drop a buffer without params.")
        start = 0
        for index, bucket in enumerate(self.buckets):
            if bucket.in_buffer.numel % self.num_shards:
                raise LayoutError(
                    f"Bucket {bucket.index} has {bucket.in_buffer.numel} elements, which cannot be "
                    f"divided into {self.num_shards} equal shards. Pad the end of the bucket."
                )
            if (bucket.index, bucket.in_buffer.start) != (index, start):
                raise LayoutError(
                    f"Bucket {bucket.index} is at {bucket.in_buffer}, but bucket {index} must "
                    f"start at {start}. Give the buckets in order and without gaps."
                )
            start = bucket.in_buffer.stop
        if len({slot.name for slot in self.slots}) != len(self.slots):
            raise LayoutError("Two params of a buffer have the same name. Give full names.")
        for left, right in pairwise(self.slots):
            if left.in_buffer.stop > right.in_buffer.start:
                raise LayoutError(
                    f"Param {left.name} at {left.in_buffer} does not end before param {right.name} "
                    f"at {right.in_buffer}. Give the slots in buffer order."
                )
        unpadded = [
            Span(0, bucket.numel_unpadded).moved_by(bucket.in_buffer.start)
            for bucket in self.buckets
        ]
        for slot in self.slots:
            if not slot.in_buffer.numel:
                raise LayoutError(
                    f"Param {slot.name} has no elements. Freeze it with requires_grad_(False) "
                    "before the optimizer is built."
                )
            if not 0 <= slot.bucket < len(self.buckets):
                raise LayoutError(
                    f"Param {slot.name} is in bucket {slot.bucket}, but there are only "
                    f"{len(self.buckets)} buckets. Give each param its bucket."
                )
            if slot.in_buffer.intersect(unpadded[slot.bucket]) != slot.in_buffer:
                raise LayoutError(
                    f"Param {slot.name} at {slot.in_buffer} is not inside the unpadded part of "
                    f"bucket {slot.bucket} at {unpadded[slot.bucket]}. Give each param its bucket."
                )

    @property
    def numel(self) -> int:  # padding included
        return self.buckets[-1].in_buffer.stop

    @property
    def shard_numel(self) -> int:  # of one rank, padding included
        return self.numel // self.num_shards

    @cached_property
    def places(self) -> dict[str, int]:
        """By name, where each param would begin without padding for ranks and buckets."""
        unit = next(
            unit
            for unit in (BLOCK_NUMEL, ALIGNMENT_NUMEL, 1)
            if not any(start % unit for start in self.starts)
        )
        places = accumulate(
            (_round_up(slot.in_buffer.numel, unit) for slot in self.slots), initial=0
        )
        return dict(zip((slot.name for slot in self.slots), places, strict=False))

    @cached_property
    def starts(self) -> list[int]:
        """Where each slot begins."""
        return [slot.in_buffer.start for slot in self.slots]

    @cached_property
    def slot_of(self) -> dict[str, ParamSlot]:
        return {slot.name: slot for slot in self.slots}

    @cached_property
    def slots_of_bucket(self) -> tuple[tuple[ParamSlot, ...], ...]:
        slots: list[list[ParamSlot]] = [[] for _ in self.buckets]
        for slot in self.slots:
            slots[slot.bucket].append(slot)
        return tuple(map(tuple, slots))


def lay_out(
    params: Sequence[ParamSpec],
    *,
    num_shards: int,
    bucket_size: int | None = None,
    alignment_numel: int = ALIGNMENT_NUMEL,
    last: Sequence[ParamSpec] = (),
) -> BufferLayout:
    """Places the params one after the other, in the order given, and cuts buckets at param
    boundaries.

    Args:
        params: in buffer order; hosts give the reverse of registration, roughly the order of
            backward.
        num_shards: size of the data-parallel group.
        bucket_size: a bucket ends with the param that fills it to this size; None for one bucket.
        alignment_numel: every param starts at a multiple of this; the forks of 2023 use 1. If it is
            a multiple of 128 or of 8, shards start at multiples of that, too. With 128 a block of
            state in low precision lies in one param and on one rank, for any number of ranks and
            buckets. 64 is enough for the kernels of all accelerators.
        last: params that come after the others, in buckets of their own.

    >>> layout = lay_out([ParamSpec("a", 3), ParamSpec("b", 4)], num_shards=2, alignment_numel=1)
    >>> layout.slots[1], layout.numel
    (ParamSlot(name='b', bucket=0, in_buffer=Span(start=3, stop=7)), 8)
    """
    numbers = {
        "num_shards": num_shards,
        "alignment_numel": alignment_numel,
        "bucket_size": bucket_size,
    }
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise LayoutError(f"{name} is {number}, but it must be at least 1. Write {name}=1.")
    slots: list[ParamSlot] = []
    buckets: list[Bucket] = []
    shard_unit = next(
        unit for unit in (BLOCK_NUMEL, VECTOR_NUMEL, 1) if alignment_numel % unit == 0
    )
    bucket_start = cursor = 0
    ends = (len(params), len(params) + len(last))
    for number, param in enumerate([*params, *last], start=1):
        in_buffer = Span(0, param.numel).moved_by(_round_up(cursor, alignment_numel))
        slots.append(ParamSlot(param.name, len(buckets), in_buffer))
        cursor = in_buffer.stop
        is_full = bucket_size is not None and cursor - bucket_start >= bucket_size
        if is_full or number in ends:
            stop = bucket_start + _round_up(cursor - bucket_start, num_shards * shard_unit)
            buckets.append(Bucket(len(buckets), Span(bucket_start, stop), cursor - bucket_start))
            bucket_start = cursor = stop
    return BufferLayout(tuple(slots), tuple(buckets), num_shards)


def default_bucket_size(numel: int, num_shards: int) -> int:
    """The bucket size for a buffer of `numel` elements, if none is given and communication is
    overlapped.

    >>> [default_bucket_size(numel, 4) for numel in (100_000_000, 1000, 10**10)]
    [12500000, 524288, 40000000]
    """
    least = _LEAST_SHARD_NUMEL * num_shards
    return max(min(-(-numel // _USUAL_BUCKETS), _MOST_BUCKET_SIZE), least)


def adopt(
    slots: Iterable[ParamSlot],
    bucket_spans: Sequence[Span],
    *,
    num_shards: int,
    numel_unpadded: Sequence[int],
) -> BufferLayout:
    """The layout of a buffer that a host has allocated. `slots` may be in any order;
    `numel_unpadded` has a number for each bucket."""
    buckets = [
        Bucket(i, span, numel)
        for i, (span, numel) in enumerate(zip(bucket_spans, numel_unpadded, strict=True))
    ]
    ordered = sorted(slots, key=lambda slot: slot.in_buffer)
    return BufferLayout(tuple(ordered), tuple(buckets), num_shards)


def choose_buckets(layouts: Sequence[BufferLayout], fraction: float) -> list[frozenset[int]]:
    """The buckets whose state is kept in CPU memory, by buffer: the first ones, until the fraction
    is reached.

    Only whole buckets are chosen, so they hold at least the fraction: of a single bucket, any
    fraction above 0 takes all.

    Args:
        layouts: the layouts of the buffers of 16-bit params, in the order in which their gradients
            arrive in backward.
        fraction: the fraction of their elements, padding included; from 0 to 1.

    >>> layout = lay_out([ParamSpec(name, 64) for name in "abcd"], num_shards=2, bucket_size=64)
    >>> [sorted(*choose_buckets([layout], fraction)) for fraction in (0.0, 0.25, 0.26, 1.0)]
    [[], [0], [0, 1], [0, 1, 2, 3]]
    """
    wanted = fraction * sum(layout.numel for layout in layouts)
    chosen, taken = list[frozenset[int]](), 0
    for layout in layouts:
        reached = [taken + bucket.in_buffer.start for bucket in layout.buckets]
        chosen.append(frozenset(index for index, numel in enumerate(reached) if numel < wanted))
        taken += layout.numel
    return chosen


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
