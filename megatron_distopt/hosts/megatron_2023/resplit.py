"""Values on their way between two splits of one grad buffer: that of the run, and that of the fork's files.

A per-rank file has one rank's part of the whole buffer, in the fork's order; a run with its one bucket has the same
split, and nothing travels. With other buckets each rank lays its values into zeros, at their places in all files, and a
reduce-scatter adds them up; as integers, so that every bit arrives. The way back is an all-gather, of which each rank
takes its values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distopt.comm.collectives import all_gather, reduce_scatter
from megatron_distopt.hosts.megatron_2023.buffers import BufferPlan
from megatron_distopt.layout import BufferLayout, ParamShard, Span

__all__ = ["Place", "fetch", "send", "stretches"]

#: Elements that travel at once, all ranks' together, so that it takes little memory.
PIECE_NUMEL = 1 << 26


@dataclass(frozen=True, eq=False)
class Place:
    """Neighbours that lie in one file.

    Args:
        rank: whose file.
        in_shard: where in it.
        values: 1-D, the same elements here.
    """

    rank: int
    in_shard: Span
    values: Tensor

    def within(self, piece: Span) -> tuple[slice, Tensor] | None:
        """Where its part of a piece lies in the piece, and the part; None where it has none."""
        part = self.in_shard.intersect(piece)
        if part is None:
            return None
        return part.relative_to(piece.start).as_slice(), self.values[part.relative_to(self.in_shard.start).as_slice()]


def stretches(plan: BufferPlan, shard: ParamShard) -> Iterator[tuple[int, Span, Span]]:
    """Where a shard of the run lies in the files: (rank, in that rank's file, in the shard).

    Args:
        plan: of the run.
        shard: in the run's split.
    """
    files = plan.file_layout
    in_file, numel = shard.in_param.moved_by(plan.in_file[shard.name].start), files.shard_numel
    for rank in range(in_file.start // numel, (in_file.stop - 1) // numel + 1):
        owned = in_file.intersect(files.buckets[0].shard(rank, files.num_shards)) or Span(0, 0)
        yield rank, owned.relative_to(rank * numel), owned.relative_to(in_file.start)


def send(places: Sequence[Place], plan: BufferPlan, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Collective over the plan's group: what lies in this rank's file, with zeros where nobody has anything.

    Args:
        places: this rank's, in all files.
        plan: of the run.
        dtype: of the values, the same on all ranks.
        device: the same.
    """
    files, group = plan.file_layout, plan.group
    own = torch.zeros(files.shard_numel, dtype=dtype, device=device)
    for piece in _pieces(files):
        rows = own.new_zeros(group.size, piece.numel)
        for row, in_row, values in _in_rows(places, rows, piece):
            row[in_row] = values
        bits = _as_integers(rows)
        reduce_scatter(bits.view(-1), bits[group.rank], group)
        own[piece.as_slice()] = rows[group.rank]
    return own


def fetch(own: Tensor, places: Sequence[Place], plan: BufferPlan) -> None:
    """Collective over the plan's group: the inverse of `send`.

    Args:
        own: what lies in this rank's file; 1-D.
        places: this rank's, in all files; their values are written.
        plan: of the run.
    """
    files, group = plan.file_layout, plan.group
    for piece in _pieces(files):
        rows = own.new_empty(group.size, piece.numel)
        rows[group.rank] = own[piece.as_slice()]
        all_gather(rows.view(-1), rows[group.rank], group)
        for row, in_row, values in _in_rows(places, rows, piece):
            values.copy_(row[in_row])


def _pieces(files: BufferLayout) -> Iterator[Span]:
    """Of the file of each rank."""
    step = max(PIECE_NUMEL // files.num_shards, 1)
    for start in range(0, files.shard_numel, step):
        yield Span(start, min(start + step, files.shard_numel))


def _in_rows(places: Sequence[Place], rows: Tensor, piece: Span) -> Iterator[tuple[Tensor, slice, Tensor]]:
    """(row of the file, where in it, values here) of what lies in a piece."""
    for place in places:
        found = place.within(piece)
        if found is not None:
            yield (rows[place.rank], *found)


def _as_integers(rows: Tensor) -> Tensor:
    """A view, of a dtype that every backend adds up."""
    return rows.view(torch.int32 if rows.element_size() % torch.int32.itemsize == 0 else torch.uint8)
