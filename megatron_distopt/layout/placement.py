"""Where a rank's param lies in the param of the whole model.

[Note: strides] A tensor-parallel param is cut along one dimension. With a stride of s its slice is s pieces one after
the other: piece k of rank r is number k * size + r of the whole. That is how Megatron keeps a fused gate and up
projection: each half is cut by itself, so that a rank can multiply its gate with its up.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_distopt.errors import LayoutError, refusal
from megatron_distopt.layout.spans import Box, Span, boxes


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the whole param and where its elements lie in the flattened param of this rank.

    Args:
        in_global: of the whole param.
        in_param: a contiguous stretch of this rank's flattened param.
        sizes: the shape to view that stretch in.
        inside: the elements of that view that belong to the piece: all, unless a dimension after the first is cut.
    """

    in_global: Box
    in_param: Span
    sizes: tuple[int, ...]
    inside: Box


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a rank's param in the whole model.

    Args:
        name: in the whole model: pipeline stage and chunk resolved.
        shape: of the param on this rank.
        dim: along which it is cut over tensor-parallel ranks; None where every rank holds all of it.
        rank, size: in the tensor-parallel group.
        stride: see [Note: strides].
        is_padded: the first dimension ends with unused rows, of which other runs may have more or fewer.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    rank: int = 0
    size: int = 1
    stride: int = 1
    is_padded: bool = False

    def __post_init__(self) -> None:
        if self.dim is None:
            return
        if not (0 <= self.dim < len(self.shape) and 0 <= self.rank < self.size):
            got = f"dim {self.dim} of shape {self.shape}, rank {self.rank} of {self.size}"
            rule = "name a dimension of the param and a rank of the group"
            raise LayoutError(refusal(f"placement of {self.name!r}", got, rule, "Give the param's own partition_dim"))
        if self.stride < 1 or self.shape[self.dim] % self.stride:
            got, rule = f"stride {self.stride}", f"divide the {self.shape[self.dim]} elements of dimension {self.dim}"
            raise LayoutError(refusal(f"placement of {self.name!r}", got, rule, "Give the param's own stride"))

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the param of the whole model."""
        if self.dim is None:
            return self.shape
        return tuple(numel * self.size if dim == self.dim else numel for dim, numel in enumerate(self.shape))

    def pieces(self, in_param: Span) -> tuple[Piece, ...]:
        """Cuts a stretch of this rank's flattened param into boxes of the whole param.

        >>> half = Placement("w", (4, 2), dim=0, rank=1, size=2, stride=2)
        >>> [piece.in_global for piece in half.pieces(Span(0, 8))]
        [Box(offsets=(2, 0), sizes=(2, 2)), Box(offsets=(6, 0), sizes=(2, 2))]
        """
        found = []
        start = in_param.start
        for box in boxes(self.shape, in_param):
            stretch = Span(0, box.numel).moved_by(start)
            start = stretch.stop
            for band, distance in self._bands():
                inside = box.intersect(band)
                if inside is not None:
                    in_global = inside if self.dim is None else inside.moved_by(distance, self.dim)
                    found.append(Piece(in_global, stretch, box.sizes, inside.relative_to(box.offsets)))
        return tuple(found)

    def _bands(self) -> tuple[tuple[Box, int], ...]:
        """Boxes of this rank's param that stay in one piece in the whole param, and how far each moves along `dim`."""
        whole = Box.whole(self.shape)
        if self.dim is None:
            return ((whole, 0),)
        height = self.shape[self.dim] // self.stride
        sizes = tuple(height if dim == self.dim else numel for dim, numel in enumerate(self.shape))
        first = Box((0,) * len(sizes), sizes)
        return tuple(
            (first.moved_by(k * height, self.dim), (k * (self.size - 1) + self.rank) * height)
            for k in range(self.stride)
        )
