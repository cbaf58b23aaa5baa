"""Boxes of a stretch of a flattened tensor, and where they lie in a param that is cut over
ranks."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_distopt.errors import LayoutError
from megatron_distopt.layout import Box, Placement, Span, boxes

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=5).map(tuple)


@st.composite
def stretches(draw: st.DrawFn) -> tuple[tuple[int, ...], Span]:
    """A shape of up to 5 dimensions and a stretch of it, empty ones too."""
    shape = draw(SHAPES)
    start, stop = sorted(
        (draw(st.integers(0, math.prod(shape))), draw(st.integers(0, math.prod(shape))))
    )
    return shape, Span(start, stop)


@settings(deadline=None)  # torch is slow the first time
@given(stretches())
def test_boxes_when_put_one_after_the_other_then_they_are_the_stretch_and_at_most_2n_less_one(
    case: tuple[tuple[int, ...], Span],
) -> None:
    shape, span = case
    numbers = torch.arange(math.prod(shape)).view(shape)
    found = [
        number
        for box in boxes(shape, span)
        for number in numbers[box.as_slices()].reshape(-1).tolist()
    ]
    assert found == list(range(span.start, span.stop))
    assert len(boxes(shape, span)) <= max(2 * len(shape) - 1, 1)


def test_boxes_when_the_stretch_leaves_the_tensor_or_a_box_is_none_then_refused() -> None:
    with pytest.raises(
        LayoutError, match=re.escape("Span(start=0, stop=7) does not lie within the 6 elements")
    ):
        boxes((2, 3), Span(0, 7))
    for offsets, sizes in (((0,), (0,)), ((-1,), (2,)), ((0, 0), (1,))):
        with pytest.raises(LayoutError, match=re.escape(f"{offsets} and sizes {sizes}")):
            Box(offsets, sizes)


@settings(deadline=None)  # torch is slow the first time
@given(st.data())
def test_intersection_when_two_boxes_meet_then_it_is_what_both_hold(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
    marks = []
    drawn = []
    for _ in range(2):
        offsets = tuple(data.draw(st.integers(0, numel - 1)) for numel in shape)
        sizes = tuple(
            data.draw(st.integers(1, n - offset)) for n, offset in zip(shape, offsets, strict=True)
        )
        drawn.append(Box(offsets, sizes))
        mark = torch.zeros(shape, dtype=torch.bool)
        mark[drawn[-1].as_slices()] = True
        marks.append(mark)
    both, found = drawn[0].intersect(drawn[1]), marks[0] & marks[1]
    assert (both.numel if both else 0) == int(found.sum())
    if both is not None:
        assert bool(found[both.as_slices()].all())
        assert both == drawn[1].intersect(drawn[0])
        assert both.relative_to(both.offsets) == Box.whole(both.sizes)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int, int]:
    """Shape on one rank, dimension, ranks, stride."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    dim, size, stride = (
        draw(st.integers(0, len(shape) - 1)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
    )
    shape[dim] *= stride
    return tuple(shape), dim, size, stride


def _slice_of(whole: Tensor, dim: int, rank: int, size: int, stride: int) -> Tensor:
    """As Megatron cuts it."""
    chunks = whole.chunk(stride * size, dim)
    return torch.cat([chunks[k * size + rank] for k in range(stride)], dim)


@settings(deadline=None)  # torch is slow the first time
@given(cuts(), st.data())
def test_pieces_when_a_param_is_cut_with_a_stride_then_each_lies_where_megatron_puts_it(
    cut: tuple[tuple[int, ...], int, int, int], data: st.DataObject
) -> None:
    shape, dim, size, stride = cut
    placements = [Placement("w", shape, dim, rank, size, stride) for rank in range(size)]
    whole = torch.arange(math.prod(placements[0].global_shape)).view(placements[0].global_shape)
    seen = torch.zeros_like(whole)
    for rank, placement in enumerate(placements):
        flat = _slice_of(whole, dim, rank, size, stride).reshape(-1)
        middle = data.draw(st.integers(0, flat.numel()))
        for span in (Span(0, middle), Span(middle, flat.numel())):
            for piece in placement.pieces(span):
                mine = flat[piece.in_param.as_slice()].view(piece.sizes)[piece.inside.as_slices()]
                assert torch.equal(mine, whole[piece.in_global.as_slices()])
                seen[piece.in_global.as_slices()] += 1
    assert bool((seen == 1).all())


@settings(deadline=None)  # torch is slow the first time
@given(cuts(), st.data())
def test_pieces_when_dimensions_lie_in_another_order_then_each_is_permuted_into_its_box(
    cut: tuple[tuple[int, ...], int, int, int], data: st.DataObject
) -> None:
    shape, dim, size, stride = cut
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    placements = [
        Placement("w", shape, dim, rank, size, stride, order=order) for rank in range(size)
    ]
    whole = torch.arange(math.prod(placements[0].global_shape)).view(placements[0].global_shape)
    seen = torch.zeros_like(whole)
    for rank, placement in enumerate(placements):
        flat = _slice_of(whole, dim, rank, size, stride).permute(order).reshape(-1)
        middle = data.draw(st.integers(0, flat.numel()))
        for span in (Span(0, middle), Span(middle, flat.numel())):
            for piece in placement.pieces(span):
                mine = flat[piece.in_param.as_slice()].view(piece.sizes)[piece.inside.as_slices()]
                assert torch.equal(mine.permute(piece.dims), whole[piece.in_global.as_slices()])
                seen[piece.in_global.as_slices()] += 1
    assert bool((seen == 1).all())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dim": 2}, "dimension 2 for rank 0 of 1"),
        ({"dim": 0, "rank": 2, "size": 2}, "dimension 0 for rank 2 of 2"),
        ({"dim": 0, "size": 2, "stride": 3}, "stride 3, which does not divide its 4 elements"),
    ],
)
def test_placement_when_it_cannot_be_then_refused(arguments: dict[str, int], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        Placement("w", (4, 2), **arguments)
