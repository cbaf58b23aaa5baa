"""Which param each slot of a flat buffer is, where several have the same values.

[Note: told apart by order] Norms that are still all ones and biases that are still all zeros fit many slots. A buffer
holds params in the reverse of the order in which the model registers them, and files list them in that order, or in
parts of it, one for each rank that wrote. So a slot between two that are known can only be what lies between those in
every list. What is still open then is refused.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.megatron_core.flat_slots import Candidate, Slot

__all__ = ["Order", "names_of"]

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
