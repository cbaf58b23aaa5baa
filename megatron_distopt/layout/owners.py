"""Which rank computes the update of each matrix, and what travels to it and back.

[Note: matrix owners] An optimizer such as Muon needs a whole matrix at a time. The layout does not change for it: every
rank keeps main params and momentum of its shards, wherever their borders cut a matrix. In addition every matrix has one
*matrix owner*, the rank that orthogonalizes it. The other ranks with a piece of it send theirs to the owner and get the
same elements of the update back. A matrix that lies whole in the shard of its owner does not travel. This works for
every layout, also for the buffers of a host. docs/decisions/0007-matrix-owners.md compares it with other ways.

[Note: balance] All ranks wait for the one with the costliest updates. No choice makes its cost lower than the average
of all ranks, or than the costliest matrix: this is the bound. A matrix goes to the rank with the longest piece of it,
which saves most travel, as long as that rank's cost stays within 1.03 times the bound; else to the rank with a piece
that has the lowest cost so far, with the same condition; else to the rank with the lowest cost so far. Those that lie
whole in a shard choose first, because they have most to lose; costlier ones choose before cheaper ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush

from megatron_distopt.errors import LayoutError
from megatron_distopt.layout.buckets import BufferLayout
from megatron_distopt.layout.matrices import MatrixBlock, MatrixSpec, update_cost
from megatron_distopt.layout.shards import owned_shards
from megatron_distopt.layout.spans import Span

#: How far above the bound the cost of a rank may come before a matrix goes to a rank that has less of it.
_TOLERANCE = 1.03


@dataclass(frozen=True, slots=True)
class EqualPieces:
    """Neighbouring ranks that own equally long pieces of a stretch of a bucket."""

    ranks: range
    numel: int


def pieces_of(layout: BufferLayout, bucket: int, in_buffer: Span) -> tuple[EqualPieces, ...]:
    """The pieces of a stretch of a bucket, which is not empty, by rank: at most a first one, whole shards, a last one.

    >>> from megatron_distopt.layout import ParamSpec, lay_out
    >>> layout = lay_out([ParamSpec("a", 1), ParamSpec("b", 6)], num_shards=4, alignment_numel=1)
    >>> [(each.ranks, each.numel) for each in pieces_of(layout, 0, Span(1, 7))]
    [(range(0, 1), 1), (range(1, 3), 2), (range(3, 4), 1)]
    """
    whole = layout.buckets[bucket].in_buffer
    shard_numel = whole.numel // layout.num_shards
    in_bucket = in_buffer.relative_to(whole.start)
    first, last = in_bucket.start // shard_numel, (in_bucket.stop - 1) // shard_numel
    if first == last:
        return (EqualPieces(range(first, first + 1), in_bucket.numel),)
    found = (
        EqualPieces(range(first, first + 1), (first + 1) * shard_numel - in_bucket.start),
        EqualPieces(range(first + 1, last), shard_numel),
        EqualPieces(range(last, last + 1), in_bucket.stop - last * shard_numel),
    )
    return tuple(each for each in found if each.ranks)


@dataclass(frozen=True, slots=True)
class MatrixOwner:
    """The rank that updates a block of matrices."""

    name: str  # of the param
    block: MatrixBlock
    bucket: int
    in_buffer: Span  # the elements of the block
    rank: int  # in the data-parallel group
    cost: int  # of the update
    #: Of travel; None where the owner has all of it. In a round a rank is the owner of at most one block, so that it
    #: needs memory for one at a time.
    round: int | None


@dataclass(frozen=True, slots=True)
class Travel:
    """A piece of a block that goes from the rank that owns its elements to the matrix owner; the update comes back."""

    name: str
    round: int
    holder: int  # rank; never the owner
    owner: int
    in_block: Span
    in_buffer: Span  # the same elements


@dataclass(frozen=True)
class OwnerPlan:
    """The matrix owners of one buffer, as `plan_owners` chooses them."""

    layout: BufferLayout
    owners: tuple[MatrixOwner, ...]  # one for each block of matrices, in buffer order

    @cached_property
    def owners_of(self) -> dict[str, tuple[MatrixOwner, ...]]:
        """The owners of the blocks of each matrix param, by its name."""
        by_name: dict[str, tuple[MatrixOwner, ...]] = {}
        for owner in self.owners:
            by_name[owner.name] = (*by_name.get(owner.name, ()), owner)
        return by_name

    @cached_property
    def num_rounds(self) -> int:
        """Rounds of travel; 0 where nothing travels."""
        return max((owner.round + 1 for owner in self.owners if owner.round is not None), default=0)

    @property
    def imbalance(self) -> float:
        """The cost of the updates of the busiest rank, divided by the average of all ranks."""
        costs: Counter[int] = Counter()
        for owner in self.owners:
            costs[owner.rank] += owner.cost
        return max(costs.values()) * self.layout.num_shards / costs.total() if costs else 1.0

    def owned_by(self, rank: int) -> tuple[MatrixOwner, ...]:
        """What a rank updates, in buffer order."""
        return tuple(owner for owner in self.owners if owner.rank == rank)

    def leaving(self, rank: int) -> tuple[Travel, ...]:
        """The pieces that a rank sends to matrix owners, in buffer order; it receives their updates."""
        return tuple(
            travel
            for shard in owned_shards(self.layout, rank)
            for owner in self.owners_of.get(shard.name, ())
            if owner.rank != rank
            for travel in _travel(owner, rank, shard.in_buffer)
        )

    def arriving(self, rank: int) -> tuple[Travel, ...]:
        """The pieces that a matrix owner receives, in buffer order; it sends their updates."""
        return tuple(
            travel
            for owner in self.owned_by(rank)
            for holder in _holders(pieces_of(self.layout, owner.bucket, owner.in_buffer))
            if holder != rank
            for travel in _travel(
                owner, holder, self.layout.buckets[owner.bucket].shard(holder, self.layout.num_shards)
            )
        )


def _travel(owner: MatrixOwner, holder: int, in_buffer: Span) -> Iterator[Travel]:
    piece = owner.in_buffer.intersect(in_buffer)
    if piece is not None and owner.round is not None:
        in_block = piece.relative_to(owner.in_buffer.start)
        yield Travel(owner.name, owner.round, holder, owner.rank, in_block, piece)


def _holders(pieces: Sequence[EqualPieces]) -> range:
    return range(pieces[0].ranks.start, pieces[-1].ranks.stop)


def plan_owners(layout: BufferLayout, matrices: Mapping[str, MatrixSpec]) -> OwnerPlan:
    """Chooses the matrix owners, see [Note: balance]. It depends on its arguments alone, so all ranks choose alike.

    Args:
        layout: of the buffer.
        matrices: by name of their param; all other params are updated element by element.

    Raises:
        LayoutError: a param is not in the layout, or has another number of elements than its matrices.

    >>> from megatron_distopt.layout import ParamSpec, lay_out
    >>> layout = lay_out([ParamSpec("a", 4), ParamSpec("b", 8)], num_shards=2, alignment_numel=1)
    >>> plan = plan_owners(layout, {"a": MatrixSpec(2, 2), "b": MatrixSpec(2, 4)})
    >>> [(owner.name, owner.rank, owner.round) for owner in plan.owners]
    [('a', 0, None), ('b', 1, 0)]
    >>> plan.leaving(0)[0].in_block
    Span(start=0, stop=2)
    """
    for name, spec in matrices.items():
        slot = layout.slot_of.get(name)
        if slot is None or slot.in_buffer.numel != spec.numel:
            numel = "no elements in this buffer" if slot is None else f"{slot.in_buffer.numel} elements"
            raise LayoutError(
                f"Param {name!r} has {numel}, and matrices of {spec.numel}. Give its own rows and columns."
            )
    blocks = [
        (slot, block, block.in_param.moved_by(slot.in_buffer.start))
        for slot in layout.slots
        if slot.name in matrices
        for block in matrices[slot.name].blocks
    ]
    costs = [sum(update_cost(matrices[slot.name].whole(shape)) for shape in block.shapes) for slot, block, _ in blocks]
    pieces = [pieces_of(layout, slot.bucket, in_buffer) for slot, _, in_buffer in blocks]
    ranks = _choose_ranks(pieces, costs, layout.num_shards)
    rounds: Counter[int] = Counter()
    owners = []
    for (slot, block, in_buffer), cost, of_block, rank in zip(blocks, costs, pieces, ranks, strict=True):
        travels = _holders(of_block) != range(rank, rank + 1)
        number = rounds[rank] if travels else None
        owners.append(MatrixOwner(slot.name, block, slot.bucket, in_buffer, rank, cost, number))
        rounds[rank] += travels
    return OwnerPlan(layout, tuple(owners))


def _choose_ranks(pieces: Sequence[tuple[EqualPieces, ...]], costs: Sequence[int], num_ranks: int) -> list[int]:
    """The owner of each block."""
    bound = max(sum(costs) / num_ranks, max(costs, default=0)) * _TOLERANCE
    loads, ranks = [0] * num_ranks, dict[int, int]()
    costliest_first = sorted(range(len(costs)), key=lambda number: -costs[number])
    for number in costliest_first:
        holders = _holders(pieces[number])
        if len(holders) == 1 and loads[holders[0]] + costs[number] <= bound:
            ranks[number] = holders[0]
            loads[holders[0]] += costs[number]
    # A heap of ranks by cost. A rank stays in it with its old cost until it comes to the top.
    by_load = [(load, rank) for rank, load in enumerate(loads)]
    heapify(by_load)
    for number in costliest_first:
        if number in ranks:
            continue
        longest = max(piece.numel for piece in pieces[number])
        with_longest = [rank for piece in pieces[number] if piece.numel == longest for rank in piece.ranks]
        for candidates in (with_longest, _holders(pieces[number])):
            rank = min(candidates, key=loads.__getitem__)
            if loads[rank] + costs[number] <= bound:
                break
        else:
            while by_load[0][0] != loads[by_load[0][1]]:
                _, rank = heappop(by_load)
                heappush(by_load, (loads[rank], rank))
            rank = by_load[0][1]
        ranks[number] = rank
        loads[rank] += costs[number]
    return [ranks[number] for number in range(len(costs))]
