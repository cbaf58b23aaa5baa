"""Chooses the inner optimizer: Adam, SGD, or one of the user's, which need not be element-wise."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch.optim import Optimizer

from megatron_distopt.compatibility import Feature, check_compatible
from megatron_distopt.config import DistOptConfig
from megatron_distopt.device import CPU
from megatron_distopt.errors import ConfigError
from megatron_distopt.optimizer.accelerator import has_torch_fused, usable_device
from megatron_distopt.optimizer.adam import adam_options, choose_adam, choose_low_precision
from megatron_distopt.optimizer.inner import Groups, InnerChoice, is_of_torch
from megatron_distopt.optimizer.inner_options import (
    IMPLEMENTATION,
    option_text,
    without_implementation,
)
from megatron_distopt.optimizer.low_precision.low_precision_tensor import Precision
from megatron_distopt.optimizer.owners.declared import (
    ELEMENTS,
    Candidate,
    declared_updates,
    known_updates,
)
from megatron_distopt.optimizer.owners.given import accepted, build_alike, check_new
from megatron_distopt.optimizer.owners.whole_params import TrainedParams, WholeParams

#: The call with which plain torch gets Muon.
WITH_MUON = "distribute(model, [torch.optim.Muon(matrices, ...), torch.optim.AdamW(others, ...)])"
#: Classes of torch's that a fused kernel may replace, and the name of the choice.
_FUSED = {
    torch.optim.AdamW: "torch_fused",
    torch.optim.Adam: "torch_fused",
    torch.optim.SGD: "torch_sgd",
}


def choose_inner(
    config: DistOptConfig, device_type: str, params: TrainedParams | None = None
) -> InnerChoice:
    """Chooses the inner optimizer.

    Raises:
        ConfigError: if a named optimizer cannot be used, or if the option `updates` is missing or
            wrong for it.
    """
    if config.updates is not None and ":" not in config.optimizer:
        raise ConfigError(
            f"updates is {config.updates!r}, but it describes only a class of your own, and the "
            f"optimizer is {config.optimizer!r}. Leave updates out."
        )
    if config.optimizer == "muon":
        raise ConfigError(
            "optimizer is 'muon', but only in a Megatron can Muon be chosen by name. In plain "
            f"torch write {WITH_MUON}, or use adam."
        )
    if not Precision.of(config).is_full:
        check_compatible(config)
        return choose_low_precision(
            config,
            device_type,
            adam_options(config),
            is_decoupled=config.is_decoupled,
            why=("the precision of the state needs it",),
        )
    if config.optimizer == "sgd":
        on_host = partial(_build_sgd, config=config, device_type=CPU)
        build = partial(_build_sgd, config=config, device_type=device_type)
        return InnerChoice("torch_sgd", build, on_host=on_host)
    if config.optimizer != "adam":
        return _user_class(config, device_type, params)
    return choose_adam(config, device_type)


def adopt_instance(
    instance: Optimizer, params: TrainedParams | None = None, config: DistOptConfig | None = None
) -> InnerChoice:
    """The user's own optimizer object, whose param groups will hold main params in place of model
    params.

    Raises:
        ConfigError: if it was stepped or loaded before, or if the option `updates` is missing or
            wrong for it.
    """
    check_new(instance)
    _check_not_distributed_itself(type(instance))
    kind, build = type(instance), build_alike(instance)
    devices = [param.device for group in instance.param_groups for param in group["params"]]
    device = devices[0] if devices else torch.device(CPU)
    candidate = Candidate(kind, build, kind.__name__, instance.param_groups, device)
    chosen = _by_updates(candidate, config or DistOptConfig(), params)
    # torch's own classes keep nothing in their param groups, so two of them can share a state.
    can_share = is_of_torch(kind) and not chosen.updates_whole_params
    return replace(
        chosen,
        why=("an instance was given", *chosen.why),
        defaults=_listed(instance.defaults),
        on_host=build if can_share else None,
    )


def _by_updates(
    candidate: Candidate, config: DistOptConfig, params: TrainedParams | None
) -> InnerChoice:
    """The choice over flat params if the class updates each element independently, or else over
    whole params."""
    dims = () if params is None else {len(shape) for shape in params.shapes.values()} or {1, 2}
    updates, written = declared_updates(candidate, dims, config.updates)
    if params is None or updates == ELEMENTS:
        return InnerChoice(candidate.name, candidate.build, writes=written)
    check_compatible(config, {Feature.WHOLE_PARAMS: candidate.name})
    build = partial(WholeParams, build=candidate.build, params=params)
    return InnerChoice(
        candidate.name,
        build,
        ("it updates whole params, each on one rank",),
        updates_whole_params=True,
    )


def _check_not_distributed_itself(kind: type[Optimizer]) -> None:
    if kind.__name__ == "DistributedShampoo":
        raise ConfigError(
            "DistributedShampoo distributes its state itself, so this package cannot. Train with "
            "torch's DistributedDataParallel and give DistributedShampoo "
            "distributed_config=DDPDistributedConfig(...) (DDPShampooConfig in its older "
            "releases), or use pytorch_optimizer's SOAP or Shampoo."
        )


def fused_instance(
    instance: Optimizer, config: DistOptConfig, device_type: str
) -> InnerChoice | None:
    """Replaces an instance of a torch class with its fused kernel, unless the user chose a kernel.

    Returns:
        None if the instance itself is to be used.
    """
    if not Precision.of(config).is_full:
        return _low_precision_instance(instance, config, device_type)
    kind, name = type(instance), _FUSED.get(type(instance))
    known_updates(kind, config.updates)
    if name is None or config.adam != "auto" or not has_torch_fused(device_type):
        return None
    for group in instance.param_groups:
        has_chosen = any(group.get(option) for option in IMPLEMENTATION if option != "fused")
        if has_chosen or group.get("fused") is False or group.get("foreach") is False:
            return None
    taken = inspect.signature(kind).parameters
    options = {
        key: value
        for key, value in without_implementation(instance.defaults).items()
        if key in taken
    }

    def build(groups: Groups) -> Optimizer:
        plain = [without_implementation(group) for group in groups]
        return kind(plain, **options, fused=True)  # type: ignore[call-arg]

    return InnerChoice(
        name, build, (f"{kind.__name__} was given",), _listed(instance.defaults), on_host=build
    )


def _listed(defaults: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{key}={option_text(value)}" for key, value in sorted(defaults.items()))


def _low_precision_instance(
    instance: Optimizer, config: DistOptConfig, device_type: str
) -> InnerChoice:
    if type(instance) not in (torch.optim.Adam, torch.optim.AdamW):
        check_compatible(config, {Feature.NOT_ADAM: type(instance).__name__})
    options = {key: instance.defaults[key] for key in ("lr", "betas", "eps", "weight_decay")}
    is_adamw = type(instance) is torch.optim.AdamW
    is_decoupled = instance.defaults.get("decoupled_weight_decay", is_adamw)
    return choose_low_precision(
        config,
        device_type,
        options,
        is_decoupled=is_decoupled,
        why=(f"{type(instance).__name__} was given, and the precision of the state needs it",),
        defaults=_listed(instance.defaults),
    )


def _build_sgd(groups: Groups, config: DistOptConfig, device_type: str) -> Optimizer:
    # Older releases of torch do not know the option.
    fused: dict[str, Any] = {"fused": True} if has_torch_fused(device_type) else {}
    return torch.optim.SGD(
        groups, lr=config.lr, weight_decay=config.weight_decay, momentum=config.momentum, **fused
    )


def _user_class(
    config: DistOptConfig, device_type: str, params: TrainedParams | None
) -> InnerChoice:
    module_name, _, class_name = config.optimizer.partition(":")
    try:
        chosen = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"optimizer is {config.optimizer!r}, but that class cannot be imported ({error}). "
            "Check the spelling of module:Class and the PYTHONPATH."
        ) from error
    if not (isinstance(chosen, type) and issubclass(chosen, Optimizer)):
        raise ConfigError(
            f"optimizer is {config.optimizer!r}, but that is not a subclass of "
            "torch.optim.Optimizer. Give a class such as torch.optim:Adagrad."
        )
    _check_not_distributed_itself(chosen)
    options = {**adam_options(config), "momentum": config.momentum}
    build = partial(chosen, **_with_own_pairs(chosen, options))
    device = usable_device(device_type)
    candidate = Candidate(chosen, build, config.optimizer, device=device)
    return _by_updates(candidate, config, params)


def _with_own_pairs(chosen: type[Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a class takes. If an option of ours is a pair there, such as `eps` of
    Adafactor, the class's default is used."""
    parameters = inspect.signature(chosen).parameters
    ours = {each.name: each.default for each in fields(DistOptConfig)}
    taken = accepted(chosen, options)
    for name, value in list(taken.items()):
        is_pair = name in parameters and isinstance(parameters[name].default, tuple)
        if is_pair != isinstance(value, tuple) and value == ours[name]:
            del taken[name]
    return taken
