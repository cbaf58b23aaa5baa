"""Collectives from pair to pair: bit for bit what gloo's own give, whatever the sizes.

One spawn of four ranks, which also form groups of two and three.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt.comm import Group, collectives, pairwise
from megatron_distopt.comm.collectives import begin_reduce_scatter, carrier_of
from tests.support.spawn import run_ranks

RANKS = 4
MEMBERS = {4: (0, 1, 2, 3), 3: (0, 2, 3), 2: (1, 3)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Elements of a shard, and bytes of scratch memory: in one part, in many, with a short one at the end.
SIZES = {"one part": (1000, 1 << 20), "one element": (1, 1 << 20), "many parts": (1000, 600), "exact parts": (64, 32)}


def _bucket(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _sum_in_order(parts: list[Tensor], owner: int) -> Tensor:
    """The reference: from the rank before the owner downwards, around the ring."""
    before = [parts[(owner - distance) % len(parts)] for distance in range(1, len(parts))]
    total = before[0]
    for part in [*before[1:], parts[owner]]:
        total = total + part
    return total


def _gloos(group: Group, mine: Tensor, own: slice) -> Tensor:
    mine = mine.clone()
    dist.all_reduce(mine, group=group.handle)
    return mine[own]


def _reduced(
    group: Group, members: tuple[int, ...], numel: int, dtype: torch.dtype, reduce: Callable[..., Any]
) -> bool:
    buckets = [_bucket(rank, group.size * numel, dtype) for rank in members]
    mine = buckets[group.rank].clone()
    own = slice(group.rank * numel, (group.rank + 1) * numel)
    gloos = _gloos(group, mine, own)
    pending = reduce(mine, mine[own], group)
    if pending is not None:
        pending.wait()
    wanted = _sum_in_order([bucket[own] for bucket in buckets], group.rank)
    # gloo cuts a buffer at multiples of 8 bytes: where a shard ends elsewhere, some elements go around otherwise.
    return torch.equal(mine[own], wanted) and (numel % 8 > 0 or torch.equal(mine[own], gloos))


def _gathered(group: Group, members: tuple[int, ...], numel: int, dtype: torch.dtype, *, in_place: bool) -> bool:
    parts = [_bucket(rank, numel, dtype) for rank in members]
    whole = torch.zeros(group.size * numel, dtype=dtype)
    shard = parts[group.rank].clone()
    if in_place:
        own = whole[group.rank * numel : (group.rank + 1) * numel]
        shard = own.copy_(shard)
    pairwise.all_gather(whole, shard, group)
    return torch.equal(whole, torch.cat(parts))


def _collect(rank: int, size: int) -> dict[str, Any]:
    handles = {number: dist.new_group(list(members)) for number, members in MEMBERS.items()}
    found: dict[str, Any] = {"right": {}}
    for number, members in MEMBERS.items():
        if rank not in members:
            continue
        group = Group.of(handles[number])
        for name, (numel, scratch) in SIZES.items():
            pairwise.SCRATCH_NBYTES = scratch
            for dtype in DTYPES:
                about = f"{number} ranks, {name}, {dtype}"
                found["right"][f"sum {about}"] = _reduced(group, members, numel, dtype, pairwise.reduce_scatter)
                for in_place in (True, False):
                    right = _gathered(group, members, numel, dtype, in_place=in_place)
                    found["right"][f"gather {about}, in place {in_place}"] = right
    pairwise.SCRATCH_NBYTES = 16 << 20
    found["beside"] = _beside(Group.of(), rank)
    found["carrier"] = carrier_of(torch.device("cpu"), Group.of())
    found["chosen"] = [
        _reduced(Group.of(), MEMBERS[4], numel, torch.float32, collectives.reduce_scatter) for numel in (1, 999)
    ]
    found["refused"] = _refused(Group.of())
    return found


def _beside(group: Group, rank: int) -> bool:
    """Several under way at once, with a collective of somebody else between them."""
    numels = (100_000, 3, 70_000, 8)
    buckets = [[_bucket(each, size * RANKS, torch.float32) for each in range(RANKS)] for size in numels]
    pending = []
    for numel, by_rank in zip(numels, buckets, strict=True):
        own = by_rank[rank][rank * numel : (rank + 1) * numel]
        wanted = _sum_in_order([each[rank * numel : (rank + 1) * numel] for each in by_rank], rank)
        pending.append((begin_reduce_scatter(by_rank[rank], own, group), own, wanted))
        dist.all_reduce(torch.ones(1))
    for each, _, _ in pending:
        each.wait()
    return all(torch.equal(own, wanted) for _, own, wanted in pending)


def _refused(group: Group) -> str:
    """What goes wrong in the thread is raised by whoever waits."""
    pending = begin_reduce_scatter(torch.zeros(7), torch.zeros(7), group)
    try:
        pending.wait()
    except RuntimeError as error:
        return type(error).__name__
    return "nothing"


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(_collect, RANKS)


def test_pairwise_when_ranks_dtypes_and_sizes_vary_then_every_bit_is_that_of_the_sum_in_order(
    found: list[dict[str, Any]],
) -> None:
    of_all = {name: right for each in found for name, right in each["right"].items()}
    assert len(of_all) == len(MEMBERS) * len(SIZES) * len(DTYPES) * 3
    assert [name for each in found for name, right in each["right"].items() if not right] == []


def test_begin_when_several_are_under_way_then_each_is_right(found: list[dict[str, Any]]) -> None:
    assert [each["beside"] for each in found] == [True] * RANKS


def test_choice_when_gloo_carries_a_bucket_then_it_is_added_up_in_order(found: list[dict[str, Any]]) -> None:
    assert [each["carrier"] for each in found] == ["gloo"] * RANKS
    assert [each["chosen"] for each in found] == [[True, True]] * RANKS


def test_begin_when_it_fails_then_waiting_raises_it(found: list[dict[str, Any]]) -> None:
    assert [each["refused"] for each in found] == ["RuntimeError"] * RANKS


def test_begin_when_the_group_is_one_rank_then_nothing_is_done() -> None:
    bucket = torch.ones(3)
    begin_reduce_scatter(bucket, bucket, Group(None, 0, 1)).wait()
    collectives.reduce_scatter(bucket, bucket, Group(None, 0, 1))
    collectives.all_gather(bucket, bucket, Group(None, 0, 1))
    assert torch.equal(bucket, torch.ones(3))
