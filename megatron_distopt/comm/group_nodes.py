"""Which ranks of a group are on one node.

Ranks that can map each other's memory are on one node, whatever host names and boot ids say. Where
no rank can map another's memory, the variables of the launcher decide. Without these the nodes are
unknown.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

from megatron_distopt.comm import shared_memory
from megatron_distopt.comm.agree import all_gather_objects
from megatron_distopt.comm.groups import Group
from megatron_distopt.comm.pending import drain
from megatron_distopt.comm.shared_memory import NodeMemory, Segment

#: The ranks of a group by node, in ascending order; nodes are in the order of their first ranks.
Members = tuple[tuple[int, ...], ...]

#: Set by torchrun: the number of a rank, its number on its node, and the number of ranks on that
#: node.
_VARIABLES = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, eq=False)
class GroupNodes:
    """The ranks of a group by node. Any partition gives right sums, if all ranks know the same."""

    members: Members  # empty where the nodes are unknown
    in_memory: Members  # by the memory that they share; a rank that shares none is alone
    node_memory: (
        NodeMemory | None
    )  # over the memory of this rank's node, where it has several ranks


#: By group, and by whether this rank allowed shared memory.
_nodes: WeakKeyDictionary[ProcessGroup, dict[bool, GroupNodes]] = WeakKeyDictionary()
#: By group; allowed where the group is missing.
_is_allowed: WeakKeyDictionary[ProcessGroup, bool] = WeakKeyDictionary()


def allow_shared_memory(group: Group, is_allowed: bool) -> None:
    """Allows or forbids shared memory from now on; where one rank of the group forbids it, none of
    them uses it.

    To be called by all of its ranks between the same two collectives. Those that were begun before
    end as they began.
    """
    if group.size > 1:
        drain()
        _is_allowed[group.own_handle] = is_allowed


def nodes_of(group: Group) -> GroupNodes:
    """Which ranks of a group are on one node.

    Collective where the group asks for the first time, or for the first time after
    `allow_shared_memory`.
    """
    is_allowed = _is_allowed.get(group.own_handle, True)
    found = _nodes.setdefault(group.own_handle, {})
    if is_allowed not in found:
        found[is_allowed] = _find(group, is_allowed)
    return found[is_allowed]


def alone(group: Group) -> Members:
    """Each rank as a node of its own."""
    return tuple((rank,) for rank in range(group.size))


def _find(group: Group, is_allowed: bool) -> GroupNodes:
    """Collective: maps the memory of all ranks that are on the same machine.

    A rank that cannot share memory with exactly those that share memory with it is a node of its
    own.
    """
    secret = secrets.randbits(62)
    own = shared_memory.new_segment(secret) if is_allowed else -1
    segments: dict[int, Segment] = {}
    try:
        about = os.getpid(), own, secret, shared_memory.network_namespace()
        said = all_gather_objects((about, [os.environ.get(name, "") for name in _VARIABLES]), group)
        for rank, (numbers, _) in enumerate(said):
            # The other ranks wait for an answer, so nothing may be raised; messages work in any
            # case.
            with suppress(Exception):
                segments[rank] = shared_memory.segment_of(*numbers)
        maps = all_gather_objects(tuple(segments), group)
    finally:
        if own >= 0:
            os.close(own)
    nodes = [
        ranks if rank in ranks and all(maps[each] == ranks for each in ranks) else (rank,)
        for rank, ranks in enumerate(maps)
    ]
    in_memory = tuple(dict.fromkeys(nodes))
    members = in_memory
    if len(in_memory) == group.size:
        members = _by_launcher([variables for _, variables in said])
    if len(nodes[group.rank]) == 1:
        return GroupNodes(members, in_memory, None)
    mapped = {rank: segments[rank] for rank in nodes[group.rank]}
    return GroupNodes(members, in_memory, NodeMemory(mapped, group))


def _by_launcher(said: Sequence[Sequence[str]]) -> Members:
    """The ranks by node according to their variables; empty where these are missing or
    impossible."""
    if not all(each.isdecimal() for of_rank in said for each in of_rank):
        return ()
    nodes: dict[tuple[int, int], list[int]] = {}
    for number, (rank, local_rank, size) in enumerate(said):
        nodes.setdefault((int(rank) - int(local_rank), int(size)), []).append(number)
    if any(len(ranks) > size for (_, size), ranks in nodes.items()):
        return ()
    return tuple(tuple(ranks) for ranks in nodes.values())
