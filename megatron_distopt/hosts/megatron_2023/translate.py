"""Translates the options and the base optimizer of a fork, and refuses what cannot work before
anything is moved."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_distopt.compatibility import Feature, check_compatible
from megatron_distopt.config import DistOptConfig
from megatron_distopt.device import CPU
from megatron_distopt.errors import ConfigError, HostError, LayoutError
from megatron_distopt.hosts.between_steps import check_not_shared, check_own_memory
from megatron_distopt.hosts.megatron.flag import with_hosts_own
from megatron_distopt.hosts.megatron.inner_optimizers import (
    groups_of,
    is_adam,
    is_sgd,
    unserved_options,
)
from megatron_distopt.hosts.start import check_dtypes
from megatron_distopt.optimizer.accelerator import check_devices, find_accelerator
from megatron_distopt.optimizer.choice import adopt_instance, choose_inner
from megatron_distopt.optimizer.inner import InnerChoice
from megatron_distopt.optimizer.owners.whole_params import TrainedParams


@dataclass(frozen=True)
class Inner:
    """The inner optimizer that takes the place of the fork's base optimizer."""

    choice: InnerChoice  # what is built
    groups: Sequence[Mapping[str, Any]]  # the fork's param groups for it, with model params
    # the same with all that the fork's own inner optimizer keeps in them
    host_groups: Sequence[Mapping[str, Any]]


def merge_config(
    options: DistOptConfig, base: Optimizer, clip_grad: float, count_zeros: bool, grad_scaler: Any
) -> DistOptConfig:
    """Adds the fork's settings, and the hyperparameters of its base optimizer, to the options of
    this package."""
    defaults = base.defaults
    own = {
        "lr": float(defaults.get("lr") or 0.0),
        "weight_decay": float(defaults.get("weight_decay", 0.0)),
        "betas": tuple(defaults.get("betas", options.betas)),
        "eps": float(defaults.get("eps", options.eps)),
        "momentum": float(defaults.get("momentum", 0.0)),
        "clip_grad": float(clip_grad or 0.0),
        "count_zeros": bool(count_zeros),
        "loss_scale": None if grad_scaler is None else "dynamic",
    }
    return with_hosts_own(options, own)


def with_host_state(config: DistOptConfig, args: object, device_type: str) -> DistOptConfig:
    """Takes --cpu-optimizer of a fork for all state on the host, unless the option for it is given.

    On the CPU the flag names an implementation instead, see `_as_named_by_host`.
    """
    is_asked_for = getattr(args, "cpu_optimizer", False) and device_type != CPU
    if not is_asked_for or "offload_fraction" in config.explicit:
        return config
    return dataclasses.replace(config, offload_fraction=1.0)


def choose_for(
    base: Optimizer,
    config: DistOptConfig,
    args: object,
    device_type: str,
    params: TrainedParams | None = None,
) -> Inner:
    """The inner optimizer: the best implementation of what the fork built, or the very object that
    it built.

    A class that updates whole params needs `params`.
    """
    named = _as_named_by_host(config, args)
    # Options of the base optimizer that the class which replaces it does not have.
    unserved = unserved_options(base) if is_adam(base) or is_sgd(base) else {}
    if is_sgd(base) and getattr(base, "wd_after_momentum", False):
        unserved["wd_after_momentum"] = True
    is_asked_for = "optimizer" in config.explicit or named.adam != "auto"
    if is_asked_for and unserved:
        shown = ", ".join(f"{name}={value!r}" for name, value in unserved.items())
        raise ConfigError(
            f"The fork's {type(base).__name__} has {shown}, which has to be off where "
            "--distopt-optimizer or an implementation of Adam is named. Drop one of the two."
        )
    if not unserved and ("optimizer" in config.explicit or is_adam(base)):
        is_decoupled = getattr(base, "adam_w_mode", True)
        if not is_decoupled and "decay" not in config.explicit:
            named = dataclasses.replace(named, decay="l2")
        chosen = choose_inner(named, device_type, params)
        groups = groups_of(base, is_for_other_class=chosen.updates_whole_params)
    elif not unserved and is_sgd(base):
        chosen = choose_inner(dataclasses.replace(config, optimizer="sgd"), device_type)
        groups = groups_of(base)
    elif config.adam != "auto":
        raise ConfigError(
            f"The option adam is {config.adam} with the fork's own {type(base).__name__}, and "
            "takes the place of an Adam of torch, apex, DeepSpeed or TransformerEngine alone. "
            "Write --distopt-optimizer adam to replace it, or drop --distopt-adam."
        )
    else:
        chosen, groups = adopt_instance(base, params, config), base.param_groups
    if chosen.updates_whole_params:
        check_compatible(config, {Feature.WHOLE_PARAMS: chosen.name})
    return Inner(chosen, groups, groups if chosen.updates_whole_params else base.param_groups)


def _as_named_by_host(config: DistOptConfig, args: object) -> DistOptConfig:
    """Takes over the source of Adam that a flag of the fork names, unless the option `adam` is
    given."""
    if config.adam != "auto":
        return config
    if getattr(args, "ds_fused_adam", False):
        return dataclasses.replace(config, adam="deepspeed")
    wants_deepspeed = getattr(args, "cpu_optimizer", False) and not getattr(
        args, "cpu_torch_adam", False
    )
    if wants_deepspeed and not config.offload_fraction:
        return dataclasses.replace(config, adam="deepspeed_cpu")
    return config


def check_model(
    chunks: Sequence[Any], named: Mapping[str, Parameter], config: DistOptConfig
) -> torch.device:
    """Checks everything about the model that this rank can see by itself, and returns the device of
    all params."""
    for chunk in chunks:
        if not hasattr(chunk, "_grad_buffers"):
            raise HostError(
                f"A model chunk is a {type(chunk).__module__}.{type(chunk).__name__}. It has to be "
                "wrapped by the fork's local DistributedDataParallel. Write --DDP-impl local."
            )
        if not chunk._grad_buffers:
            raise ConfigError(
                "A model chunk is without contiguous buffers, which are sharded. Drop "
                "--no-contiguous-buffers-in-local-ddp."
            )
        if not getattr(chunk, "_grad_buffer_param_index_map", None):
            raise HostError(
                "The grad buffers of a model chunk have no index map, which says where each param "
                "lies in them. Use a fork of Megatron-LM 23.04 or later."
            )
    if not named:
        raise LayoutError(
            "The model has no trainable param on this rank, and needs at least 1. Call "
            "param.requires_grad_(True)."
        )
    check_dtypes(named, config)
    check_own_memory(named)
    check_not_shared(named.items())
    index_maps = [
        spans for chunk in chunks for spans in chunk._grad_buffer_param_index_map.values()
    ]
    in_buffers = {param for spans in index_maps for param in spans}
    for name, param in named.items():
        if param not in in_buffers:
            raise LayoutError(
                f"The param {name!r} lies in no grad buffer of the fork's DistributedDataParallel. "
                "Unfreeze params before wrapping, by param.requires_grad_(True)."
            )
    return check_devices(
        {param.device for param in named.values()}, find_accelerator(config.accelerator)
    )
