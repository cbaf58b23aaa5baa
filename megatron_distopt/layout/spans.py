"""Ranges of element indices: spans in one dimension, boxes in N, and where a rank's lie in the
whole param.

A rank owns a stretch of a flattened param. In the N-D param that stretch is at most 2N-1 boxes: the
rest of the first row, whole rows, and the beginning of the last row. Each of the two partial rows
is again such a stretch with one dimension less.

[Note: strides] A tensor-parallel param is cut along one dimension. With a stride of s a rank's
slice is s pieces one after the other: piece k of rank r is number k * size + r of the whole.
Megatron keeps a fused gate and up projection like this: each half is cut separately, so that a rank
can multiply its gate with its up projection.

[Note: memory order] A param of plain torch keeps its strides in the buffer, such as those of a
channels_last convolution or a transposed weight. Kernels are fast for these strides, and torch's
DistributedDataParallel copies gradients by the strides that it found when it was built. The
flattened param is the param permuted to its memory order. A checkpoint has boxes of the param
itself, so it loads with any strides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import add, sub

from megatron_distopt.errors import LayoutError


@dataclass(frozen=True, order=True, slots=True)
class Span:
    """Elements `start` (inclusive) to `stop` (exclusive) of some 1-D index space.

    The index space is always in the name of the variable: `in_param`, `in_buffer`, `in_bucket`,
    `in_shard`.

    >>> Span(2, 10).intersect(Span(8, 20))
    Span(start=8, stop=10)
    >>> Span(8, 10).relative_to(8)
    Span(start=0, stop=2)
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise LayoutError(
                f"A span cannot start at {self.start} and stop at {self.stop}. Give a start of at "
                "least 0 and a stop that is not below it."
            )

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def relative_to(self, origin: int) -> Span:
        """The same elements, counted from `origin`."""
        return Span(self.start - origin, self.stop - origin)

    def moved_by(self, distance: int) -> Span:
        """The same elements, in an index space that starts `distance` elements earlier."""
        return Span(self.start + distance, self.stop + distance)

    def intersect(self, other: Span) -> Span | None:
        start = max(self.start, other.start)
        stop = min(self.stop, other.stop)
        return Span(start, stop) if start < stop else None

    def as_slice(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True, order=True, slots=True)
class Box:
    """Elements `offsets[d]` to `offsets[d] + sizes[d]` of every dimension d; for a 0-D tensor its
    only element.

    >>> Box((0, 2), (4, 3)).intersect(Box((3, 0), (2, 4)))
    Box(offsets=(3, 2), sizes=(1, 2))
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        is_inside = all(offset >= 0 for offset in self.offsets) and all(
            size >= 1 for size in self.sizes
        )
        if len(self.offsets) != len(self.sizes) or not is_inside:
            raise LayoutError(
                f"A box cannot have offsets {self.offsets} and sizes {self.sizes}. Give an offset "
                "of at least 0 and a size of at least 1 for every dimension."
            )

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def stops(self) -> tuple[int, ...]:
        return tuple(map(add, self.offsets, self.sizes))

    def intersect(self, other: Box) -> Box | None:
        offsets = tuple(map(max, self.offsets, other.offsets))
        stops = tuple(map(min, self.stops, other.stops))
        sizes = tuple(map(sub, stops, offsets))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def relative_to(self, origin: Sequence[int]) -> Box:
        pairs = zip(self.offsets, origin, strict=True)
        return Box(tuple(offset - start for offset, start in pairs), self.sizes)

    def moved_by(self, distance: int, dim: int) -> Box:
        """The same extent, `distance` elements further along one dimension."""
        offsets = list(self.offsets)
        offsets[dim] += distance
        return Box(tuple(offsets), self.sizes)

    def permuted(self, dims: Sequence[int]) -> Box:
        """The box of the same elements after `permute(dims)` of the tensor.

        >>> Box((0, 2), (4, 3)).permuted((1, 0))
        Box(offsets=(2, 0), sizes=(3, 4))
        """
        offsets = tuple(self.offsets[dim] for dim in dims)
        sizes = tuple(self.sizes[dim] for dim in dims)
        return Box(offsets, sizes)

    def as_slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.offsets, self.stops))


def boxes(shape: Sequence[int], span: Span) -> tuple[Box, ...]:
    """Cuts a stretch of a flattened tensor of any shape into at most 2N-1 boxes of N dimensions.

    Each box is contiguous in the flattened tensor, and they come in its order.

    >>> [box.sizes for box in boxes((3, 4), Span(2, 11))]
    [(1, 2), (1, 4), (1, 3)]
    """
    if span.stop > math.prod(shape):
        raise LayoutError(
            f"{span} does not lie within the {math.prod(shape)} elements of shape {tuple(shape)}. "
            "Give a span of the param."
        )
    return tuple(_boxes(tuple(shape), span)) if span.numel else ()


def _boxes(shape: tuple[int, ...], span: Span) -> Iterator[Box]:
    if not shape:
        yield Box((), ())
        return
    rest = shape[1:]
    row_numel = math.prod(rest)
    first_whole = -(-span.start // row_numel)
    last_whole = span.stop // row_numel
    if first_whole > last_whole:  # inside one row
        yield from _in_row(rest, last_whole, span)
        return
    start_of_whole = first_whole * row_numel
    stop_of_whole = last_whole * row_numel
    if span.start < start_of_whole:
        yield from _in_row(rest, first_whole - 1, Span(span.start, start_of_whole))
    if first_whole < last_whole:
        origin = (0,) * len(rest)
        yield Box((first_whole, *origin), (last_whole - first_whole, *rest))
    if stop_of_whole < span.stop:
        yield from _in_row(rest, last_whole, Span(stop_of_whole, span.stop))


def _in_row(row_shape: tuple[int, ...], row: int, span: Span) -> Iterator[Box]:
    row_start = row * math.prod(row_shape)
    for box in _boxes(row_shape, span.relative_to(row_start)):
        yield Box((row, *box.offsets), (1, *box.sizes))


def stretches(shape: Sequence[int], in_param: Span) -> Iterator[tuple[Span, Box]]:
    """Cuts a stretch of a flattened param into boxes, each with its own stretch."""
    start = in_param.start
    for box in boxes(shape, in_param):
        yield Span(start, start + box.numel), box
        start += box.numel


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the whole param and where its elements lie in the flattened param of this rank."""

    in_global: Box  # of the whole param
    in_param: Span  # a contiguous stretch of this rank's flattened param
    sizes: tuple[int, ...]  # the shape of a view of that stretch
    # the elements of that view that belong to the piece: all, unless a dimension after 0 is cut
    inside: Box
    # how to permute those elements into the box, see [Note: memory order]; () for not at all
    dims: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a rank's param in the whole model."""

    name: str  # in the whole model: without pipeline stage and chunk
    shape: tuple[int, ...]  # of the param on this rank
    # the dimension along which it is cut over tensor-parallel ranks; None if it is not cut
    dim: int | None = None
    rank: int = 0  # in the tensor-parallel group
    size: int = 1  # of the tensor-parallel group
    stride: int = 1  # see [Note: strides]
    # whether the first dimension ends with unused rows; other runs may have more or fewer of them
    is_padded: bool = False
    # the dimensions in memory order, the slowest first, see [Note: memory order]; () if contiguous
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dim is None:
            return
        has_dim = 0 <= self.dim < len(self.shape)
        has_rank = 0 <= self.rank < self.size
        if not (has_dim and has_rank):
            raise LayoutError(
                f"Param {self.name!r} of shape {self.shape} cannot be cut along dimension "
                f"{self.dim} for rank {self.rank} of {self.size}. Give the param's own "
                "partition_dim."
            )
        if self.stride < 1 or self.shape[self.dim] % self.stride:
            raise LayoutError(
                f"Param {self.name!r} has stride {self.stride}, which does not divide its "
                f"{self.shape[self.dim]} elements along dimension {self.dim}. Give the param's own "
                "partition_stride."
            )

    @property
    def global_shape(self) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        return tuple(
            numel * self.size if dim == self.dim else numel for dim, numel in enumerate(self.shape)
        )

    def pieces(self, in_param: Span) -> tuple[Piece, ...]:
        """Cuts a stretch of this rank's flattened param into boxes of the whole param.

        >>> half = Placement("w", (4, 2), dim=0, rank=1, size=2, stride=2)
        >>> [piece.in_global for piece in half.pieces(Span(0, 8))]
        [Box(offsets=(2, 0), sizes=(2, 2)), Box(offsets=(6, 0), sizes=(2, 2))]
        """
        if self.order:
            back = tuple(self.order.index(dim) for dim in range(len(self.shape)))
            lying = replace(
                self,
                shape=tuple(self.shape[dim] for dim in self.order),
                dim=None if self.dim is None else back[self.dim],
                order=(),
            )
            return tuple(
                replace(piece, in_global=piece.in_global.permuted(back), dims=back)
                for piece in lying.pieces(in_param)
            )
        found: list[Piece] = []
        for stretch, box in stretches(self.shape, in_param):
            for band, distance in self._bands():
                inside = box.intersect(band)
                if inside is None:
                    continue
                in_global = inside if self.dim is None else inside.moved_by(distance, self.dim)
                in_box = inside.relative_to(box.offsets)
                found.append(Piece(in_global, stretch, box.sizes, in_box))
        return tuple(found)

    def _bands(self) -> tuple[tuple[Box, int], ...]:
        """Boxes of this rank's param that stay in one piece in the whole param, and how far each
        moves along `dim`."""
        if self.dim is None:
            return ((Box.whole(self.shape), 0),)
        height = self.shape[self.dim] // self.stride
        first = Box.whole(
            [height if dim == self.dim else numel for dim, numel in enumerate(self.shape)]
        )
        moved = []
        for part in range(self.stride):
            local = first.moved_by(part * height, self.dim)
            parts_before = part * (self.size - 1) + self.rank
            moved.append((local, parts_before * height))
        return tuple(moved)
