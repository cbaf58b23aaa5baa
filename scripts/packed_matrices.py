"""Compares matrix owners with packing: bytes that matrices add to the wire, if params are ordered to keep them whole.

Usage: python scripts/packed_matrices.py

Packing changes the order of the params inside every bucket. The shards of a bucket are filled one after the other with
the longest matrices that fit (first fit decreasing). What is left of a shard is crossed by a param that loses nothing
by it: an element-wise one, or a matrix that is longer than a shard. If there is none it stays empty, and if the bucket
may not become longer, it is crossed by the matrix that loses least. Padding is on the wire as well, in the collectives
of every rank, so several lengths of a shard up to 4 % of padding are tried, and the one with the fewest bytes is taken.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_distopt.layout import (  # noqa: E402
    Bucket,
    BufferLayout,
    MatrixSpec,
    ParamSlot,
    Span,
    default_bucket_size,
    lay_out,
    plan_owners,
)
from megatron_distopt.layout.balance import Balance, balance_of  # noqa: E402
from tests.support.large_models import LARGE_MODELS, matrices_of, params_of  # noqa: E402

#: Bytes of an element in the collectives of a bucket, and of one that travels to the matrix owner and back.
BUCKET_NBYTES, TRAVEL_NBYTES = 6, 4
MAX_PADDING, NUM_LENGTHS, ALIGNMENT = 0.04, 16, 64


@dataclass(frozen=True)
class Item:
    """A param of a bucket; `numel` is rounded up to the alignment."""

    number: int
    numel: int
    is_matrix: bool

    def largest_piece(self, room: int, shard_numel: int) -> int:
        """Elements of the largest piece of a param that begins where `room` elements of a shard are left."""
        return self.numel if self.numel <= room else min(shard_numel, max(room, self.numel - room))

    def loss(self, room: int, shard_numel: int) -> int:
        """Elements that travel because the param does not begin with a shard of its own."""
        return (min(self.numel, shard_numel) - self.largest_piece(room, shard_numel)) * self.is_matrix


class Waiting:
    """Items that have no place yet: by length, and in their order where they are equally long."""

    def __init__(self, items: Iterable[Item]) -> None:
        queues: dict[int, deque[Item]] = {}
        for item in items:
            queues.setdefault(item.numel, deque()).append(item)
        self.queues = dict(sorted(queues.items(), reverse=True))

    def firsts(self) -> Iterator[Item]:
        return (queue[0] for queue in self.queues.values())

    def take(self, item: Item) -> Item:
        self.queues[item.numel].popleft()
        if not self.queues[item.numel]:
            del self.queues[item.numel]
        return item

    def take_longest(self, room: int) -> Item | None:
        fitting = next((item for item in self.firsts() if item.numel <= room), None)
        return None if fitting is None else self.take(fitting)


def fill(items: Sequence[Item], num_shards: int, shard_numel: int) -> Iterator[tuple[Item, int]]:
    """Every item with its first element in the bucket."""
    matrices = Waiting(item for item in items if item.is_matrix)
    others = Waiting(item for item in items if not item.is_matrix)
    free = num_shards * shard_numel - sum(item.numel for item in items)
    position = 0
    while matrices.queues or others.queues:
        room = shard_numel - position % shard_numel
        item = matrices.take_longest(room)
        if item is None and (room < shard_numel or not matrices.queues):
            item = others.take_longest(room)
        if item is None:
            crossing = min((*matrices.firsts(), *others.firsts()), key=lambda each: each.loss(room, shard_numel))
            if room <= free and crossing.loss(room, shard_numel):
                free -= room
                position += room
                continue
            item = (matrices if crossing.is_matrix else others).take(crossing)
        yield item, position
        position += item.numel


@lru_cache(maxsize=64)  # the layers of a model are alike
def pack(items: tuple[Item, ...], num_shards: int) -> tuple[int, tuple[tuple[Item, int], ...]]:
    """The length of a shard with the fewest bytes on the wire, and where the items lie."""
    numel = sum(item.numel for item in items)
    least = -(-numel // (num_shards * ALIGNMENT)) * ALIGNMENT
    most = max(least, int((1 + MAX_PADDING) * numel / num_shards) // ALIGNMENT * ALIGNMENT)
    steps = ((most - least) * step**2 // NUM_LENGTHS**2 // ALIGNMENT * ALIGNMENT for step in range(NUM_LENGTHS + 1))
    found = []
    for shard_numel in sorted({least + step for step in steps}):
        placed = tuple(fill(items, num_shards, shard_numel))
        pieces = (item.largest_piece(shard_numel - at % shard_numel, shard_numel) for item, at in placed)
        lost = (item.numel - piece for (item, _), piece in zip(placed, pieces, strict=True) if item.is_matrix)
        padding = (num_shards * shard_numel - numel) * (num_shards - 1)
        found.append((padding * BUCKET_NBYTES + sum(lost) * TRAVEL_NBYTES, shard_numel, placed))
    return min(found, key=lambda each: each[:2])[1:]


def packed(layout: BufferLayout, matrices: Collection[str]) -> BufferLayout:
    """The same buckets with their params in another order."""
    slots: list[ParamSlot] = []
    buckets: list[Bucket] = []
    for index, old in enumerate(layout.slots_of_bucket):
        start = buckets[-1].in_buffer.stop if buckets else 0
        numels = (-(-slot.in_buffer.numel // ALIGNMENT) * ALIGNMENT for slot in old)
        pairs = enumerate(zip(old, numels, strict=True))
        shard_numel, placed = pack(
            tuple(Item(number, numel, slot.name in matrices) for number, (slot, numel) in pairs), layout.num_shards
        )
        for item, at in placed:
            name, numel = old[item.number].name, old[item.number].in_buffer.numel
            slots.append(ParamSlot(name, index, Span(start + at, start + at + numel)))
        in_buffer = Span(start, start + shard_numel * layout.num_shards)
        buckets.append(Bucket(index, in_buffer, slots[-1].in_buffer.stop - start))
    return BufferLayout(tuple(slots), tuple(buckets), layout.num_shards)


def extra(balance: Balance, numel: int, num_shards: int) -> float:
    """What matrices add to the bytes of collectives: travel, and padding of the buckets."""
    plain = numel * BUCKET_NBYTES * (num_shards - 1) / num_shards
    return (balance.bucket_nbytes + balance.travel_nbytes) / plain - 1


def cells(layout: BufferLayout, matrices: Mapping[str, MatrixSpec], numel: int) -> list[str]:
    """Bytes on the wire, cost, and matrices that travel."""
    balance = balance_of(plan_owners(layout, matrices))
    wire = f"{extra(balance, numel, layout.num_shards):.2%}".replace("%", " %")
    return [wire, f"{balance.cost_imbalance:.2f}", f"{balance.num_travelling}"]


def _sizes(numel: int, ranks: int) -> tuple[tuple[str, int | None], ...]:
    return (("default", default_bucket_size(numel, ranks)), ("1/8 of the model", numel // 8), ("one bucket", None))


def table() -> str:
    """Both ways for models of public sizes."""
    lines = [
        "| model | ranks | bucket size | extra on the wire | cost, imbalance | matrices that travel "
        "| packed: extra on the wire | cost, imbalance | matrices that travel |\n"
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|\n"
    ]
    for name in ("LLaMA 7B", "LLaMA 70B", "Mixtral 8x7B"):
        params, matrices = params_of(LARGE_MODELS[name]), matrices_of(LARGE_MODELS[name])
        numel = sum(param.numel for param in params)
        for ranks in (2, 8, 64):
            for label, size in _sizes(numel, ranks):
                plain = lay_out(params, num_shards=ranks, bucket_size=size)
                row = [*cells(plain, matrices, numel), *cells(packed(plain, matrices.keys()), matrices, numel)]
                lines.append(f"| {name} | {ranks} | {label} | {' | '.join(row)} |\n")
    return "".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table())
