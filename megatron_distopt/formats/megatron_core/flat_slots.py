"""Where params begin in a flat buffer that holds values and nothing else, and which params they are.

[Note: found by value] megatron-core saves main params as a flat buffer, in the order in which backward reaches them,
each at a multiple of 64 elements of its bucket since 0.8 and right after the one before until 0.7; what fills up a
bucket is not saved. A model param is its main param, rounded. So a param begins where the rounded values are those of a
model param, and a buffer is understood when such params cover it to its end. Nothing is concluded from sizes alone: a
wrong place would show only as a bad training.

[Note: told apart by order] Norms that are still all ones and biases that are still all zeros fit many slots. A buffer
holds params in the reverse of the order in which the model registers them, and files list them in that order, or in
parts of it, one for each rank that wrote. So a slot between two that are known can only be what lies between those in
every list. What is still open then is refused.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.layout import Placement

_ALIGNMENT = 64
#: Elements by which params are told apart before they are compared.
_HEAD = 16
#: Params up to this size stay in memory: many norms and biases may begin alike.
_SMALL_NUMEL = 1 << 14
_REMEDY = "Give the optimizer state and the model of one save"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Candidate:
    """A param of the model that may be in a flat buffer.

    Args:
        placement: of it in the whole model.
        dtype: of the model param.
        values: of the model param.
    """

    placement: Placement
    dtype: torch.dtype
    values: Callable[[], Tensor]

    def bits(self) -> Tensor:
        """The values for an exact comparison: nan is itself, and the zeros are two."""
        return _bits(self.values().reshape(-1))


@dataclass(frozen=True, eq=False)
class FlatMain:
    """Main params in a flat buffer.

    Args:
        where: it is, for errors.
        dtype: of the model params.
        values: of the main params, 1-D.
        is_one_bucket: whether it is; otherwise buckets of unknown sizes follow one another.
    """

    where: str
    dtype: torch.dtype
    values: Callable[[], Tensor]
    is_one_bucket: bool


@dataclass(frozen=True)
class Slot:
    """A stretch of a flat buffer, and which params it may be.

    Args:
        start, numel: elements.
        candidates: numbers of params with these values.
    """

    start: int
    numel: int
    candidates: tuple[int, ...]


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(_BITS[values.element_size()])


@dataclass(frozen=True, eq=False)
class Values:
    """Params of one dtype by their values.

    Args:
        candidates: params of all dtypes.
        dtype: of those to look for.
    """

    candidates: Sequence[Candidate]
    dtype: torch.dtype
    _by_head: dict[int, dict[tuple[int, ...], list[int]]] = field(default_factory=dict)
    _small: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, each in enumerate(self.candidates):
            if each.dtype == self.dtype:
                self._learn(number, each.bits())

    def _learn(self, number: int, bits: Tensor) -> None:
        if 0 < bits.numel() <= _SMALL_NUMEL:
            self._small[number] = bits
        if bits.numel():
            self._by_head.setdefault(bits.numel(), {}).setdefault(_head(bits), []).append(number)

    def at(self, rounded: Tensor, start: int) -> Iterator[Slot]:
        """The params that may begin at an element, longest first.

        Args:
            rounded: a flat buffer, as bits of the dtype.
            start: the element.
        """
        for numel in sorted(self._by_head, reverse=True):
            here = rounded[start : start + numel]
            similar = self._by_head[numel].get(_head(here), ()) if here.numel() == numel else ()
            same = tuple(number for number in similar if torch.equal(self._bits(number), here))
            if same:
                yield Slot(start, numel, same)

    def _bits(self, number: int) -> Tensor:
        known = self._small.get(number)
        return self.candidates[number].bits() if known is None else known


def _head(bits: Tensor) -> tuple[int, ...]:
    return tuple(bits[:_HEAD].tolist())


@dataclass(frozen=True)
class _Reached:
    """How the search came to a place.

    Args:
        ways: number of ways; 2 stands for more.
        before: the place before, and the slot between.
    """

    ways: int
    before: tuple[_Place, Slot] | None


#: Elements that are covered, and where in a multiple of the alignment the bucket began.
_Place = tuple[int, int]


def slots_of(flat: FlatMain, values: Values) -> tuple[Slot, ...]:
    """The params of a flat buffer, in its order; see [Note: found by value].

    Raises:
        CheckpointError: params of the model do not cover the buffer, or do in several ways.
    """
    rounded = _bits(flat.values().to(flat.dtype))
    numel, reached = rounded.numel(), {(0, 0): _Reached(1, None)}
    todo, furthest = [(0, 0)], 0
    while todo:
        place = heapq.heappop(todo)
        furthest = max(furthest, place[0])
        for start, base in _starts(place, flat.is_one_bucket):
            for slot in values.at(rounded, start):
                after = (start + slot.numel, base)
                known = reached.get(after)
                if known is None:
                    heapq.heappush(todo, after)
                ways = reached[place].ways + (known.ways if known else 0)
                reached[after] = _Reached(min(ways, 2), (place, slot))
    # Params up to the last element are a better explanation of it than unused space.
    ends = [place for place in reached if place[0] == numel and numel] or [p for p in reached if _is_end(p, numel)]
    _check_one(flat, ends, sum(reached[place].ways for place in ends), (furthest, numel))
    return _back_from(ends[0], reached)


def _starts(place: _Place, is_one_bucket: bool) -> list[_Place]:
    """Where the next param may begin: at the next multiple of the alignment, or in a new bucket at once."""
    stop, base = place
    aligned = stop + (base - stop) % _ALIGNMENT
    return [(aligned, base)] if aligned == stop or is_one_bucket else [(aligned, base), (stop, stop % _ALIGNMENT)]


def _is_end(place: _Place, numel: int) -> bool:
    """A shared embedding begins a bucket; the one before then ends with the space up to it."""
    stop, base = place
    return numel > 0 and numel - stop in (0, (base - stop) % _ALIGNMENT)


def _check_one(flat: FlatMain, ends: list[_Place], ways: int, covered: tuple[int, int]) -> None:
    if ways == 0:
        furthest, numel = covered
        got = f"no param of the model begins after element {furthest} of {numel}"
        rule = "hold main params of the model one after the other, which round to the model's values"
        raise CheckpointError(refusal(f"flat buffer {flat.where}", got, rule, _REMEDY))
    if ways > 1:
        got = "params of the model fit it in several ways"
        rule = "be covered by params of the model in one way"
        remedy = "Train a step more, so that params which are all zeros differ, and save again"
        raise CheckpointError(refusal(f"flat buffer {flat.where}", got, rule, remedy))


def _back_from(end: _Place, reached: dict[_Place, _Reached]) -> tuple[Slot, ...]:
    slots, step = [], reached[end].before
    while step is not None:
        place, slot = step
        slots.append(slot)
        step = reached[place].before
    return tuple(reversed(slots))


#: Ranks of params in some order of the model, by number; equal ranks say nothing about each other.
Order = Mapping[int, int]


def names_of(
    buffers: Sequence[Sequence[Slot]], candidates: Sequence[Candidate], orders: Sequence[Order], where: str
) -> list[list[int]]:
    """The number of the param of every slot.

    Args:
        buffers: slots of each flat buffer, in order.
        candidates: params of the model; each is in one slot at most.
        orders: in which the model registers them.
        where: path of the checkpoint, for errors.

    Raises:
        CheckpointError: some slot may still be one of several params.
    """
    opens = [[set(slot.candidates) for slot in buffer] for buffer in buffers]
    while _narrow(opens, orders):
        pass
    for buffer in opens:
        _settle_in_order(buffer, orders)
    for slots, buffer in zip(buffers, opens, strict=True):
        for slot, left in zip(slots, buffer, strict=True):
            _check_named(slot, sorted(candidates[number].placement.name for number in left), where)
    return [[next(iter(left)) for left in buffer] for buffer in opens]


def _check_named(slot: Slot, names: list[str], where: str) -> None:
    if len(names) == 1:
        return
    got = f"{' or '.join(map(repr, names[:3]))} at element {slot.start}" if names else f"none at element {slot.start}"
    rule = "be told apart by their values, or by the order in which the file lists them"
    remedy = "Train a few steps more, so that params which are alike differ, and save again"
    raise CheckpointError(refusal(f"params in {where}", got, rule, remedy))


def _narrow(opens: list[list[set[int]]], orders: Sequence[Order]) -> bool:
    """Removes candidates that cannot be in a slot. Returns whether there were any."""
    known = {next(iter(left)) for buffer in opens for left in buffer if len(left) == 1}
    changed = False
    for buffer in opens:
        anchors = [_Anchors.of(buffer, order) for order in orders]
        for number, left in enumerate(buffer):
            if len(left) > 1:
                fitting = {each for each in left - known if all(anchor.allow(each, number) for anchor in anchors)}
                changed = changed or fitting != left
                left.intersection_update(fitting)
    return changed


@dataclass(frozen=True)
class _Anchors:
    """The slots of one buffer that are known, and their ranks in one order.

    Args:
        order: the order; empty where the buffer contradicts it.
        slots, ranks: of the anchors.
    """

    order: Order
    slots: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, buffer: Sequence[set[int]], order: Order) -> _Anchors:
        known = [(slot, next(iter(left))) for slot, left in enumerate(buffer) if len(left) == 1]
        found = [(slot, order[number]) for slot, number in known if number in order]
        is_reverse = all(before >= after for (_, before), (_, after) in pairwise(found))
        return cls(order if is_reverse else {}, tuple(slot for slot, _ in found), tuple(rank for _, rank in found))

    def allow(self, number: int, slot: int) -> bool:
        """Whether a param may be in a slot."""
        if number not in self.order:
            return True
        rank, after = self.order[number], bisect_left(self.slots, slot)
        fits_before = after == 0 or self.ranks[after - 1] >= rank
        return fits_before and (after == len(self.ranks) or self.ranks[after] <= rank)


def _settle_in_order(buffer: list[set[int]], orders: Sequence[Order]) -> None:
    """Names neighbouring slots with equal candidates, as many as there are slots, in reverse order."""
    start = 0
    while start < len(buffer):
        stop = start + 1
        while stop < len(buffer) and len(buffer[start]) > 1 and buffer[stop] == buffer[start]:
            stop += 1
        numbers = buffer[start]
        order = next(
            (each for each in orders if len({each.get(number) for number in numbers} - {None}) == len(numbers)), None
        )
        if len(numbers) == stop - start and order is not None:
            for slot, number in enumerate(sorted(numbers, key=lambda each: -order[each]), start):
                buffer[slot] = {number}
        start = stop
