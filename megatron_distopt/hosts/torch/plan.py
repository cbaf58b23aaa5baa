"""What `distribute` decides before the first byte is allocated: what this rank can see by itself."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron_distopt.buffers import check_grad_dtype
from megatron_distopt.comm import Group, Reduction
from megatron_distopt.config import DistOptConfig, config_from_environment
from megatron_distopt.device import CPU
from megatron_distopt.errors import ConfigError, LayoutError, refusal
from megatron_distopt.hosts.base import (
    as_torch_groups,
    check_bucket_size,
    check_dtypes,
    named_params,
    reduce_dtype_of,
    spec_of,
)
from megatron_distopt.hosts.between_steps import check_own_memory
from megatron_distopt.layout import BufferLayout, default_bucket_size, lay_out
from megatron_distopt.optimizer.accelerator import check_devices, find_accelerator
from megatron_distopt.optimizer.choice import adopt_instance, choose_inner, fused_instance
from megatron_distopt.optimizer.deterministic import check_deterministic
from megatron_distopt.optimizer.inner import InnerChoice
from megatron_distopt.optimizer.main_params import ParamGroup
from megatron_distopt.optimizer.offload import check_offload
from megatron_distopt.optimizer.owners.given import check_new
from megatron_distopt.optimizer.owners.sharded_muon import Matrices, adopt_muon, is_muon, matrices_in
from megatron_distopt.optimizer.owners.whole_params import TrainedParams


@dataclass(frozen=True)
class ParamSet:
    """Params that share a buffer: one param dtype, one grad dtype."""

    named: Mapping[str, Parameter]
    layout: BufferLayout
    grad_dtype: torch.dtype


@dataclass(frozen=True)
class Plan:
    """All that is decided before the first byte is allocated."""

    chunks: Sequence[Module]  # of the model
    config: DistOptConfig  # merged
    named: Mapping[str, Parameter]  # every param of the model
    torch_groups: list[dict[str, Any]]  # param groups with model params; the given optimizers' own dicts
    groups: tuple[ParamGroup, ...]  # the same with the names of those that train now
    sets: tuple[ParamSet, ...]  # of those that train now
    choice: InnerChoice
    device: torch.device  # of all params that train
    how: Reduction  # of grads


def decide(
    chunks: Sequence[Module],
    optimizers: tuple[Optimizer, ...],
    config: DistOptConfig | None,
    param_groups: Sequence[Mapping[str, Any]] | None,
    data: Group,
) -> Plan:
    """Decides about params, buffers and the inner optimizer, and moves nothing.

    Raises:
        ConfigError, LayoutError
    """
    config = config_from_environment(os.environ, config)
    # Reverse of registration is roughly the order in which backward finishes gradients.
    named = dict(reversed(named_params(chunks).items()))
    _check_model(named)
    torch_groups = _torch_groups(optimizers, param_groups, named)
    trained = _trained(named, torch_groups)
    check_trained(trained, config)
    check_own_memory(named)
    device = check_devices({param.device for param in trained.values()}, find_accelerator(config.accelerator))
    _check_backend(data, device)
    check_deterministic(config, device, data)
    check_bucket_size(config, data.size, "bucket_size=40_000_000")
    choice = _choose(optimizers, config, device, named, data)
    sets = plan_sets(trained, config, data.size)
    check_offload([(each.layout, _dtype_of(each.named)) for each in sets], config, device, choice)
    how = Reduction(reduce_dtype=reduce_dtype_of(config, [each.grad_dtype for each in sets]))
    groups = tuple(group_names(group, trained) for group in torch_groups)
    return Plan(chunks, config, named, torch_groups, groups, sets, choice, device, how)


def _choose(
    given: Sequence[Optimizer], config: DistOptConfig, device: torch.device, named: Mapping[str, Parameter], data: Group
) -> InnerChoice:
    """The inner optimizer for what the user gave."""
    params = TrainedParams({name: tuple(param.shape) for name, param in named.items()}, lambda name: data)
    if not given:
        return choose_inner(config, device.type, params)
    for each in given:
        check_new(each)
    if len(given) > 1 or is_muon(given[0]):
        specs = {key: spec for each in given if is_muon(each) for key, spec in matrices_in(each, named).items()}
        return adopt_muon(given, Matrices(specs, lambda name: data), config, device.type)
    return fused_instance(given[0], config, device.type) or adopt_instance(given[0], params, config)


def _check_model(named: Mapping[str, Parameter]) -> None:
    """Refuses params that torch itself cannot treat as plain tensors."""
    for name, param in named.items():
        if isinstance(param, UninitializedParameter):
            remedy = "Run one batch through the model before distribute(...)"
            raise LayoutError(refusal(f"param {name!r}", "not initialized (a lazy module)", "have a shape", remedy))
        if is_traceable_wrapper_subclass(param):
            got, rule = f"a {type(param.data).__name__}", "be a plain tensor, whole on every data-parallel rank"
            remedy = "Take the model out of FSDP, tensor parallelism or quantization before distribute(...)"
            raise LayoutError(refusal(f"param {name!r}", got, rule, remedy))


def _torch_groups(
    optimizers: tuple[Optimizer, ...],
    given: Sequence[Mapping[str, Any]] | None,
    named: Mapping[str, Parameter],
) -> list[dict[str, Any]]:
    """The user's groups; one of the whole model, frozen params included, where there are none."""
    if given is None and optimizers:
        # Of one optimizer the list itself, which may grow; of several the dicts, whose options schedulers write.
        groups = optimizers[0].param_groups
        groups = groups if len(optimizers) == 1 else [group for each in optimizers for group in each.param_groups]
    else:
        groups = as_torch_groups(given if given is not None else [{"params": list(named.values())}])
    known, seen = set(named.values()), Counter(param for group in groups for param in group["params"])
    foreign = sum(param not in known for param in seen)
    if foreign:
        remedy = "Call distribute([model, other_module], ...) with every module whose params the optimizer has"
        raise LayoutError(refusal("param groups", f"{foreign} params that the model has not", "be of it", remedy))
    twice = [name for name, param in named.items() if seen[param] > 1]
    if twice:
        remedy = "Leave it out of one of them"
        raise LayoutError(refusal(f"param {twice[0]!r}", "in 2 param groups", "be in at most 1", remedy))
    return groups


def _trained(named: Mapping[str, Parameter], groups: Sequence[Mapping[str, Any]]) -> dict[str, Parameter]:
    """The params that train: those in a group that are neither frozen nor empty. As in torch, others are left alone."""
    grouped = {param for group in groups for param in group["params"]}
    return {
        name: param
        for name, param in named.items()
        if param in grouped and param.requires_grad and param.numel() and not param.is_sparse
    }


def group_names(group: Mapping[str, Any], named: Mapping[str, Parameter]) -> ParamGroup:
    """A group with the names of those of its params that are in `named`."""
    name_of = {param: name for name, param in named.items()}
    options = {key: value for key, value in group.items() if key != "params"}
    return ParamGroup(options, tuple(name_of[param] for param in group["params"] if param in name_of))


def check_trained(named: Mapping[str, Parameter], config: DistOptConfig) -> None:
    """Checks that params can be trained with a config.

    Raises:
        ConfigError, LayoutError
    """
    if not named:
        remedy = "Unfreeze something, and give the optimizer params of this model"
        raise LayoutError(refusal("model", "no trainable param in the optimizer", "have at least 1", remedy))
    check_dtypes(named, config)
    for name, param in named.items():
        check_grad_dtype(name, param, torch.float32 if config.grads_in_fp32 else param.dtype)


def _check_backend(group: Group, device: torch.device) -> None:
    if device.type == CPU and group.backend == "nccl":
        rule, remedy = "carry tensors of the model's device", "Move the model to the GPU, or use backend 'gloo'"
        raise ConfigError(refusal("process group", f"{group.backend} for a model on {device}", rule, remedy))


def plan_sets(named: Mapping[str, Parameter], config: DistOptConfig, num_shards: int) -> tuple[ParamSet, ...]:
    """Lays out one buffer for each dtype of the params."""
    by_dtype: dict[torch.dtype, dict[str, Parameter]] = {}
    for name, param in named.items():
        by_dtype.setdefault(param.dtype, {})[name] = param
    return tuple(_plan_set(members, config, num_shards) for members in by_dtype.values())


def _plan_set(members: Mapping[str, Parameter], config: DistOptConfig, num_shards: int) -> ParamSet:
    specs = [spec_of(name, param) for name, param in members.items()]
    bucket_size = config.bucket_size
    if bucket_size is None and (config.overlap_grad_reduce or config.overlap_param_gather):
        bucket_size = default_bucket_size(sum(spec.numel for spec in specs), num_shards)
    layout = lay_out(specs, num_shards=num_shards, bucket_size=bucket_size)
    return ParamSet(members, layout, torch.float32 if config.grads_in_fp32 else _dtype_of(members))


def _dtype_of(members: Mapping[str, Parameter]) -> torch.dtype:
    return next(iter(members.values())).dtype
