"""What `distribute` decides before the first byte is allocated: what this rank can see by itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from megatron_distopt.comm import Group, Reduction
from megatron_distopt.config import DistOptConfig, config_from_environment
from megatron_distopt.errors import ConfigError, LayoutError, refusal
from megatron_distopt.hosts.base import as_torch_groups, check_dtypes, named_trainable, plan_groups, spec_of
from megatron_distopt.hosts.overlap import check_bucket, wire_of
from megatron_distopt.layout import BufferLayout, default_bucket_numel, lay_out
from megatron_distopt.optimizer import (
    InnerChoice,
    ParamGroup,
    adopt_instance,
    check_devices,
    choose_inner,
    find_accelerator,
)
from megatron_distopt.optimizer.accelerator import CPU

__all__ = ["Part", "Plan", "Request", "decide"]


@dataclass(frozen=True)
class Part:
    """Params that share a buffer: one param dtype, one grad dtype."""

    named: Mapping[str, Parameter]
    layout: BufferLayout
    grad_dtype: torch.dtype


@dataclass(frozen=True)
class Request:
    """What the user gave."""

    chunks: Sequence[Module]
    config: DistOptConfig | None
    param_groups: Sequence[Mapping[str, Any]] | None
    optimizer: Optimizer | None


@dataclass(frozen=True)
class Plan:
    """All that is decided before the first byte is allocated."""

    config: DistOptConfig
    named: Mapping[str, Parameter]
    parts: tuple[Part, ...]
    groups: tuple[ParamGroup, ...]
    choice: InnerChoice
    device: torch.device
    how: Reduction


def decide(request: Request, data: Group) -> Plan:
    """Looks at everything and moves nothing.

    Args:
        request: see `Request`.
        data: the data-parallel group.

    Raises:
        ConfigError, LayoutError
    """
    config = config_from_environment(os.environ, request.config)
    # Reverse of registration is roughly the order in which backward finishes gradients.
    named = dict(reversed(named_trainable(request.chunks).items()))
    _check_params(named, config)
    device = check_devices({param.device for param in named.values()}, find_accelerator(config.accelerator))
    _check_backend(data, device)
    check_bucket(config, data.size, "bucket_numel=40_000_000")
    own, given = request.optimizer, request.param_groups
    if given is None:
        given = own.param_groups if own is not None else [{"params": list(named.values())}]
    groups = plan_groups(named, as_torch_groups(given))
    choice = adopt_instance(own) if own is not None else choose_inner(config, device.type)
    parts = _plan_parts(named, config, data.size)
    how = Reduction(wire=wire_of(config, [part.grad_dtype for part in parts]))
    return Plan(config, named, parts, groups, choice, device, how)


def _check_params(named: Mapping[str, Parameter], config: DistOptConfig) -> None:
    if not named:
        raise LayoutError(refusal("model", "no trainable param", "have at least 1", "Unfreeze something"))
    check_dtypes(named, config)
    for name, param in named.items():
        if hasattr(param, "main_grad"):
            rule, remedy = "belong to one distributed optimizer", "Build a new model, or keep the first optimizer"
            raise LayoutError(refusal(f"param {name!r}", "in a grad buffer already", rule, remedy))


def _check_backend(group: Group, device: torch.device) -> None:
    if device.type == CPU and group.backend == "nccl":
        rule, remedy = "carry tensors of the model's device", "Move the model to the GPU, or use backend 'gloo'"
        raise ConfigError(refusal("process group", f"{group.backend} for a model on {device}", rule, remedy))


def _plan_parts(named: Mapping[str, Parameter], config: DistOptConfig, num_shards: int) -> tuple[Part, ...]:
    by_dtype: dict[torch.dtype, dict[str, Parameter]] = {}
    for name, param in named.items():
        by_dtype.setdefault(param.dtype, {})[name] = param
    parts = []
    for dtype, members in by_dtype.items():
        specs = [spec_of(name, param) for name, param in members.items()]
        bucket_numel = config.bucket_numel
        if bucket_numel is None and (config.overlap_grad_reduce or config.overlap_param_gather):
            bucket_numel = default_bucket_numel(sum(spec.numel for spec in specs), num_shards)
        layout = lay_out(specs, num_shards=num_shards, bucket_numel=bucket_numel)
        parts.append(Part(members, layout, torch.float32 if config.grads_in_fp32 else dtype))
    return tuple(parts)
