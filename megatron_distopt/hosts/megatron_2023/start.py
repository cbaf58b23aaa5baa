"""Everything that this rank decides by itself, before the first byte is moved."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron import get_args
from megatron.core import tensor_parallel
from megatron.model.module import param_is_not_shared
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from megatron_distopt.comm import Group, Reduction
from megatron_distopt.config import DistOptConfig, config_from_arguments, config_from_environment
from megatron_distopt.hosts.base import names_by_param, plan_groups, reduce_dtype_of
from megatron_distopt.hosts.loss_scale import loss_scale_of
from megatron_distopt.hosts.megatron_2023.buffers import BufferPlan, plan_grad_buffers
from megatron_distopt.hosts.megatron_2023.config import check_model, choose_for, merge_config
from megatron_distopt.hosts.megatron_2023.facts import check_flags
from megatron_distopt.hosts.megatron_2023.groups import dense_group
from megatron_distopt.hosts.megatron_2023.overlap import NO_OVERLAP, OverlapPlan, in_buckets, plan_overlap
from megatron_distopt.optimizer import StepPlan

__all__ = ["Request", "Start", "decide"]


@dataclass(frozen=True)
class Request:
    """What the fork gives to the constructor of its distributed optimizer.

    Args:
        base: the fork's base optimizer over model params.
        clip_grad, count_zeros, grad_scaler: as the fork gives them.
        models: chunks, wrapped by the fork's local DistributedDataParallel.
        options: ours, before what the fork's arguments and MEGATRON_DISTOPT_* variables say.
    """

    base: Optimizer
    clip_grad: float
    count_zeros: bool
    grad_scaler: Any
    models: Sequence[Module]
    options: DistOptConfig | None


@dataclass(frozen=True)
class Start:
    """What was decided.

    Args:
        named: params that are updated, by name.
        buffers: in the order in which every rank reduces them.
        data: the ranks over which dense params are sharded.
        device: of all params.
        plan: of the step.
        how: see `Reduction`. fp16 grads are divided before they are added up; others are averaged in the step.
        overlap: which communication is overlapped, and in which buckets.
    """

    named: Mapping[str, Parameter]
    buffers: tuple[BufferPlan, ...]
    data: Group
    device: torch.device
    plan: StepPlan
    how: Reduction
    overlap: OverlapPlan = NO_OVERLAP

    def overlapping(self) -> Start:
        """The same with the decision about overlap; after the ranks of `data` have communicated once.

        Raises:
            ConfigError: an option asks for what this fork does not allow.
        """
        overlap = plan_overlap(self.plan.config, self.data, self.buffers, self.device, get_args())
        return dataclasses.replace(self, overlap=overlap)

    def in_buckets(self, late: Collection[str]) -> Start:
        """The same with buffers cut into buckets, where that was decided.

        Args:
            late: params to whose gradients the fork adds after backward.
        """
        buffers = tuple(in_buckets(buffer, self.overlap, late) for buffer in self.buffers)
        return dataclasses.replace(self, buffers=buffers)


def decide(request: Request, everyone: Group) -> Start:
    """Looks at everything and moves nothing.

    Args:
        request: see `Request`.
        everyone: all ranks.

    Raises:
        ConfigError, HostError, LayoutError
    """
    args = get_args()
    check_flags(args)
    names = names_by_param(request.models)
    named = {name: param for param, name in names.items() if param.requires_grad}
    own = config_from_environment(os.environ, config_from_arguments(args, request.options))
    config = merge_config(own, request.base, request.clip_grad, request.count_zeros, request.grad_scaler)
    device = check_model(request.models, named, config)
    inner, data = choose_for(request.base, config, args, device.type), dense_group()
    buffers = plan_grad_buffers(request.models, names)
    divide_by = data.size if any(buffer.dtype is torch.float16 for buffer in buffers) else 1
    plan = StepPlan(
        groups=plan_groups(named, inner.groups),
        choice=inner.choice,
        config=config,
        loss_scale=loss_scale_of(request.grad_scaler, device),
        stats_group=lambda: everyone,
        average_over=data.size // divide_by,
        counted=lambda name: _is_counted(named[name]),
    )
    how = Reduction(divide_by, reduce_dtype_of(config, [buffer.dtype for buffer in buffers]))
    return Start(named, buffers, data, device, plan, how)


def _is_counted(param: Parameter) -> bool:
    """See [Note: counted once] in optimizer/grad_norm.py; the fork marks shared and duplicated params itself."""
    return bool(param_is_not_shared(param) and tensor_parallel.param_is_not_tensor_parallel_duplicate(param))
