"""The plain host: any `torch.nn.Module`, no Megatron around it.

>>> import torch, torch.distributed as dist, megatron_distopt
>>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
>>> model = torch.nn.Linear(4, 2).bfloat16()
>>> optimizer = megatron_distopt.distribute(model, megatron_distopt.DistOptConfig(lr=1e-3, clip_grad=1.0))
>>> for _ in range(2):
...     optimizer.zero_grad()
...     loss = model(torch.ones(3, 4, dtype=torch.bfloat16)).float().square().mean()
...     optimizer.scale_loss(loss).backward()
...     result = optimizer.step()
>>> result.updated
True
>>> dist.destroy_process_group()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from megatron_distopt.buffers import ShardedBuffer, accumulate_into_buffer, move_into_buffer
from megatron_distopt.checkpoint import check_local_state_dict, load_local_state_dict, local_state_dict
from megatron_distopt.comm import (
    Group,
    ProcessGroup,
    gather_params,
    raise_together,
    reduce_grads,
    share_initial_params,
)
from megatron_distopt.config import DistOptConfig, config_from_environment
from megatron_distopt.errors import LayoutError, refusal
from megatron_distopt.hosts.base import (
    check_dtypes,
    check_groups_are_used,
    compare_ranks,
    named_trainable,
    plan_groups,
    spec_of,
)
from megatron_distopt.layout import BufferLayout, lay_out
from megatron_distopt.optimizer import (
    InnerChoice,
    Memory,
    ParamGroup,
    ShardedOptimizer,
    StepResult,
    adopt_instance,
    check_devices,
    choose_inner,
    find_accelerator,
    make_loss_scale,
    measure_memory,
)

__all__ = ["PlainOptimizer", "distribute"]


@dataclass(frozen=True)
class _Part:
    """Params that share a buffer: one param dtype, one grad dtype."""

    named: Mapping[str, Parameter]
    layout: BufferLayout
    grad_dtype: torch.dtype


@dataclass(frozen=True)
class _Plan:
    """All that is decided before the first byte is allocated."""

    named: Mapping[str, Parameter]
    parts: tuple[_Part, ...]
    groups: tuple[ParamGroup, ...]
    choice: InnerChoice
    device: torch.device


def distribute(
    model: Module | Sequence[Module],
    config: DistOptConfig | None = None,
    *,
    param_groups: Sequence[Mapping[str, Any]] | None = None,
    optimizer: Optimizer | None = None,
    process_group: ProcessGroup | None = None,
    stats_process_group: ProcessGroup | None = None,
    counted: Callable[[str], bool] = lambda name: True,
) -> PlainOptimizer:
    """Collective: moves the model's params into contiguous buffers and returns their distributed optimizer.

    All ranks start from the params of the group's rank 0.

    Args:
        model: one module, or the chunks of a virtual pipeline; on its device, in its dtypes.
        config: MEGATRON_DISTOPT_* variables override it.
        param_groups: as for `torch.optim`; one group of everything where None.
        optimizer: an element-wise optimizer of your own over the model's params, not yet stepped; its groups are used.
        process_group: data-parallel ranks, which hold the same params; all ranks where None.
        stats_process_group: ranks that hold a part of the model, over which gradient statistics are added up;
            `process_group` where None.
        counted: by param name, whether this rank counts it in those statistics: False on all but one rank for a param
            that several ranks of `stats_process_group` hold beside data parallelism.

    Raises:
        ConfigError, LayoutError, RanksDisagreeError: on all ranks, before anything is allocated.
    """
    config = config_from_environment(os.environ, config)
    data = Group.of(process_group)
    stats = Group.of(stats_process_group or process_group)
    chunks = [model] if isinstance(model, Module) else list(model)
    plan = raise_together(lambda: _plan(chunks, config, param_groups, optimizer, data.size), stats)
    check_groups_are_used(plan.groups, stats)
    compare_ranks(config, plan.named, [part.layout for part in plan.parts], data=data, everyone=stats)
    buffers = [_allocate(part, data) for part in plan.parts]
    sharded = ShardedOptimizer(
        buffers,
        plan.groups,
        choice=plan.choice,
        config=config,
        loss_scale=make_loss_scale(config, plan.device),
        stats_group=stats,
        average_over=data.size,
        counted=counted,
    )
    return PlainOptimizer(sharded, data)


def _plan(
    chunks: Sequence[Module],
    config: DistOptConfig,
    param_groups: Sequence[Mapping[str, Any]] | None,
    optimizer: Optimizer | None,
    num_shards: int,
) -> _Plan:
    # Reverse of registration is roughly the order in which backward finishes gradients.
    named = dict(reversed(named_trainable(chunks).items()))
    if not named:
        raise LayoutError(refusal("model", "no trainable param", "have at least 1", "Unfreeze something"))
    check_dtypes(named, config)
    accelerator = find_accelerator(config.accelerator)
    device = check_devices({param.device for param in named.values()}, accelerator)
    everything = [{"params": list(named.values())}]
    torch_groups = param_groups or (optimizer.param_groups if optimizer is not None else everything)
    choice = adopt_instance(optimizer) if optimizer is not None else choose_inner(config, device.type)
    return _Plan(named, _plan_parts(named, config, num_shards), plan_groups(named, torch_groups), choice, device)


def _plan_parts(named: Mapping[str, Parameter], config: DistOptConfig, num_shards: int) -> tuple[_Part, ...]:
    by_dtype: dict[torch.dtype, dict[str, Parameter]] = {}
    for name, param in named.items():
        by_dtype.setdefault(param.dtype, {})[name] = param
    parts = []
    for dtype, members in by_dtype.items():
        specs = [spec_of(name, param) for name, param in members.items()]
        layout = lay_out(specs, num_shards=num_shards, bucket_numel=config.bucket_numel)
        parts.append(_Part(members, layout, torch.float32 if config.grads_in_fp32 else dtype))
    return tuple(parts)


def _allocate(part: _Part, data: Group) -> ShardedBuffer:
    param = move_into_buffer(part.named, part.layout)
    grad = accumulate_into_buffer(part.named, part.layout, part.grad_dtype)
    buffer = ShardedBuffer(part.layout, data.rank, grad, param)
    share_initial_params(buffer, data)
    return buffer


class PlainOptimizer:
    """The usual calls of an optimizer, around the sharded step. Made by `distribute`.

    Args:
        sharded: updates what this rank owns.
        data: the data-parallel group.
    """

    def __init__(self, sharded: ShardedOptimizer, data: Group) -> None:
        self.sharded = sharded
        self.data = data

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Live: what a scheduler writes here is used by the next step. "params" are flat main params."""
        return self.sharded.inner.param_groups

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """The inner optimizer's state, by flat main param."""
        return self.sharded.inner.state

    @property
    def memory(self) -> Memory:
        """Bytes that this rank holds."""
        return measure_memory(self.sharded)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the grad buffers; they stay allocated, whatever `set_to_none` says."""
        for buffer in self.sharded.buffers:
            buffer.grad.zero_()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on."""
        return loss * self.sharded.loss_scale.scale.to(loss.dtype).squeeze()

    @torch.no_grad()
    def step(self) -> StepResult:
        """Collective: reduce-scatter, update, all-gather.

        Raises:
            NonFiniteGradError: on all ranks, where a gradient is not finite and the policy is "raise".
        """
        for buffer in self.sharded.buffers:
            reduce_grads(buffer, self.data)
        result = self.sharded.step()
        if result.updated:
            for buffer in self.sharded.buffers:
                gather_params(buffer, self.data)
        return result

    def reload_model_params(self) -> None:
        """Call it after changing model params from outside; the main params follow."""
        self.sharded.reload_model_params()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state by param name, see checkpoint/state.py."""
        return local_state_dict(self.sharded)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Collective: takes this rank's `state_dict()` back and gathers the params.

        Raises:
            CheckpointError: on all ranks, where one of them cannot take its state; nothing is changed then.
        """
        raise_together(lambda: check_local_state_dict(self.sharded, state), self.data)
        load_local_state_dict(self.sharded, state)
        for buffer in self.sharded.buffers:
            gather_params(buffer, self.data)
