"""Norm groups: params that the host measures and clips by a norm of their own.

megatron-core 0.19 and later give the heads of multi-token prediction `param.grad_norm_group = "mtp"`. Such params are
excluded from the norm that all others are clipped by. Here they are measured param shard by param shard, because a flat
param may hold others beside them, and the CPU waits for their norms; models without groups pay nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import optimizer as host
from torch import Tensor

from megatron_distopt.comm import Group, exchange, sum_over
from megatron_distopt.hosts.megatron_core.start import OneOptimizer
from megatron_distopt.optimizer.accelerator import stats_dtype
from megatron_distopt.optimizer.step import clip_divisor


@dataclass(frozen=True)
class GroupStats:
    """Of the gradients of one norm group on all ranks, as they stand in the grad buffers.

    Args:
        sum_of_squares: over elements that no other rank counts.
        num_zeros: of those, how many are exactly zero.
    """

    sum_of_squares: float
    num_zeros: int

    def norm(self, divisor: float) -> float:
        """L2 norm of the gradients divided by `divisor`."""
        return math.sqrt(self.sum_of_squares) / divisor


def norm_group_of(param: Any) -> str | None:
    """Returns the norm group of a param; None for the norm of the whole model.

    Raises:
        ValueError: the host's own, for a group that it does not know.
    """
    find = getattr(host, "_get_param_grad_norm_group", None)
    name: str | None = None if find is None else find(param)
    return name if name is not None and host._is_separate_grad_norm_group(name) else None


def groups_on_all_ranks(optimizer: Any, group: Group) -> tuple[str, ...]:
    """Collective where the host has norm groups: those of any rank, sorted.

    Args:
        optimizer: one of ours.
        group: of its statistics.
    """
    if not getattr(host, "SEPARATE_GRAD_NORM_GROUPS", ()):
        return ()
    own = {name for param in optimizer.named.values() if (name := norm_group_of(param)) is not None}
    return tuple(sorted(set().union(*exchange(own, group))))


def measure_groups(
    optimizers: Sequence[OneOptimizer], grads: Sequence[Sequence[Tensor]], group: Group
) -> Mapping[str, GroupStats]:
    """Collective where there is a norm group: the statistics of each.

    Args:
        optimizers: whose step it is.
        grads: by optimizer, its main grads.
        group: of their statistics.
    """
    names = sorted({name for each in optimizers for name in each.norm_groups})
    if not names:
        return {}
    device = optimizers[0].sharded.device
    sums = torch.zeros(2 * len(names), dtype=stats_dtype(device), device=device)
    for index, name in enumerate(names):
        pairs = zip(optimizers, grads, strict=True)
        for grad in (part for optimizer, of_one in pairs for part in grads_of_group(optimizer, of_one, name)):
            wide = grad.to(sums.dtype)
            sums[2 * index] += wide.dot(wide)
            sums[2 * index + 1] += grad.numel() - torch.count_nonzero(grad)
    sum_over(sums, group)
    values = sums.tolist()
    return {name: GroupStats(values[2 * i], int(values[2 * i + 1])) for i, name in enumerate(names)}


def divide_groups(
    optimizers: Sequence[OneOptimizer],
    grads: Sequence[Sequence[Tensor]],
    norms: Mapping[str, float],
    main_norm: float,
    clip_grad: float,
) -> None:
    """Scales the grads of each group so that the coming update, which clips by the main norm, clips them by their own.

    Args:
        optimizers: whose step it is.
        grads: by optimizer, its main grads.
        norms: by group, before clipping.
        main_norm: of all other params, before clipping.
        clip_grad: 0 for no clipping.
    """
    for name, norm in norms.items():
        factor = clip_divisor(main_norm, clip_grad) / clip_divisor(norm, clip_grad)
        for optimizer, of_one in zip(optimizers, grads, strict=True):
            for grad in grads_of_group(optimizer, of_one, name, with_copies=True):
                grad.mul_(factor)


def grads_of_group(
    optimizer: OneOptimizer, grads: Sequence[Tensor], name: str, *, with_copies: bool = False
) -> Iterator[Tensor]:
    """The main grads of one norm group on this rank, views of param shards.

    Args:
        optimizer: whose step it is.
        grads: its main grads.
        name: of the group.
        with_copies: also those that another rank counts.
    """
    for flat, main_grad in zip(optimizer.sharded.flat_params, grads, strict=True):
        for shard in flat.plan.shards:
            is_in = norm_group_of(optimizer.named[shard.name]) == name
            if is_in and (with_copies or not optimizer.is_duplicate(shard.name)):
                yield flat.cut(main_grad, shard)
