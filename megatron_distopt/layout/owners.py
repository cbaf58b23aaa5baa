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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from megatron_distopt.errors import LayoutError, refusal
from megatron_distopt.layout.buckets import BufferLayout, ParamSlot
from megatron_distopt.layout.matrices import MatrixBlock, MatrixSpec, newton_schulz_flops
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
    """The pieces of a stretch of a bucket by rank: at most a first one, whole shards, and a last one.

    Args:
        layout: of the buffer.
        bucket: index.
        in_buffer: a stretch of that bucket; not empty.

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
    """Who orthogonalizes a block of matrices.

    Args:
        name: of the param.
        block: of that param; see `MatrixBlock`.
        bucket: index.
        in_buffer: the elements of the block.
        rank: the matrix owner, in the data-parallel group.
        cost: of the update.
        round: of travel; None where the owner has all of it. In every round a rank is the owner of at most one block,
            so that it needs memory for one at a time.
    """

    name: str
    block: MatrixBlock
    bucket: int
    in_buffer: Span
    rank: int
    cost: int
    round: int | None


@dataclass(frozen=True, slots=True)
class Travel:
    """A piece of a block that goes from the rank that owns its elements to the matrix owner; the update comes back.

    Args:
        name: of the param.
        round: see `MatrixOwner`.
        holder, owner: ranks; never the same.
        in_block: the elements of the block.
        in_buffer: the same elements in the buffer.
    """

    name: str
    round: int
    holder: int
    owner: int
    in_block: Span
    in_buffer: Span


@dataclass(frozen=True)
class OwnerPlan:
    """The matrix owners of one buffer; cannot be built wrong.

    Args:
        layout: of the buffer.
        owners: one for each block of matrices, in buffer order.
    """

    layout: BufferLayout
    owners: tuple[MatrixOwner, ...]

    def __post_init__(self) -> None:
        for left, right in pairwise(self.owners):
            if left.in_buffer.stop > right.in_buffer.start:
                got, rule = f"{left.name} at {left.in_buffer}", f"end before {right.name} at {right.in_buffer}"
                raise LayoutError(refusal("block of matrices", got, rule, "Call plan_owners"))
        for each in self.owners:
            _prove_owner(self.layout, each)
        travelling = [(each.rank, each.round) for each in self.owners if each.round is not None]
        if len(set(travelling)) != len(travelling):
            rule = "have at most one block of matrices in a round"
            raise LayoutError(refusal("matrix owner", "two at a time", rule, "Call plan_owners"))

    @cached_property
    def owners_of(self) -> dict[str, tuple[MatrixOwner, ...]]:
        """The owners of the blocks of each matrix param, by its name."""
        found: dict[str, list[MatrixOwner]] = {}
        for each in self.owners:
            found.setdefault(each.name, []).append(each)
        return {name: tuple(each) for name, each in found.items()}

    @cached_property
    def num_rounds(self) -> int:
        """Rounds of travel; 0 where nothing travels."""
        return max((each.round + 1 for each in self.owners if each.round is not None), default=0)

    def owned_by(self, rank: int) -> tuple[MatrixOwner, ...]:
        """What a rank orthogonalizes, in buffer order."""
        return tuple(each for each in self.owners if each.rank == rank)

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
        return tuple(travel for owner in self.owned_by(rank) for travel in self._arriving(owner))

    def _arriving(self, owner: MatrixOwner) -> Iterator[Travel]:
        bucket = self.layout.buckets[owner.bucket]
        for holder in _holders(pieces_of(self.layout, owner.bucket, owner.in_buffer)):
            if holder != owner.rank:
                yield from _travel(owner, holder, bucket.shard(holder, self.layout.num_shards))


def _travel(owner: MatrixOwner, holder: int, in_buffer: Span) -> Iterator[Travel]:
    piece = owner.in_buffer.intersect(in_buffer)
    if piece is not None and owner.round is not None:
        in_block = piece.relative_to(owner.in_buffer.start)
        yield Travel(owner.name, owner.round, holder, owner.rank, in_block, piece)


def _prove_owner(layout: BufferLayout, owner: MatrixOwner) -> None:
    slot = layout.slot_of.get(owner.name)
    if slot is None or owner.in_buffer != owner.block.in_param.moved_by(slot.in_buffer.start):
        got, rule = f"{owner.block.in_param} at {owner.in_buffer}", f"lie where its param does: {slot}"
        raise LayoutError(refusal(f"block of {owner.name!r}", got, rule, "Call plan_owners"))
    holders = _holders(pieces_of(layout, slot.bucket, owner.in_buffer))
    has_all = holders == range(owner.rank, owner.rank + 1)
    is_rank = 0 <= owner.rank < layout.num_shards
    if owner.bucket != slot.bucket or not is_rank or has_all != (owner.round is None):
        got = f"rank {owner.rank}, round {owner.round}, bucket {owner.bucket}"
        rule = f"be one of {layout.num_shards} ranks, with a round unless it is {holders}, in bucket {slot.bucket}"
        raise LayoutError(refusal(f"matrix owner of {owner.name!r}", got, rule, "Call plan_owners"))


def _holders(pieces: Sequence[EqualPieces]) -> range:
    return range(pieces[0].ranks.start, pieces[-1].ranks.stop)


def plan_owners(
    layout: BufferLayout,
    matrices: Mapping[str, MatrixSpec],
    cost_of: Callable[[tuple[int, int]], int] = newton_schulz_flops,
) -> OwnerPlan:
    """Chooses the matrix owners, see [Note: balance]. It depends on its arguments alone, so all ranks choose alike.

    Args:
        layout: of the buffer.
        matrices: by name of their param; all other params are updated element by element.
        cost_of: of the update of a matrix of so many rows and columns, in any unit.

    Raises:
        LayoutError: a param is not in the layout, or has another number of elements than its matrices.

    >>> from megatron_distopt.layout import ParamSpec, lay_out
    >>> layout = lay_out([ParamSpec("a", 4), ParamSpec("b", 8)], num_shards=2, alignment_numel=1)
    >>> plan = plan_owners(layout, {"a": MatrixSpec(2, 2), "b": MatrixSpec(2, 4)})
    >>> [(each.name, each.rank, each.round) for each in plan.owners]
    [('a', 0, None), ('b', 1, 0)]
    >>> plan.leaving(0)[0].in_block
    Span(start=0, stop=2)
    """
    _check(layout, matrices)
    blocks = [
        _Block.of(layout, slot, block, sum(cost_of(matrices[slot.name].whole(shape)) for shape in block.shapes))
        for slot, block in _blocks(layout, matrices)
    ]
    ranks = _choose(layout, blocks)
    rounds: Counter[int] = Counter()
    owners = []
    for each, rank in zip(blocks, ranks, strict=True):
        travels = each.holders != range(rank, rank + 1)
        number = rounds[rank] if travels else None
        slot, block = each.slot, each.block
        in_buffer = block.in_param.moved_by(slot.in_buffer.start)
        owners.append(MatrixOwner(slot.name, block, slot.bucket, in_buffer, rank, each.cost, number))
        rounds[rank] += travels
    return OwnerPlan(layout, tuple(owners))


def _check(layout: BufferLayout, matrices: Mapping[str, MatrixSpec]) -> None:
    for name, each in matrices.items():
        slot = layout.slot_of.get(name)
        if slot is None:
            remedy = "Give the matrices of this buffer alone"
            raise LayoutError(refusal(f"param {name!r}", "matrices without a slot", "be in the layout", remedy))
        if slot.in_buffer.numel != each.numel:
            got, rule = f"matrices of {each.numel} elements", f"have the param's {slot.in_buffer.numel}"
            raise LayoutError(refusal(f"param {name!r}", got, rule, "Give its own rows and columns"))


def _blocks(layout: BufferLayout, matrices: Mapping[str, MatrixSpec]) -> Iterator[tuple[ParamSlot, MatrixBlock]]:
    slots = (slot for slot in layout.slots if slot.name in matrices)
    return ((slot, block) for slot in slots for block in matrices[slot.name].blocks)


@dataclass(frozen=True, slots=True)
class _Block:
    """A block without an owner yet."""

    slot: ParamSlot
    block: MatrixBlock
    pieces: tuple[EqualPieces, ...]
    cost: int

    @classmethod
    def of(cls, layout: BufferLayout, slot: ParamSlot, block: MatrixBlock, cost: int) -> _Block:
        pieces = pieces_of(layout, slot.bucket, block.in_param.moved_by(slot.in_buffer.start))
        return cls(slot, block, pieces, cost)

    @property
    def holders(self) -> range:
        return _holders(self.pieces)

    @property
    def is_whole(self) -> bool:
        return len(self.holders) == 1


def _choose(layout: BufferLayout, blocks: Sequence[_Block]) -> list[int]:
    """The matrix owner of each block, in their order."""
    costs = [each.cost for each in blocks]
    bound = max(sum(costs) / layout.num_shards, max(costs, default=0)) * _TOLERANCE
    loads = _Loads(layout.num_shards)
    ranks: dict[int, int] = {}
    costliest_first = sorted(range(len(blocks)), key=lambda number: -costs[number])
    for number in costliest_first:
        home = blocks[number].holders[0]
        if blocks[number].is_whole and loads.of(home) + costs[number] <= bound:
            ranks[number] = home
            loads.add(home, costs[number])
    for number in costliest_first:
        if number not in ranks:
            ranks[number] = _cheapest(blocks[number], loads, bound)
            loads.add(ranks[number], costs[number])
    return [ranks[number] for number in range(len(blocks))]


def _cheapest(block: _Block, loads: _Loads, bound: float) -> int:
    longest = max(piece.numel for piece in block.pieces)
    with_longest = [loads.lowest(piece.ranks) for piece in block.pieces if piece.numel == longest]
    for rank in (min(with_longest, key=loads.of), loads.lowest(block.holders)):
        if loads.of(rank) + block.cost <= bound:
            return rank
    return loads.lowest(loads.ranks)


class _Loads:
    """The cost of each rank so far, in a binary tree: the lowest of some neighbours is found in O(log ranks)."""

    def __init__(self, num_ranks: int) -> None:
        self.ranks = range(num_ranks)
        self._first = 1 << (num_ranks - 1).bit_length()
        # Node i has children 2 i and 2 i + 1, and holds the lowest (cost, rank) below it; leaves begin at `_first`.
        self._nodes = [(0, 0)] * self._first + [(0, rank) for rank in range(self._first)]
        for node in reversed(range(1, self._first)):
            self._nodes[node] = min(self._nodes[2 * node : 2 * node + 2])

    def of(self, rank: int) -> int:
        """The cost of a rank."""
        return self._nodes[self._first + rank][0]

    def add(self, rank: int, cost: int) -> None:
        """Adds to the cost of a rank."""
        node = self._first + rank
        self._nodes[node] = (self.of(rank) + cost, rank)
        while node > 1:
            node //= 2
            self._nodes[node] = min(self._nodes[2 * node : 2 * node + 2])

    def lowest(self, ranks: range) -> int:
        """The rank with the lowest cost; of equal ones the first."""
        left, right = self._first + ranks.start, self._first + ranks.stop
        found = []
        while left < right:
            if left % 2:
                found.append(self._nodes[left])
                left += 1
            if right % 2:
                right -= 1
                found.append(self._nodes[right])
            left, right = left // 2, right // 2
        return min(found)[1]
