"""Which rank computes the update of each matrix, and what is sent to it and back.

[Note: matrix owners] An optimizer such as Muon needs a whole matrix at a time. The layout does not
change for it: every rank keeps main params and momentum of its shards, wherever their borders cut a
matrix. In addition every matrix has one *matrix owner*, the rank that orthogonalizes it. The other
ranks with a piece of the matrix send it to the owner and receive the same elements of the update. A
matrix that lies whole in its owner's shard is not sent. This works for every layout, including
those of a host's buffers. docs/decisions.md compares alternatives.

[Note: balance] All ranks wait for the one with the costliest updates. Its cost cannot be lower than
the average of all ranks, or than the costliest matrix: this is the bound. A rank may get a matrix
only if its cost stays within 1.03 times the bound. The rank with the longest piece is tried first,
because that saves most communication. Then comes the cheapest rank so far with a piece, and if both
would exceed the limit, the cheapest rank of all. Matrices that lie whole in a shard are assigned
first, because they have most to lose, and costlier ones before cheaper ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from megatron_distopt.errors import LayoutError
from megatron_distopt.layout.buckets import Bucket, BufferLayout
from megatron_distopt.layout.matrices import MatrixBlock, MatrixSpec, update_cost
from megatron_distopt.layout.shards import owned_shards
from megatron_distopt.layout.spans import Span

#: How far the cost of a rank may exceed the bound, see [Note: balance].
_TOLERANCE = 1.03


@dataclass(frozen=True, slots=True)
class MatrixOwner:
    """The rank that updates a block of matrices."""

    name: str  # of the param
    block: MatrixBlock
    bucket: int
    in_buffer: Span  # the elements of the block
    rank: int  # in the data-parallel group
    cost: int  # of the update
    #: The round in which pieces are sent; None if the owner has all of the block. A rank owns at
    #: most one block of a round, so it needs memory for only one at a time.
    round: int | None


@dataclass(frozen=True, slots=True)
class Travel:
    """A piece of a block that the rank with its elements sends to the matrix owner, which sends the
    update back."""

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
    def owners_of(self) -> dict[str, tuple[MatrixOwner, ...]]:  # by name of the param
        return {
            name: tuple(owners)
            for name, owners in groupby(self.owners, key=lambda owner: owner.name)
        }

    @cached_property
    def num_rounds(self) -> int:
        return max((owner.round + 1 for owner in self.owners if owner.round is not None), default=0)

    @property
    def imbalance(self) -> float:
        """The cost of the updates of the busiest rank, divided by the average of all ranks."""
        costs: Counter[int] = Counter()
        for owner in self.owners:
            costs[owner.rank] += owner.cost
        return max(costs.values()) * self.layout.num_shards / costs.total() if costs else 1.0

    def owned_by(self, rank: int) -> tuple[MatrixOwner, ...]:
        return tuple(owner for owner in self.owners if owner.rank == rank)

    def leaving(self, rank: int) -> tuple[Travel, ...]:
        """The pieces that a rank sends to matrix owners, in buffer order; it receives their
        updates."""
        return tuple(
            travel
            for shard in owned_shards(self.layout, rank)
            for owner in self.owners_of.get(shard.name, ())
            if owner.rank != rank
            for travel in _travel(owner, rank, shard.in_buffer)
        )

    def arriving(self, rank: int) -> tuple[Travel, ...]:
        """The pieces that a matrix owner receives, in buffer order; it sends their updates."""
        buckets, num_shards = self.layout.buckets, self.layout.num_shards
        return tuple(
            travel
            for owner in self.owned_by(rank)
            for holder in buckets[owner.bucket].holders(owner.in_buffer, num_shards)
            if holder != rank
            for travel in _travel(owner, holder, buckets[owner.bucket].shard(holder, num_shards))
        )


def _travel(owner: MatrixOwner, holder: int, in_buffer: Span) -> Iterator[Travel]:
    piece = owner.in_buffer.intersect(in_buffer)
    if piece is not None and owner.round is not None:
        in_block = piece.relative_to(owner.in_buffer.start)
        yield Travel(owner.name, owner.round, holder, owner.rank, in_block, piece)


def plan_owners(layout: BufferLayout, matrices: Mapping[str, MatrixSpec]) -> OwnerPlan:
    """Chooses the owners of `matrices`, which are given by the name of their param; see [Note:
    balance].

    The choice depends only on the arguments, so all ranks choose alike. All other params are
    updated element by element.

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
            numel = (
                "no elements in this buffer" if slot is None else f"{slot.in_buffer.numel} elements"
            )
            raise LayoutError(
                f"Param {name!r} has {numel}, but its matrices have {spec.numel}. Give the param's "
                "own rows and columns."
            )
    blocks = [
        (slot, block, block.in_param.moved_by(slot.in_buffer.start))
        for slot in layout.slots
        if slot.name in matrices
        for block in matrices[slot.name].blocks
    ]
    costs = [
        sum(update_cost(matrices[slot.name].whole(shape)) for shape in block.shapes)
        for slot, block, _ in blocks
    ]
    stretches = [(layout.buckets[slot.bucket], in_buffer) for slot, _, in_buffer in blocks]
    rounds: Counter[int] = Counter()
    owners = []
    ranks = _choose_ranks(stretches, costs, layout.num_shards)
    for (slot, block, in_buffer), (bucket, _), cost, rank in zip(
        blocks, stretches, costs, ranks, strict=True
    ):
        travels = bucket.holders(in_buffer, layout.num_shards) != range(rank, rank + 1)
        number = rounds[rank] if travels else None
        owners.append(MatrixOwner(slot.name, block, slot.bucket, in_buffer, rank, cost, number))
        rounds[rank] += travels
    return OwnerPlan(layout, tuple(owners))


def _choose_ranks(
    stretches: Sequence[tuple[Bucket, Span]], costs: Sequence[int], num_ranks: int
) -> list[int]:
    """The owner of each block, which is a stretch of a bucket."""
    bound = max(sum(costs) / num_ranks, max(costs, default=0)) * _TOLERANCE
    loads, ranks = [0] * num_ranks, dict[int, int]()
    all_holders = [bucket.holders(in_buffer, num_ranks) for bucket, in_buffer in stretches]
    costliest_first = sorted(range(len(costs)), key=lambda number: -costs[number])
    for number in costliest_first:
        holders = all_holders[number]
        if len(holders) == 1 and loads[holders[0]] + costs[number] <= bound:
            ranks[number] = holders[0]
            loads[holders[0]] += costs[number]
    for number in costliest_first:
        if number in ranks:
            continue
        for candidates in (_with_longest_piece(*stretches[number], num_ranks), all_holders[number]):
            rank = min(candidates, key=loads.__getitem__)
            if loads[rank] + costs[number] <= bound:
                break
        else:
            rank = min(range(num_ranks), key=loads.__getitem__)
        ranks[number] = rank
        loads[rank] += costs[number]
    return [ranks[number] for number in range(len(costs))]


def _with_longest_piece(bucket: Bucket, in_buffer: Span, num_ranks: int) -> list[int]:
    """The ranks with the longest piece of a stretch. All ranks between the first and the last one
    have their whole shard in it."""
    holders = bucket.holders(in_buffer, num_ranks)
    numel_of = dict.fromkeys(holders, bucket.in_buffer.numel // num_ranks)
    for rank in (holders[0], holders[-1]):
        piece = bucket.shard(rank, num_ranks).intersect(in_buffer)
        numel_of[rank] = 0 if piece is None else piece.numel
    longest = max(numel_of.values())
    return [rank for rank, numel in numel_of.items() if numel == longest]
