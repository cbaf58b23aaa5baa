"""What a user gives to `distribute(...)`, checked and translated into a plan."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron_distopt.buffers import check_grad_dtype
from megatron_distopt.checkpoint.param_groups import check_options
from megatron_distopt.comm import Group, Reduction
from megatron_distopt.compatibility import Feature, check_compatible
from megatron_distopt.config import DistOptConfig, config_from_environment, with_options
from megatron_distopt.device import CPU
from megatron_distopt.errors import ConfigError, LayoutError
from megatron_distopt.hosts.start import (
    as_torch_groups,
    check_bucket_size,
    check_dtypes,
    named_params,
    reduction_of,
)
from megatron_distopt.hosts.torch.buffers import ParamSet, plan_sets
from megatron_distopt.hosts.torch.ddp import check_strides, is_ignored, trained_though_ignored
from megatron_distopt.hosts.torch.params import is_updated
from megatron_distopt.hosts.watches.watched_params import check_not_shared, check_own_memory
from megatron_distopt.layout import Placement
from megatron_distopt.optimizer.accelerator import check_devices, find_accelerator
from megatron_distopt.optimizer.choice import adopt_instance, choose_inner, fused_instance
from megatron_distopt.optimizer.inner import InnerChoice
from megatron_distopt.optimizer.loss_scale import make_loss_scale
from megatron_distopt.optimizer.low_precision.low_precision_tensor import Precision
from megatron_distopt.optimizer.main_params import ParamGroup
from megatron_distopt.optimizer.offload import check_offload
from megatron_distopt.optimizer.owners.given import check_new
from megatron_distopt.optimizer.owners.muon_options import is_muons_group
from megatron_distopt.optimizer.owners.sharded_muon import (
    Matrices,
    adopt_muon,
    is_muon,
    matrices_in,
)
from megatron_distopt.optimizer.owners.whole_params import TrainedParams
from megatron_distopt.optimizer.sharded import StepPlan

#: Options of an optimizer that is made here.
_OF_OWN_OPTIMIZER = ("adam", "optimizer", "lr", "weight_decay", "betas", "eps", "momentum", "decay")


@dataclass(frozen=True)
class ModelPlan:
    """All that is decided before the first byte is allocated."""

    chunks: Sequence[Module]  # of the model
    named: Mapping[str, Parameter]  # every param of the model
    # param groups with model params; the given optimizers' own dicts
    torch_groups: list[dict[str, Any]]
    sets: tuple[ParamSet, ...]  # of params that train now
    step: StepPlan  # its groups have the names of params that train now
    data: Group  # ranks that hold the same params
    device: torch.device  # of all params that train
    how: Reduction  # of grads
    # where this rank's part of a param lies in the whole model
    placement: Callable[[str, Parameter], Placement]
    broadcast_buffers: bool  # whether module buffers that training changes follow the first rank
    # whether params lie in the buffers in the order of their strides; False where an optimizer
    # updates whole params
    keeps_strides: bool


@dataclass(frozen=True, kw_only=True)
class GivenToDistribute:
    """The arguments of `distribute(...)`; its docstring describes them."""

    model: Module | Sequence[Module]
    optimizer: Optimizer | Sequence[Optimizer] | DistOptConfig | None
    config: DistOptConfig | None
    param_groups: Sequence[Mapping[str, Any]] | None
    options: Mapping[str, Any]  # fields of DistOptConfig
    excluded_from_norm: Callable[[str], bool]
    placement: Callable[[str, Parameter], Placement]
    broadcast_buffers: bool


def plan_model(
    given: GivenToDistribute, data: Group, everyone: Group
) -> tuple[ModelPlan, tuple[Optimizer, ...]]:
    """The plan that this rank makes without the others, and the optimizers that the user gave.

    Raises:
        ConfigError, LayoutError: the model cannot be trained with these arguments.
    """
    chunks = _modules_of(given.model)
    optimizers, config = _optimizers_and_config(given)
    # Reverse of registration is roughly the order in which backward finishes gradients.
    named = dict(reversed(named_params(chunks).items()))
    torch_groups = _torch_groups(optimizers, given.param_groups, named)
    check_groups(torch_groups, named)
    named = _without_those_of_others(named, torch_groups)
    for name, param in named.items():
        check_param(name, param)
    trained = _trained(named, torch_groups)
    check_trained(trained, config)
    check_own_memory(named)
    device = _device_of(trained, config, data)
    check_bucket_size(config, data.size, "bucket_size=40_000_000")
    choice = _choose(optimizers, config, device, named, data)
    sets = plan_sets(trained, config, data.size)
    check_offload([(each.layout, each.dtype) for each in sets], config, device, choice)
    groups = name_groups(torch_groups, trained)
    for number, group in enumerate(groups):
        check_options(number, group.options, choice)
    whole = _updated_whole(groups, choice)
    for name in whole:
        _check_whole(given.placement(name, named[name]), choice.name)
    if whole:
        check_strides(trained)
    step = StepPlan(
        groups,
        choice,
        config,
        make_loss_scale(config, device),
        lambda: everyone,
        data.size,
        given.excluded_from_norm,
    )
    plan = ModelPlan(
        chunks=chunks,
        named=named,
        torch_groups=torch_groups,
        sets=sets,
        step=step,
        data=data,
        device=device,
        how=reduction_of(config, [each.grad_dtype for each in sets]),
        placement=given.placement,
        broadcast_buffers=given.broadcast_buffers,
        keeps_strides=not whole,
    )
    return plan, optimizers


def _device_of(
    trained: Mapping[str, Parameter], config: DistOptConfig, data: Group
) -> torch.device:
    """The device of all params that train; refuses a process group that cannot reach it."""
    accelerator = find_accelerator(config.accelerator)
    device = check_devices({param.device for param in trained.values()}, accelerator)
    if device.type == CPU and data.backend == "nccl":
        raise ConfigError(
            f"The model is on {device}, but the backend of the process group is nccl. Move the "
            "model to the GPU, or initialize the process group with backend 'gloo'."
        )
    return device


def _updated_whole(groups: Sequence[ParamGroup], choice: InnerChoice) -> list[str]:
    """Params that the inner optimizer takes whole."""
    return [
        name
        for group in groups
        if choice.updates_whole_params or is_muons_group(group.options)
        for name in group.names
    ]


def _modules_of(model: Any) -> list[Module]:
    chunks = [model] if isinstance(model, Module) else list(model)
    wrong = [each for each in chunks if not isinstance(each, Module)]
    if chunks and not wrong:
        return chunks
    is_params = bool(wrong) and isinstance(wrong[0], Parameter)
    found = "its params" if is_params else f"a {type(model).__name__}"
    raise ConfigError(
        f"distribute(...) was given {found} as the model. The model must be a torch.nn.Module or a "
        "list of them. Write distribute(model, optimizer)."
    )


def _optimizers_and_config(given: GivenToDistribute) -> tuple[tuple[Optimizer, ...], DistOptConfig]:
    """The optimizers that were given, and the config with the options of all sources. An argument
    of a wrong type is an error that names the call to write."""
    optimizer, config = given.optimizer, given.config
    if isinstance(optimizer, DistOptConfig) and config is None:
        optimizer, config = None, optimizer
    optimizers = _as_tuple(optimizer)
    for each in optimizers:
        _check_optimizer(each, is_alone=len(optimizers) == 1)
    if config is not None and not isinstance(config, DistOptConfig):
        raise ConfigError(
            f"config is a {type(config).__name__}, but it must be a DistOptConfig. Write "
            "distribute(model, optimizer, DistOptConfig(...))."
        )
    if optimizers and given.param_groups is not None:
        raise ConfigError(
            "distribute(...) was given both param_groups and an optimizer. Give the groups to the "
            "optimizer's constructor."
        )
    merged = with_options(config or DistOptConfig(), given.options)
    merged = config_from_environment(os.environ, merged)
    for each in optimizers:
        _check_unused(each, merged)
    check_compatible(merged, {Feature.OWN_LOOP: "distribute(...)"})
    return optimizers, merged


def _as_tuple(optimizer: Any) -> tuple[Any, ...]:
    if optimizer is None:
        return ()
    if not isinstance(optimizer, (list, tuple)):
        return (optimizer,)
    if not optimizer:
        raise ConfigError(
            "optimizer is an empty list. Write distribute(model, [torch.optim.Muon(...), "
            "torch.optim.AdamW(...)])."
        )
    return tuple(optimizer)


def _check_optimizer(optimizer: Any, *, is_alone: bool) -> None:
    if not isinstance(optimizer, Optimizer):
        name, found = "torch.optim.AdamW", f"a {type(optimizer).__name__}"
        if isinstance(optimizer, type):
            name, found = optimizer.__name__, f"the class {optimizer.__name__}"
        raise ConfigError(
            f"optimizer is {found}, but it must be a torch.optim.Optimizer or a DistOptConfig. "
            f"Write distribute(model, {name}(model.parameters(), lr=...))."
        )
    kinds = [
        name
        for name in vars(optimizer)
        if name.startswith("_optimizer_") and name.endswith("_hooks")
    ]
    if not is_alone and any(vars(optimizer)[name] for name in kinds):
        raise ConfigError(
            f"{type(optimizer).__name__} is one of several optimizers and has hooks, but hooks are "
            "called for all of them together. Register the hooks on the optimizer that "
            "distribute(...) returns."
        )


def _check_unused(optimizer: Optimizer, config: DistOptConfig) -> None:
    """With a given optimizer, refuses options that would make one. `adam` is allowed with state in
    low precision, because it chooses the implementation there."""
    is_full, default = Precision.of(config).is_full, DistOptConfig()
    for name in _OF_OWN_OPTIMIZER if is_full else _OF_OWN_OPTIMIZER[1:]:
        if name in config.explicit and getattr(config, name) != getattr(default, name):
            kind = type(optimizer).__name__
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}, but an optimizer object was given as well, "
                f"so the option has no effect. Give {name} to the constructor of {kind} if it has "
                f"that argument, or leave {name} or the optimizer out."
            )


def _without_those_of_others(
    named: dict[str, Parameter], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Parameter]:
    """Leaves out params of the model that another distributed optimizer updates instead of this
    one."""
    if any(map(is_updated, named.values())):
        gc.collect()  # only a reference cycle may be keeping the other optimizer alive
    grouped = {param for group in groups for param in group["params"]}
    return {
        name: param for name, param in named.items() if param in grouped or not is_updated(param)
    }


def check_param(name: str, param: Parameter) -> None:
    """Refuses a param of another distributed optimizer, and a param that is not a plain tensor."""
    if is_updated(param):
        raise LayoutError(
            f"Param {name!r} is already in another distributed optimizer, and it can be in only "
            "one at a time. Call release() on the other optimizer first (in Lightning, in "
            "on_fit_end() of the module), or give each optimizer params of its own."
        )
    if isinstance(param, UninitializedParameter):
        raise LayoutError(
            f"Param {name!r} belongs to a lazy module and is not initialized. Run one batch "
            "through the model before distribute(...)."
        )
    if is_traceable_wrapper_subclass(param):
        raise LayoutError(
            f"Param {name!r} is a {type(param.data).__name__}, but it must be a plain tensor that "
            "is whole on every data-parallel rank. Do not apply FSDP, tensor parallelism or "
            "quantization to the model before distribute(...)."
        )


def _torch_groups(
    optimizers: tuple[Optimizer, ...],
    given: Sequence[Mapping[str, Any]] | None,
    named: Mapping[str, Parameter],
) -> list[dict[str, Any]]:
    """The user's groups. Without any, one group of the whole model, frozen params included."""
    if given is not None:
        return as_torch_groups(given)
    if not optimizers:
        return [{"params": list(named.values())}]
    if len(optimizers) == 1:
        return optimizers[0].param_groups  # the list itself, which may grow
    # The optimizers' own dicts, because schedulers write options into them.
    return [group for each in optimizers for group in each.param_groups]


def check_groups(
    groups: Sequence[Mapping[str, Any]],
    named: Mapping[str, Parameter],
    earlier: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Refuses params that are not in the model, and params in two groups, counting `earlier`
    ones."""
    seen = Counter(param for group in groups for param in group["params"])
    foreign = seen.keys() - set(named.values())
    seen.update(param for group in earlier for param in group["params"])
    if foreign:
        raise LayoutError(
            f"The param groups have {len(foreign)} params that are not in the model. Register "
            "their module in the model first, or call distribute([model, other_module], ...) with "
            "every module whose params the optimizer updates."
        )
    twice = [name for name, param in named.items() if seen[param] > 1]
    if twice:
        raise LayoutError(
            f"Param {twice[0]!r} is in 2 param groups, but a param can be in only one. Leave it "
            "out of one of them."
        )


def _trained(
    named: Mapping[str, Parameter], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Parameter]:
    """The params that train: those in a group that are neither frozen nor empty. The others are not
    changed, as in torch."""
    grouped = {param for group in groups for param in group["params"]}
    return {
        name: param
        for name, param in named.items()
        if param in grouped and param.requires_grad and param.numel() and not param.is_sparse
    }


def _choose(
    given: Sequence[Optimizer],
    config: DistOptConfig,
    device: torch.device,
    named: Mapping[str, Parameter],
    data: Group,
) -> InnerChoice:
    """The inner optimizer for what the user gave."""
    params = TrainedParams(
        {name: tuple(param.shape) for name, param in named.items()}, lambda name: data
    )
    if not given:
        return choose_inner(config, device.type, params)
    for each in given:
        check_new(each)
    if len(given) > 1 or is_muon(given[0]):
        specs = {
            key: spec
            for each in given
            if is_muon(each)
            for key, spec in matrices_in(each, named).items()
        }
        return adopt_muon(given, Matrices(specs, lambda name: data), config, device.type)
    return fused_instance(given[0], config, device.type) or adopt_instance(given[0], params, config)


def _check_whole(place: Placement, optimizer: str) -> None:
    if place.dim is not None:
        raise LayoutError(
            f"Param {place.name!r} is cut along dimension {place.dim}, but {optimizer} needs it "
            "whole on every data-parallel rank. Give the param to AdamW, or do not cut it."
        )


def name_groups(
    groups: Sequence[Mapping[str, Any]], named: Mapping[str, Parameter]
) -> list[ParamGroup]:
    """The groups with the names of those of their params that are in `named`."""
    name_of = {param: name for name, param in named.items()}
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    names = [
        tuple(name_of[param] for param in group["params"] if param in name_of) for group in groups
    ]
    return [ParamGroup(*each) for each in zip(options, names, strict=True)]


def check_trained(
    named: Mapping[str, Parameter], config: DistOptConfig, *, keeps_strides: bool = True
) -> None:
    """Refuses params that cannot be trained with a config."""
    if not named:
        raise LayoutError(
            "No param of the model can be trained: the optimizer has none of them, or those that "
            "it has are frozen or empty. Give the optimizer params of this model, and unfreeze at "
            "least one with param.requires_grad_(True)."
        )
    check_dtypes(named, config)
    check_not_shared(named.items())
    if not keeps_strides:
        check_strides(named)
    for name, param in named.items():
        if not isinstance(param, Parameter):
            raise LayoutError(
                f"{name!r} is a Tensor and not a Parameter, as in a script module that was loaded. "
                "Load its state_dict() into a module written in Python, or freeze it."
            )
        if is_ignored(param):
            raise trained_though_ignored(name)
        check_grad_dtype(name, param, torch.float32 if config.grads_in_fp32 else param.dtype)
