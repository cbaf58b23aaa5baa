"""Params of a minority dtype, scattered between others in one grad buffer.

[Note: two param dtypes in one grad buffer] The forks of 2023 keep one fp32 grad buffer for all
params, of which a few may be fp32 (norms, routers) and the rest bf16. The majority gets a param
buffer in the layout of the grad buffer. One for the minority in the same layout would be nearly all
holes, so its params keep their own storage, and what a rank
owns of them is packed: the all-gather moves the packed parts, and the values are copied into the
params afterwards. The copies cost bytes only for the minority. Every rank's part is as long as the
largest, so that the gather is even. Neighbours begin as many elements behind a multiple of 8 as
their grads do, so that kernels move both in full vectors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_distopt.buffers.sharded_buffer import ShardedBuffer, view_of
from megatron_distopt.errors import InvariantError
from megatron_distopt.layout import BufferLayout, Span
from megatron_distopt.layout.buckets import VECTOR_NUMEL


@dataclass(frozen=True)
class _PackedPiece:
    """What one rank owns of one param."""

    name: str
    number: int  # of the param's slot
    rank: int
    in_param: Span
    in_buffer: Span
    in_part: Span  # where its values lie in the rank's packed part


@dataclass(frozen=True)
class CompactBuffer(ShardedBuffer):
    """Packed params beside a grad buffer, see [Note: two param dtypes in one grad buffer].

    `param` is 1-D [layout.num_shards * part_numel]: the parts of all ranks one after the other.
    """

    # by name, each in its own storage
    params: Mapping[str, Parameter] = field(default_factory=dict)
    part_numel: int = 0  # elements of one rank's part

    def __post_init__(self) -> None:
        self._check_numel("grad", self.grad, self.layout.numel)
        self._check_numel("param", self.param, self.layout.num_shards * self.part_numel)

    @cached_property
    def _pieces(self) -> tuple[_PackedPiece, ...]:
        return _plan_pieces(self.layout, self.params.keys())

    def param_of(self, in_buffer: Span) -> Tensor:
        """The packed elements of a flat param; neighbours in the grad buffer are neighbours
        here."""
        inside = [
            piece
            for piece in self._own()
            if piece.in_buffer.intersect(in_buffer) == piece.in_buffer
        ]
        packed = Span(inside[0].in_part.start, inside[-1].in_part.stop)
        # none of the majority in between
        has_all_slots = inside[-1].number - inside[0].number == len(inside) - 1
        if packed.numel != in_buffer.numel or not has_all_slots:
            numel = sum(piece.in_part.numel for piece in inside)
            raise InvariantError(
                f"Invalid packed flat param: {numel} elements. Must hold the flat param's "
                f"{in_buffer.numel}. Report it."
            )
        return view_of(self._part_of(self.rank).detach(), packed)

    @cached_property
    def gathers(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """What one all-gather of the packed params has to move: (all parts, this rank's part)."""
        return ((self.param, self._part_of(self.rank)),)

    @torch.no_grad()
    def publish(self) -> None:
        """After the all-gather: copies every rank's values into the params."""
        for piece in self._pieces:
            self._in_param(piece).copy_(view_of(self._part_of(piece.rank), piece.in_part))

    @torch.no_grad()
    def collect(self) -> None:
        """After the params were changed: copies what this rank owns of them."""
        for piece in self._own():
            view_of(self._part_of(self.rank), piece.in_part).copy_(self._in_param(piece))

    def _own(self) -> list[_PackedPiece]:
        return [piece for piece in self._pieces if piece.rank == self.rank]

    def _part_of(self, rank: int) -> Tensor:
        return view_of(self.param, Span(0, self.part_numel).moved_by(rank * self.part_numel))

    def _in_param(self, piece: _PackedPiece) -> Tensor:
        return self.params[piece.name].detach().view(-1)[piece.in_param.as_slice()]


@torch.no_grad()
def pack_params(
    params: Mapping[str, Parameter], layout: BufferLayout, rank: int, grad: Tensor
) -> CompactBuffer:
    """Allocates the packed buffer and fills this rank's part. The layout is that of the grad
    buffer; the params are the minority in it, of one dtype and device.
    """
    for param in params.values():
        param.data = param.data.contiguous()  # the pieces are stretches of the flattened param
    part_numel = max(piece.in_part.stop for piece in _plan_pieces(layout, params.keys()))
    part_numel += -part_numel % VECTOR_NUMEL
    first = next(iter(params.values()))
    packed = torch.zeros(layout.num_shards * part_numel, dtype=first.dtype, device=first.device)
    buffer = CompactBuffer(layout, rank, grad, packed, frozenset(params), dict(params), part_numel)
    buffer.collect()
    return buffer


def _plan_pieces(layout: BufferLayout, names: Collection[str]) -> tuple[_PackedPiece, ...]:
    """The pieces of all ranks, in buffer order. The cost is O(pieces), whatever the number of
    ranks."""
    filled: Counter[int] = Counter()
    pieces = []
    owned_of: dict[tuple[int, int], Span] = {}  # by number of the slot and rank
    for number, slot in enumerate(layout.slots):
        bucket = layout.buckets[slot.bucket]
        for rank in bucket.holders(slot.in_buffer, layout.num_shards) if slot.name in names else ():
            owned = slot.in_buffer.intersect(bucket.shard(rank, layout.num_shards)) or Span(0, 0)
            before = owned_of.get((number - 1, rank))
            if before is not None and layout.slots[number - 1].bucket == slot.bucket:
                # padding is a part, see [Note: flat main params]
                filled[rank] += owned.start - before.stop
            else:
                filled[rank] += (owned.start - filled[rank]) % VECTOR_NUMEL
            in_part = Span(0, owned.numel).moved_by(filled[rank])
            in_param = owned.relative_to(slot.in_buffer.start)
            pieces.append(_PackedPiece(slot.name, number, rank, in_param, owned, in_part))
            filled[rank] += owned.numel
            owned_of[number, rank] = owned
    return tuple(pieces)
