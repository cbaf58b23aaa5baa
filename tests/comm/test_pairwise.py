"""Collectives from pair to pair: bit for bit what gloo's own give, whatever the sizes, through
memory or as messages.

One spawn of three ranks, of which two also form a group; and one for each way in which a rank can
be lost.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt.comm import Group, allow_shared_memory, group_nodes, pairwise, shared_memory
from megatron_distopt.comm.collectives import reduce_scatter
from megatron_distopt.errors import RanksDisagreeError
from tests.support.facts import Facts, facts_of
from tests.support.refusals import assert_mentions
from tests.support.spawn import RankError, run_ranks

RANKS = 3
MEMBERS = {3: (0, 1, 2), 2: (0, 2)}
DTYPES = (torch.float32, torch.bfloat16)
#: Elements of a shard, and bytes of memory for what arrives: in one part, in many, with a short one
#: at the end.
SIZES = {
    "one part": (1000, 1 << 20),
    "one element": (1, 1 << 20),
    "many parts": (1000, 608),
    "exact parts": (64, 32),
    "more than a block": (100_000, 4 << 20),
}
WAYS = ("memory", "messages")


def _bucket(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _sum_in_order(parts: list[Tensor], owner: int) -> Tensor:
    """The reference: from the rank before the owner downwards, around the ring."""
    before = [parts[(owner - distance) % len(parts)] for distance in range(1, len(parts))]
    total = before[0]
    for part in [*before[1:], parts[owner]]:
        total = total + part
    return total


def _reduced(
    group: Group,
    members: tuple[int, ...],
    numel: int,
    dtype: torch.dtype,
    reduce: Callable[..., Any],
) -> bool:
    buckets = [_bucket(rank, group.size * numel, dtype) for rank in members]
    mine = buckets[group.rank].clone()
    own = slice(group.rank * numel, (group.rank + 1) * numel)
    gloos = mine.clone()
    dist.all_reduce(gloos, group=group.handle)
    reduce(mine, group)
    wanted = _sum_in_order([bucket[own] for bucket in buckets], group.rank)
    # gloo cuts a buffer at multiples of 8 bytes: where a shard ends elsewhere, some elements go
    # around otherwise.
    return torch.equal(mine[own], wanted) and (numel % 8 > 0 or torch.equal(mine[own], gloos[own]))


def _gathered(group: Group, members: tuple[int, ...], numel: int, dtype: torch.dtype) -> bool:
    parts = [_bucket(rank, numel, dtype) for rank in members]
    whole = torch.zeros(group.size * numel, dtype=dtype)
    whole[group.rank * numel : (group.rank + 1) * numel] = parts[group.rank]
    pairwise.all_gather(whole, group)
    return torch.equal(whole, torch.cat(parts))


def collect_facts(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"right": {}, "way": {}}
    for way in WAYS:
        with pytest.MonkeyPatch.context() as patch:
            if way == "messages":
                patch.setattr(shared_memory, "may_share_memory", lambda: False)
            for name, (numel, nbytes) in SIZES.items():
                patch.setattr(pairwise, "SCRATCH_NBYTES", nbytes)
                patch.setattr(shared_memory, "SHARED_NBYTES", nbytes)
                _cases(rank, numel, f"{way}, {name}", found)
    found["kept"] = len(group_nodes._nodes)
    found["overlapped"] = _overlapped(Group.of(), rank)
    found["refused"] = _refused(Group.of())
    found["permitted"] = _permitted(rank)
    found["apart"] = _apart(rank)
    found["raced"] = _raced(rank)
    return found


def _cases(rank: int, numel: int, name: str, found: dict[str, Any]) -> None:
    """In new groups, each of which finds out anew whether its ranks share memory."""
    handles = {number: dist.new_group(list(members)) for number, members in MEMBERS.items()}
    for number, members in MEMBERS.items():
        if rank not in members:
            continue
        group = Group.of(handles[number])
        for dtype in DTYPES:
            about = f"{number} ranks, {name}, {dtype}"
            found["right"][f"sum {about}"] = _reduced(
                group, members, numel, dtype, pairwise.reduce_scatter
            )
            found["right"][f"gather {about}"] = _gathered(group, members, numel, dtype)
        found["way"][f"{number} ranks, {name}"] = _way_of(group)
    dist.barrier()
    for handle in handles.values():
        if handle is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(handle)


def _way_of(group: Group) -> str:
    return "messages" if len(group_nodes.nodes_of(group).in_memory) > 1 else "memory"


def _apart(rank: int) -> dict[str, tuple[str, bool]]:
    """The way that is taken where one rank alone cannot share memory, and whether the sum is
    right."""
    faults: dict[str, tuple[str, Callable[..., Any]]] = {
        "network": ("network_namespace", lambda: 1),
        "descriptors": ("new_segment", lambda secret: -1),
        "permission": ("segment_of", _forbidden),
        "secret": ("new_segment", lambda secret: _NEW_SEGMENT(secret ^ 1)),
        "file size": ("new_segment", _within_a_limit),
        "address space": ("mmap", SimpleNamespace(mmap=_without_address_space)),
    }
    found = {}
    group = Group.of(dist.new_group())
    allow_shared_memory(group, rank != 1)
    right = _reduced(group, MEMBERS[RANKS], 100, torch.float32, pairwise.reduce_scatter)
    found["option"] = _way_of(group), right
    for name, (attribute, replacement) in faults.items():
        group = Group.of(dist.new_group())
        with pytest.MonkeyPatch.context() as patch:
            if rank == 2:
                patch.setattr(shared_memory, attribute, replacement)
            right = _reduced(group, MEMBERS[RANKS], 100, torch.float32, pairwise.reduce_scatter)
            found[name] = _way_of(group), right
    return found


def _permitted(rank: int) -> list[tuple[str, bool]]:
    """The way of one group as all ranks allow memory, forbid it, and allow it again, with sums
    under way meanwhile."""
    group, found = Group.of(dist.new_group()), []
    for is_allowed in (True, False, True):
        allow_shared_memory(group, is_allowed)
        bucket = _bucket(rank, RANKS * 50_000, torch.float32)
        own = bucket.view(RANKS, -1)[rank]
        wanted = _sum_in_order(
            [
                _bucket(each, RANKS * 50_000, torch.float32).view(RANKS, -1)[rank]
                for each in range(RANKS)
            ],
            rank,
        )
        pending = reduce_scatter(bucket, own, group, overlapped=True)
        time.sleep(0.02 * rank)
        allow_shared_memory(group, not is_allowed)
        pending.wait()
        allow_shared_memory(group, is_allowed)
        found.append((_way_of(group), torch.equal(own, wanted)))
    return found


_NEW_SEGMENT = shared_memory.new_segment


def _within_a_limit(secret: int) -> int:
    """`ulimit -f`, in bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        return _NEW_SEGMENT(secret)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _without_address_space(*about: int) -> Any:
    """What mmap raises where a size is no more than this process may map."""
    raise MemoryError(about)


def _forbidden(*about: int) -> Any:
    raise PermissionError(about)


def _overlapped(group: Group, rank: int) -> bool:
    """Several under way at once, with a collective of the caller between them."""
    numels = (100_000, 3, 70_000, 8)
    buckets = [
        [_bucket(each, size * RANKS, torch.float32) for each in range(RANKS)] for size in numels
    ]
    pending = []
    for numel, by_rank in zip(numels, buckets, strict=True):
        own = by_rank[rank][rank * numel : (rank + 1) * numel]
        wanted = _sum_in_order([each[rank * numel : (rank + 1) * numel] for each in by_rank], rank)
        pending.append((reduce_scatter(by_rank[rank], own, group, overlapped=True), own, wanted))
        dist.all_reduce(torch.ones(1))
    for each, _, _ in pending:
        each.wait()
    return all(torch.equal(own, wanted) for _, own, wanted in pending)


def _wait_late(wait_for: Callable[[int], None], seconds: float, rank: int) -> None:
    wait_for(rank)
    time.sleep(seconds)


def _raced(rank: int) -> list[bool]:
    """Many small turns; in each round another rank is late, first with its own part and then with
    reading."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "SHARED_NBYTES", 64)
        group = Group.of(dist.new_group())
        node_memory, right = group_nodes.nodes_of(group).node_memory, []
        assert node_memory is not None
        wait_for = node_memory._wait_for
        for number in range(6):
            late = number % RANKS == rank
            patch.setattr(node_memory, "_wait_for", partial(_wait_late, wait_for, late * 2e-3))
            time.sleep(late * 5e-3)
            right.append(
                _reduced(group, MEMBERS[RANKS], 16, torch.float32, pairwise.reduce_scatter)
            )
            right.append(_gathered(group, MEMBERS[RANKS], 64, torch.float32))
    return right


def _refused(group: Group) -> str:
    """What goes wrong in the thread is raised by whoever waits."""
    pending = reduce_scatter(torch.zeros(7), torch.zeros(7), group, overlapped=True)
    try:
        pending.wait()
    except RuntimeError as error:
        return type(error).__name__
    return "nothing"


facts = facts_of(collect_facts, RANKS)


def test_pairwise_when_ranks_dtypes_sizes_and_ways_vary_then_every_bit_is_that_of_the_sum_in_order(
    facts: Facts,
) -> None:
    of_all = {name: right for each in facts["right"] for name, right in each.items()}
    assert len(of_all) == len(WAYS) * len(MEMBERS) * len(SIZES) * len(DTYPES) * 2
    assert [name for each in facts["right"] for name, right in each.items() if not right] == []


def test_pairwise_when_ranks_are_on_one_machine_then_they_share_memory_unless_told_not_to(
    facts: Facts,
) -> None:
    for each in facts["way"]:
        assert {name: way for name, way in each.items() if f", {way}," not in name} == {}


def test_pairwise_when_permission_changes_then_the_way_does_after_what_is_under_way(
    facts: Facts,
) -> None:
    ways = [("memory", True), ("messages", True), ("memory", True)]
    assert facts["permitted"] == [ways] * RANKS


def test_pairwise_when_groups_end_then_nothing_is_kept_of_them(facts: Facts) -> None:
    assert facts["kept"] == [0] * RANKS


@pytest.mark.parametrize(
    "fault",
    ["option", "network", "descriptors", "permission", "secret", "file size", "address space"],
)
def test_pairwise_when_one_rank_cannot_share_memory_then_all_take_messages(
    fault: str, facts: Facts
) -> None:
    assert [each[fault] for each in facts["apart"]] == [("messages", True)] * RANKS


def test_pairwise_when_one_rank_is_late_in_turn_then_nobody_reads_too_early_or_writes_too_soon(
    facts: Facts,
) -> None:
    assert facts["raced"] == [[True] * 12] * RANKS


def test_begin_when_several_are_under_way_then_each_is_right(facts: Facts) -> None:
    assert facts["overlapped"] == [True] * RANKS


def test_begin_when_it_fails_then_waiting_raises_it(facts: Facts) -> None:
    assert facts["refused"] == ["RuntimeError"] * RANKS


def _lost(rank: int, size: int, how: str, file: str) -> None:
    """Rank 1 takes part once, and then no more; it is there until rank 0 has found out, or ends at
    once."""
    handle = dist.new_group(timeout=timedelta(seconds=1))
    group, store = Group.of(handle), dist.distributed_c10d._get_default_store()
    bucket = torch.ones(2 * 8)
    allow_shared_memory(group, how != "gone")
    pairwise.reduce_scatter(bucket, group)
    if rank == 1:
        if how in ("ended", "gone"):
            os._exit(0)
        store.wait(["found out"], timedelta(seconds=60))
        return
    if how == "gone":
        time.sleep(1.0)  # until gloo knows, and refuses to begin a message
    try:
        pairwise.reduce_scatter(bucket, group)
    except RanksDisagreeError as error:
        Path(file).write_text(str(error))
    finally:
        store.set("found out", "")


def test_pairwise_when_a_rank_ends_then_the_others_are_told_who(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="no result on ranks"):
        run_ranks(_lost, 2, "ended", str(tmp_path / "text"))
    assert_mentions((tmp_path / "text").read_text(), "rank 1 has ended", "Read the log of rank 1")


def test_message_when_a_rank_ended_before_it_began_then_the_others_are_told_who(
    tmp_path: Path,
) -> None:
    with pytest.raises(RankError, match="no result on ranks"):
        run_ranks(_lost, 2, "gone", str(tmp_path / "text"))
    assert_mentions(
        (tmp_path / "text").read_text(), "lost rank 1", "Look for the rank whose error came first"
    )


def test_pairwise_when_a_rank_does_not_come_then_the_timeout_of_the_group_holds(
    tmp_path: Path,
) -> None:
    run_ranks(_lost, 2, "late", str(tmp_path / "text"))
    assert_mentions(
        (tmp_path / "text").read_text(), "rank 1 did not come within 1 s", "Read the log of rank 1"
    )
