"""The matrices in a param, and what it costs to update them.

An optimizer such as Muon updates a matrix as a whole: no element of the update can be computed
without all elements of the matrix. A fused param holds several matrices, and each of them is
orthogonalized separately.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron_distopt.errors import LayoutError
from megatron_distopt.layout.buckets import ParamSpec
from megatron_distopt.layout.spans import Box, Span, stretches


@dataclass(frozen=True, slots=True)
class MatrixCut:
    """How tensor-parallel ranks share a param: rank r has the r-th of `size` equal parts of each of
    its matrices.

    A matrix with a stride consists of that many pieces along `dim`, and each piece is cut; see
    [Note: strides] in spans.py.
    """

    dim: int  # 0 for rows, 1 for columns
    size: int  # number of ranks
    stride: int = 1  # the param's stride, if it is one matrix
    # whether every rank orthogonalizes the whole matrix, and not only its part of the products
    is_gathered: bool = True

    def whole(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the whole matrix, if every rank's part has `shape`.

        >>> MatrixCut(1, 2).whole((3, 4))
        (3, 8)
        """
        rows, cols = shape
        return (rows * self.size, cols) if self.dim == 0 else (rows, cols * self.size)


@dataclass(frozen=True, slots=True)
class MatrixBlock:
    """A contiguous stretch of a flattened param with whole matrices, and as few of them as
    possible."""

    in_param: Span
    shapes: tuple[tuple[int, int], ...]  # rows and columns of each


@dataclass(frozen=True, slots=True)
class MatrixPiece:
    """Elements of one matrix in a stretch of the flattened param."""

    matrix: int  # its number among the matrices of the param
    in_param: Span  # the stretch
    sizes: tuple[int, ...]  # rows and columns of a view of that stretch
    inside: Box  # the elements of that view that belong to the matrix


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """A param as matrices: it is viewed as `rows` x `cols` and cut along one dimension.

    That dimension consists of `repeats` runs of equal length, and every run is cut into `sizes`.
    Matrix k consists of piece k of all runs. Examples:

    - one matrix: `MatrixSpec(m, n)`
    - gate and up projection, one after the other: `MatrixSpec(2 * m, n, sizes=(m, m))`
    - queries, keys and values of g groups of heads, as Megatron interleaves them: `sizes=(q, k,
      v)`, `repeats=g`
    - e experts in a param of shape [e, m, n]: `MatrixSpec(e * m, n, sizes=(m,) * e)`

    >>> MatrixSpec(6, 4, sizes=(2, 1), repeats=2).shapes
    ((4, 4), (2, 4))
    """

    rows: int
    cols: int
    dim: int = 0  # 0 to cut rows, 1 to cut columns
    sizes: tuple[int, ...] = ()  # rows or columns of each piece of a run; empty for one matrix
    repeats: int = 1  # number of runs
    # how tensor-parallel ranks share the matrices; None if this rank has all of them
    cut: MatrixCut | None = None

    def __post_init__(self) -> None:
        if self.dim not in (0, 1) or self.repeats < 1 or min(self.rows, self.cols, *self.sizes) < 1:
            raise LayoutError(
                f"{self} describes no matrices: dim must be 0 or 1, and rows, cols, sizes and "
                "repeats at least 1. Give the sizes of the param's own parts."
            )
        if self.sizes and sum(self.sizes) * self.repeats != self._length:
            raise LayoutError(
                f"{self.repeats} times the sizes {self.sizes} do not add up to the "
                f"{self._length} {('rows', 'columns')[self.dim]} of the param. Give the sizes of "
                "all its parts."
            )

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        lengths = [size * self.repeats for size in self.sizes] or [self._length]
        return tuple(self._shape(length) for length in lengths)

    @property
    def _length(self) -> int:
        """The length of the dimension that is cut."""
        return self.rows if self.dim == 0 else self.cols

    def _shape(self, length: int) -> tuple[int, int]:
        """The shape of a part of this length along the dimension that is cut."""
        return (length, self.cols) if self.dim == 0 else (self.rows, length)

    def whole(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of a matrix over all tensor-parallel ranks, from those of this rank."""
        return shape if self.cut is None else self.cut.whole(shape)

    @property
    def blocks(self) -> tuple[MatrixBlock, ...]:
        """The blocks in the order of the param: one for each matrix, or one for all of them if
        their elements alternate.

        >>> tuple(block.in_param for block in MatrixSpec(6, 4, sizes=(4, 2)).blocks)
        (Span(start=0, stop=16), Span(start=16, stop=24))
        """
        shapes = self.shapes
        if len(shapes) > 1 and (self.dim == 1 or self.repeats > 1):
            return (MatrixBlock(Span(0, self.numel), shapes),)
        spans = _one_after_the_other([rows * cols for rows, cols in shapes])
        return tuple(MatrixBlock(span, (shape,)) for span, shape in zip(spans, shapes, strict=True))

    def pieces(self, in_param: Span) -> Iterator[MatrixPiece]:
        """Cuts a stretch of the flattened param by matrix.

        >>> spec = MatrixSpec(4, 3, sizes=(2, 2))
        >>> dict((each.matrix, each.in_param) for each in spec.pieces(Span(4, 9)))
        {0: Span(start=4, stop=6), 1: Span(start=6, stop=9)}
        """
        parts = _one_after_the_other((self.sizes or (self._length,)) * self.repeats)
        for stretch, box in stretches((self.rows, self.cols), in_param):
            for number, part in enumerate(parts):
                offsets = (part.start, 0) if self.dim == 0 else (0, part.start)
                inside = box.intersect(Box(offsets, self._shape(part.numel)))
                if inside is None:
                    continue
                yield MatrixPiece(
                    number % max(len(self.sizes), 1),
                    stretch,
                    box.sizes,
                    inside.relative_to(box.offsets),
                )

    @classmethod
    def of(cls, param: ParamSpec) -> MatrixSpec:
        """One matrix for each pair of indices before the last two: a 2-D param is one, experts in
        3-D are several."""
        if len(param.shape) < 2:
            raise LayoutError(
                f"Param {param.name!r} has shape {param.shape}, but a matrix needs at least 2 "
                "dimensions. Update the param with AdamW."
            )
        *outer, rows, cols = param.shape
        count = math.prod(outer)
        return cls(count * rows, cols, sizes=(rows,) * count if count > 1 else ())


def _one_after_the_other(numels: Sequence[int]) -> list[Span]:
    stops = list(accumulate(numels))
    return list(map(Span, [0, *stops], stops))


def update_cost(shape: tuple[int, int]) -> int:
    """What the update of a matrix costs its owner, in an arbitrary unit.

    For Muon's iteration it is the number of elements times the shorter side. For other classes the
    cost is unknown; a whole param counts as a matrix of one row, so its cost is its number of
    elements.

    >>> update_cost((2, 3)), update_cost((3, 2)), update_cost((1, 6))
    (12, 12, 6)
    """
    return shape[0] * shape[1] * min(shape)
