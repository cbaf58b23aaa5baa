"""Sums over several nodes: who is on which node, and each node's sum sent once.

One spawn of five ranks, which also form smaller groups. A node is simulated by the number of a
network namespace.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt.comm import Group, Reduction, allow_shared_memory, pairwise, shared_memory
from megatron_distopt.comm.collectives import all_gather, reduce_scatter
from megatron_distopt.comm.group_nodes import nodes_of
from tests.support.facts import Facts, facts_of

RANKS = 5
Members = tuple[tuple[int, ...], ...]
#: By name, the ranks of each node.
NODES = {
    "1+1": ((0,), (1,)),
    "2": ((0, 1),),
    "2+1": ((0, 1), (2,)),
    "1+1+1": ((0,), (1,), (2,)),
    "2+2": ((0, 1), (2, 3)),
    "2+2 crosswise": ((0, 2), (1, 3)),
    "2+2+1": ((0, 1), (2, 3), (4,)),
    "3+2": ((0, 1, 4), (2, 3)),
}
SEVERAL = [name for name, members in NODES.items() if len(members) > 1]
NUMEL = 1111
#: On which bytes are counted.
COUNTED = ("1+1", "2+2")


def _group(
    members: Members, rank: int, *, is_allowed: bool = True, is_simulated: bool = True
) -> Group | None:
    """A new group of the ranks of these nodes, of which this rank knows its node before the first
    collective."""
    ranks = sorted(each for node in members for each in node)
    handle = dist.new_group(ranks)
    if rank not in ranks:
        return None
    group = Group.of(handle)
    own = next(node for node in members if rank in node)
    with pytest.MonkeyPatch.context() as patch:
        if is_simulated:
            patch.setattr(shared_memory, "network_namespace", lambda: members.index(own))
        allow_shared_memory(group, is_allowed)
        nodes_of(group)
    return group


def _values(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def _in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _ring(ranks: tuple[Any, ...], last: Any) -> list[Any]:
    """Downwards from the one before `last`, which is the last one."""
    place = ranks.index(last)
    return [ranks[(place - 1 - distance) % len(ranks)] for distance in range(len(ranks))]


def _reference(members: Members, numel: int, owner: int, dtype: torch.dtype) -> Tensor:
    """The shard of an owner: added up inside nodes, rounded where it is sent, then over nodes."""
    home = next(node for node in members if owner in node)
    sums = {}
    for node in members:
        leader = owner if node is home else node[home.index(owner) % len(node)]
        total = _in_order(
            [_values(rank, numel * sum(map(len, members))) for rank in _ring(node, leader)]
        )
        sums[node] = total if node is home else total.to(dtype).float()
    return _in_order([sums[node] for node in _ring(members, home)])


def _sums(group: Group, members: Members, rank: int) -> dict[str, bool]:
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for chunks, nbytes in (("one chunk", 16 << 20), ("many chunks", 8 << 10)):
            for overlapped in (False, True):
                bucket = _values(rank, group.size * NUMEL)
                shard = bucket.view(group.size, -1)[group.rank]
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(pairwise, "SCRATCH_NBYTES", nbytes)
                    reduce_scatter(
                        bucket, shard, group, Reduction(reduce_dtype=dtype), overlapped=overlapped
                    ).wait()
                    gathered = torch.full((group.size, NUMEL), rank, dtype=dtype)
                    all_gather(
                        gathered.view(-1), gathered[group.rank], group, overlapped=overlapped
                    ).wait()
                wanted = _reference(members, NUMEL, rank, dtype).view(group.size, -1)[group.rank]
                ranks = sorted(each for node in members for each in node)
                assert [set(row.tolist()) for row in gathered] == [{each} for each in ranks]
                if len(members) > 1 and max(map(len, members)) > 1:
                    found[f"{dtype} {chunks} {overlapped}"] = torch.equal(shard, wanted)
    return found


def _bytes(group: Group, rank: int) -> dict[str, float]:
    """Bytes an element that this rank sends to other nodes for gradients and bf16 params."""
    found, numel = {}, 1280 * group.size
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        sent, original = [0], pairwise.begin_travel

        def counted(
            outgoing: Any, *args: Any, sent: list[int] = sent, original: Any = original
        ) -> Any:
            sent[0] += sum(message.tensor.nbytes for message in outgoing)
            return original(outgoing, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pairwise, "begin_travel", counted)
            bucket = _values(rank, numel)
            shard = bucket.view(group.size, -1)[group.rank]
            reduce_scatter(bucket, shard, group, Reduction(reduce_dtype=dtype))
            whole = torch.full((numel,), float(group.rank), dtype=torch.bfloat16)
            all_gather(whole, whole.view(group.size, -1)[group.rank], group).wait()
            assert whole.view(group.size, -1)[:, 0].tolist() == list(range(group.size))
        found[name] = sent[0] / numel
    return found


def about(group: Group, members: Members, rank: int, *, is_counted: bool) -> dict[str, Any]:
    """Collective: what a group does whose ranks are on these nodes."""
    found: dict[str, Any] = {
        "members": nodes_of(group).in_memory,
        "sums": _sums(group, members, rank),
    }
    if is_counted:
        found["bytes"] = _bytes(group, rank)
    return found


def between_namespaces() -> None:
    """Collective of five ranks, two on each of two nodes and one on a third: checks groups of some
    of them."""
    rank = dist.get_rank()
    for members in (
        ((0, 1), (2, 3), (4,)),
        ((0,), (2,), (4,)),
        ((0, 1), (2,)),
        ((0, 1), (2, 3)),
        ((0,), (4,)),
    ):
        group = _group(members, rank, is_simulated=False)
        if group is not None:
            found = about(group, members, rank, is_counted=False)
            ranks = sorted(each for node in members for each in node)
            assert found["members"] == tuple(tuple(map(ranks.index, node)) for node in members), (
                found["members"]
            )
            assert all(found["sums"].values()), found["sums"]
            os.write(1, f"right on {'+'.join(str(len(node)) for node in members)}\n".encode())


def collect_facts(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, members in NODES.items():
        group = _group(members, rank)
        if group is not None:
            found[name] = about(group, members, rank, is_counted=name in COUNTED)
    group = _group(NODES["2+2"], rank, is_allowed=rank != 1)
    if group is not None:
        found["one forbids"] = {
            "members": nodes_of(group).in_memory,
            "sums": _sums(group, ((0,), (1,), (2, 3)), rank),
        }
    return found


facts = facts_of(collect_facts, RANKS, seconds=240)


@pytest.mark.parametrize("name", NODES)
def test_nodes_when_ranks_can_map_each_other_then_they_are_on_one(name: str, facts: Facts) -> None:
    for each in facts.of_some(name):
        assert each["members"] == tuple(sorted(NODES[name], key=min))


def test_nodes_when_a_rank_forbids_shared_memory_then_it_is_a_node_of_its_own(facts: Facts) -> None:
    for each in facts.of_some("one forbids"):
        assert each["members"] == ((0,), (1,), (2, 3))
        assert all(each["sums"].values()) and each["sums"]


@pytest.mark.parametrize("name", SEVERAL)
def test_sum_when_there_are_several_nodes_then_it_is_that_of_the_sums_of_nodes_to_the_bit(
    name: str, facts: Facts
) -> None:
    for each in facts.of_some(name):
        assert all(each["sums"].values()), each["sums"]
        assert len(each["sums"]) == (8 if max(map(len, NODES[name])) > 1 else 0)


@pytest.mark.parametrize(("name", "factor"), [("1+1", 0.5), ("2+2", 0.25)])
def test_bytes_when_nodes_have_several_ranks_then_sums_and_params_are_sent_once(
    name: str, factor: float, facts: Facts
) -> None:
    for each in facts.of_some(name):
        # Of 6 and 4 bytes an element a rank sends half alone, and a quarter where the node has two
        # ranks.
        assert each["bytes"] == {"fp32": 6 * factor, "bf16": 4 * factor}
