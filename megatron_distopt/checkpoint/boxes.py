"""Which boxes of a tensor have elements in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from megatron_distopt.errors import CheckpointError
from megatron_distopt.layout import Box


def overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Finds two boxes that share elements; None where no two do.

    Boxes of a thousand ranks are separated dimension by dimension first, which leaves few to
    compare.

    >>> overlap([Box((0,), (4,)), Box((4,), (2,)), Box((3,), (1,))])
    (Box(offsets=(0,), sizes=(4,)), Box(offsets=(3,), sizes=(1,)))
    """
    for dim in range(len(boxes[0].offsets)) if boxes else ():
        parts: list[list[Box]] = []
        end = 0
        for box in sorted(boxes, key=lambda box: box.offsets[dim]):
            if box.offsets[dim] >= end:  # shares nothing with the boxes before it
                parts.append([])
            parts[-1].append(box)
            end = max(end, box.offsets[dim] + box.sizes[dim])
        if len(parts) > 1:
            return next((pair for part in parts if (pair := overlap(part))), None)
    return next(
        ((one, other) for one, other in combinations(boxes, 2) if one.intersect(other)), None
    )


def covering(
    wanted: Box, boxes: Sequence[Box], what: str, remedy: str
) -> Iterator[tuple[int, Box]]:
    """Yields the number of each of the disjoint boxes that overlaps `wanted`, and the elements in
    both.

    Raises after the last box if elements are missing. `what` begins the error: "Tensor 'x' in ...".
    """
    numel = 0
    for number, box in enumerate(boxes):
        both = wanted.intersect(box)
        if both is not None:
            numel += both.numel
            yield number, both
    if numel != wanted.numel:
        raise CheckpointError(
            f"{what} holds {numel} elements of {wanted}, and must hold all {wanted.numel}, each "
            f"once. {remedy}."
        )
