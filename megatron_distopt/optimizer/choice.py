"""Which optimizer does the update: Adam, SGD, or one of the user's, which need not be
element-wise."""

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
from megatron_distopt.config import LOW_PRECISION, DistOptConfig
from megatron_distopt.device import CPU
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.optimizer import blocked_adam
from megatron_distopt.optimizer.accelerator import has_dtype, has_torch_fused, usable_device
from megatron_distopt.optimizer.adam import (
    adam_on_host,
    adam_options,
    choose_adam,
    low_precision_adam,
)
from megatron_distopt.optimizer.inner import IMPLEMENTATION, Build, Groups, InnerChoice, option_text
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
#: torch's own that update each element by itself: the name of the source, and the class that rounds
#: into the model param on a CPU.
_FUSED: dict[type[Optimizer], tuple[str, type[Optimizer]]] = {
    torch.optim.AdamW: ("torch_fused", blocked_adam.AdamW),
    torch.optim.Adam: ("torch_fused", blocked_adam.Adam),
    torch.optim.SGD: ("torch_sgd", torch.optim.SGD),
}


def choose_inner(
    config: DistOptConfig, device_type: str, params: TrainedParams | None = None
) -> InnerChoice:
    """Picks the inner optimizer.

    Raises:
        ConfigError: what was asked for by name is not there, or what it updates by itself was not
            said, or not rightly.
    """
    if config.updates is not None and ":" not in config.optimizer:
        raise ConfigError(
            f"updates is {config.updates!r}, which says something of a class of your own, and the "
            f"optimizer is {config.optimizer!r}. Leave updates out."
        )
    if config.optimizer == "muon":
        rule = "be set in a Megatron alone, or be given as an object in plain torch"
        remedy = f"Write {WITH_MUON}, or use adam"
        raise ConfigError(refusal("optimizer", "'muon'", rule, remedy))
    if not Precision.of(config).is_full:
        check_compatible(config)
        _check_codes(config, device_type)
        why = ("the precision of the state asks for it",)
        return InnerChoice(
            LOW_PRECISION,
            low_precision_adam(config, device_type),
            why,
            on_host=adam_on_host(config),
        )
    if config.optimizer == "sgd":
        here, on_host = (
            partial(_build_sgd, config=config, device_type=place) for place in (device_type, CPU)
        )
        return InnerChoice("torch_sgd", here, on_host=on_host)
    if config.optimizer != "adam":
        return _user_class(config, device_type, params)
    return choose_adam(config, device_type)


def adopt_instance(
    instance: Optimizer, params: TrainedParams | None = None, config: DistOptConfig | None = None
) -> InnerChoice:
    """The user's own optimizer object, whose param groups will hold main params in place of model
    params.

    Raises:
        ConfigError: it was stepped or loaded before, or what it updates by itself was not said, or
            not rightly.
    """
    check_new(instance)
    _check_not_distributed_itself(type(instance))
    build = build_alike(instance)
    device = next(
        (param.device for group in instance.param_groups for param in group["params"]),
        torch.device(CPU),
    )
    candidate = Candidate(
        type(instance), build, type(instance).__name__, instance.param_groups, device
    )
    chosen = _by_updates(candidate, config or DistOptConfig(), params)
    # torch's own keep nothing in their param groups, so that two of them can share a state.
    has_plain_groups = (
        type(instance).__module__.startswith("torch.optim.") and not chosen.updates_whole_params
    )
    return replace(
        chosen,
        why=("an instance was given", *chosen.why),
        defaults=_listed(instance.defaults),
        on_host=build if has_plain_groups else None,
    )


def _by_updates(
    candidate: Candidate, config: DistOptConfig, params: TrainedParams | None
) -> InnerChoice:
    """Of flat params where the class updates each element by itself, or else of whole params."""
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
            "DistributedShampoo keeps its state in objects of its own and distributes it itself. "
            "Do not give it to this package: train with torch's DistributedDataParallel and give "
            "it distributed_config=DDPDistributedConfig(...) (DDPShampooConfig in its older "
            "releases), or use pytorch_optimizer's SOAP or Shampoo."
        )


def fused_instance(
    instance: Optimizer, config: DistOptConfig, device_type: str
) -> InnerChoice | None:
    """The fused kernel in place of a class of torch's own whose user chose no kernel.

    Returns:
        None where the instance is to be used itself.
    """
    if not Precision.of(config).is_full:
        return _low_precision_instance(instance, config, device_type)
    known = _FUSED.get(type(instance))
    known_updates(type(instance), config.updates)
    others = [option for option in IMPLEMENTATION if option != "fused"]
    has_chosen = any(group.get(option) for group in instance.param_groups for option in others)
    has_refused = any(
        group.get(option) is False
        for group in instance.param_groups
        for option in ("fused", "foreach")
    )
    if (
        known is None
        or has_chosen
        or has_refused
        or config.adam != "auto"
        or not has_torch_fused(device_type)
    ):
        return None
    name, on_cpu = known
    on_host = _fused_build(on_cpu, instance)
    build = on_host if device_type == CPU else _fused_build(type(instance), instance)
    return InnerChoice(
        name, build, (f"{type(instance).__name__} was given",), _listed(instance.defaults), on_host
    )


def _fused_build(chosen: type[Optimizer], instance: Optimizer) -> Build:
    accepted = inspect.signature(chosen).parameters
    options = {
        key: value
        for key, value in instance.defaults.items()
        if key in accepted and key not in IMPLEMENTATION
    }

    def build(groups: Groups) -> Optimizer:
        plain = [
            {key: value for key, value in group.items() if key not in IMPLEMENTATION}
            for group in groups
        ]
        return chosen(plain, **options, fused=True)  # type: ignore[call-arg]

    return build


def _listed(defaults: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{key}={option_text(value)}" for key, value in sorted(defaults.items()))


def _low_precision_instance(
    instance: Optimizer, config: DistOptConfig, device_type: str
) -> InnerChoice:
    if type(instance) not in (torch.optim.Adam, torch.optim.AdamW):
        check_compatible(config, {Feature.NOT_ADAM: type(instance).__name__})
    options = {key: instance.defaults[key] for key in ("lr", "betas", "eps", "weight_decay")}
    options["decoupled"] = instance.defaults.get(
        "decoupled_weight_decay", type(instance) is torch.optim.AdamW
    )
    why = (f"{type(instance).__name__} was given, and the precision of the state asks for it",)
    _check_codes(config, device_type)
    build = low_precision_adam(config, device_type, options)
    return InnerChoice(
        LOW_PRECISION, build, why, _listed(instance.defaults), adam_on_host(config, options)
    )


def _check_codes(config: DistOptConfig, device_type: str) -> None:
    """Codes of 8 bits are made of fp16 numbers, see [Note: block codes] in block_codes.py."""
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if getattr(config, name) == "int8" and not has_dtype(device_type, torch.float16):
            rule, remedy = "not be int8 on a device without float16", f"Write {name}='bfloat16'"
            raise ConfigError(refusal(name, f"'int8' on {device_type}", rule, remedy))


def _build_sgd(groups: Groups, config: DistOptConfig, device_type: str) -> Optimizer:
    options: dict[str, Any] = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "momentum": config.momentum,
    }
    if has_torch_fused(device_type):
        options["fused"] = True  # older releases of torch do not know the option
    return torch.optim.SGD(groups, **options)


def _user_class(
    config: DistOptConfig, device_type: str, params: TrainedParams | None
) -> InnerChoice:
    module_name, _, class_name = config.optimizer.partition(":")
    try:
        chosen = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        rule, remedy = "be importable as module:Class", "Check the spelling and the PYTHONPATH"
        raise ConfigError(
            refusal("optimizer", f"{config.optimizer!r} ({error})", rule, remedy)
        ) from error
    if not (isinstance(chosen, type) and issubclass(chosen, Optimizer)):
        rule, remedy = (
            "name a subclass of torch.optim.Optimizer",
            "Give a class such as torch.optim:Adagrad",
        )
        raise ConfigError(refusal("optimizer", repr(config.optimizer), rule, remedy))
    _check_not_distributed_itself(chosen)
    build = partial(
        chosen, **_with_own_pairs(chosen, {**adam_options(config), "momentum": config.momentum})
    )
    return _by_updates(
        Candidate(chosen, build, config.optimizer, device=usable_device(device_type)),
        config,
        params,
    )


def _with_own_pairs(chosen: type[Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Without numbers of ours that are pairs in that class, such as `eps` of Adafactor: the class's
    default holds."""
    defaults = {
        name: parameter.default for name, parameter in inspect.signature(chosen).parameters.items()
    }
    ours = {each.name: each.default for each in fields(DistOptConfig)}
    return {
        name: value
        for name, value in accepted(chosen, options).items()
        if isinstance(defaults.get(name), tuple) == isinstance(value, tuple) or value != ours[name]
    }
