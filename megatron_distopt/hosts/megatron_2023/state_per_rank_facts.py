"""What the ranks have to tell each other about a state in per-rank files before its values travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_distopt.comm import exchange
from megatron_distopt.optimizer import FlatParam, moments_of

if TYPE_CHECKING:
    from megatron_distopt.hosts.megatron_2023.optimizer import DistributedOptimizer

__all__ = ["MAIN", "Facts", "Kind", "agree", "kept", "keys_of", "kind_of_flat", "kinds"]

#: The key of main params, beside those of moments.
MAIN = "main param"

#: (param group, whether there is a main param): what tells which keys a param has.
Kind = tuple[int, bool]


@dataclass(frozen=True)
class Facts:
    """What a rank knows of the whole state.

    Args:
        keys: dtypes by kind and key.
        step: updates so far; None where nobody has counted.
        groups: as they were saved, without params, by number of the run's group.
    """

    keys: Mapping[Kind, Mapping[str, torch.dtype]]
    step: int | None
    groups: Mapping[int, Mapping[str, Any]]


def agree(optimizer: DistributedOptimizer, facts: Facts) -> Facts:
    """Collective where values travel: what any rank knows. Elsewhere this one's own, which is all that it needs."""
    if all(buffer.plan.is_in_place for buffer in optimizer.grad_buffers):
        return facts
    by_rank = exchange(facts, optimizer.start.data)
    keys: dict[Kind, dict[str, torch.dtype]] = {}
    groups: dict[int, Mapping[str, Any]] = {}
    for each in by_rank:
        for kind, dtypes in each.keys.items():
            keys.setdefault(kind, {}).update(dtypes)
        groups = {**each.groups, **groups}
    # A rank without anything has counted nothing.
    step = max((each.step for each in by_rank if each.keys and each.step is not None), default=None)
    return Facts(keys, step, dict(sorted(groups.items())))


def keys_of(optimizer: DistributedOptimizer) -> dict[Kind, dict[str, torch.dtype]]:
    """What this rank keeps for an element, by what it is of."""
    keys: dict[Kind, dict[str, torch.dtype]] = {}
    for flat in optimizer.sharded.flat_params:
        dtypes = {key: tensor.dtype for key, tensor in kept(optimizer, flat).items()}
        keys.setdefault(kind_of_flat(flat), {}).update(dtypes)
    return keys


def kinds(optimizer: DistributedOptimizer) -> dict[str, Kind]:
    """By name of all params that are updated, whoever owns them."""
    named = optimizer.start.named
    return {
        name: (number, named[name].dtype is not torch.float32)
        for number, group in enumerate(optimizer.sharded.plan.groups)
        for name in group.names
    }


def kind_of_flat(flat: FlatParam) -> Kind:
    """Of its params."""
    return flat.plan.key.group, flat.owns_memory


def kept(optimizer: DistributedOptimizer, flat: FlatParam) -> dict[str, Tensor]:
    """What there is of it in this rank, by key; 1-D, as long as the flat param."""
    main = {MAIN: flat.main.detach()} if flat.owns_memory else {}
    return main | moments_of(optimizer.sharded.inner, flat.main)
