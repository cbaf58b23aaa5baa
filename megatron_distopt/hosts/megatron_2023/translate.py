"""Translates the options and the base optimizer of a fork, and refuses what cannot work before
anything is moved."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_distopt.config import DistOptConfig
from megatron_distopt.device import CPU
from megatron_distopt.errors import ConfigError, HostError, LayoutError
from megatron_distopt.hosts.megatron.flag import with_hosts_own
from megatron_distopt.hosts.megatron.inner_optimizers import is_adam
from megatron_distopt.hosts.start import check_dtypes
from megatron_distopt.hosts.watches.watched_params import check_not_shared, check_own_memory
from megatron_distopt.optimizer.accelerator import check_devices, find_accelerator


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


def with_host_flags(
    config: DistOptConfig, base: Optimizer, args: object, device_type: str
) -> DistOptConfig:
    """Adds what the fork's base optimizer and flags say about Adam and where it runs. Options that
    were given explicitly win.

    --cpu-optimizer means all state on the host. If the params are on the CPU, it names an
    implementation.
    """
    own: dict[str, Any] = {}
    on_host = getattr(args, "cpu_optimizer", False)
    if on_host and device_type != CPU and "offload_fraction" not in config.explicit:
        own["offload_fraction"] = 1.0
    if not getattr(base, "adam_w_mode", True) and "decay" not in config.explicit:
        own["decay"] = "l2"
    if config.adam == "auto" and is_adam(base):
        is_offloaded = own.get("offload_fraction", config.offload_fraction)
        if getattr(args, "ds_fused_adam", False):
            own["adam"] = "deepspeed"
        elif on_host and not getattr(args, "cpu_torch_adam", False) and not is_offloaded:
            own["adam"] = "deepspeed_cpu"
    return dataclasses.replace(config, **own)


def check_model(
    chunks: Sequence[Any], named: Mapping[str, Parameter], config: DistOptConfig
) -> torch.device:
    """Checks everything about the model that one rank can check, and returns the device of all
    params."""
    for chunk in chunks:
        if not hasattr(chunk, "_grad_buffers"):
            raise HostError(
                f"A model chunk is a {type(chunk).__module__}.{type(chunk).__name__}, but it must "
                "be wrapped in the fork's local DistributedDataParallel. Write --DDP-impl local."
            )
        if not chunk._grad_buffers:
            raise ConfigError(
                "A model chunk has no contiguous buffers, which the distributed optimizer needs. "
                "Drop --no-contiguous-buffers-in-local-ddp."
            )
        if not getattr(chunk, "_grad_buffer_param_index_map", None):
            raise HostError(
                "A model chunk has no index map (_grad_buffer_param_index_map), which says where "
                "each param lies in its grad buffers. Use a fork of Megatron-LM 23.04 or later."
            )
    if not named:
        raise LayoutError(
            "The model has no trainable param on this rank, but it needs at least 1. Unfreeze one "
            "with param.requires_grad_(True)."
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
                f"Param {name!r} is in no grad buffer of the fork's DistributedDataParallel. Call "
                "param.requires_grad_(True) before the model is wrapped."
            )
    return check_devices(
        {param.device for param in named.values()}, find_accelerator(config.accelerator)
    )
