"""Translates the options of megatron-core, and refuses what cannot work before the first
collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from megatron_distopt.buffers import dtype_name
from megatron_distopt.comm import Group
from megatron_distopt.config import OPTIONS, DistOptConfig, NonFinitePolicy
from megatron_distopt.errors import ConfigError, HostError, LayoutError
from megatron_distopt.hosts.megatron.flag import with_hosts_own
from megatron_distopt.hosts.megatron.muon_groups import MUON, MuonRequest
from megatron_distopt.hosts.megatron.naming import names_by_param
from megatron_distopt.hosts.megatron.refused import check_refused
from megatron_distopt.hosts.megatron_core.buffers import layout_of
from megatron_distopt.hosts.megatron_core.core_muon import (
    check_layer_wise,
    check_matrices,
    is_hosts_muon,
    request_from,
)
from megatron_distopt.hosts.megatron_core.facts import HOSTS_OWN, REFUSED, arguments, is_judged
from megatron_distopt.hosts.start import check_dtypes
from megatron_distopt.layout import BufferLayout
from megatron_distopt.optimizer.accelerator import check_devices, find_accelerator
from megatron_distopt.optimizer.choice import choose_inner
from megatron_distopt.optimizer.inner import InnerChoice
from megatron_distopt.optimizer.offload import check_offload
from megatron_distopt.optimizer.owners.whole_params import TrainedParams
from megatron_distopt.options import flag_of, variable_of

#: The host's state dtypes and our names for them. Its fp16 and fp8 are not supported.
_STATE_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class TranslatedConfig:
    options: DistOptConfig  # of this package, with the host's config merged in
    muon: MuonRequest | None = None  # None if the run does not use Muon


def check_parallel_state(is_there: bool) -> None:
    """Refuses the host's flag if the host's process groups are missing."""
    if not is_there:
        raise ConfigError(
            "use_distributed_optimizer is set, but parallel_state is not initialized. Call "
            "parallel_state.initialize_model_parallel(...) before get_megatron_optimizer(...)."
        )


def merge_config(options: DistOptConfig, host: Any) -> TranslatedConfig:
    """Adds the settings of `host`, an OptimizerConfig, to the options of this package."""
    _check_options("config", host)
    check_layer_wise(host)
    # what the host's own DistributedDataParallel decides
    for name, hosts_flag in HOSTS_OWN.items():
        if getattr(options, name) != OPTIONS[name].default:
            raise ConfigError(
                f"{name} is set, but megatron-core decides it by {hosts_flag}. Drop "
                f"{flag_of(name)}."
            )
    hosts = MUON if is_hosts_muon(host) else host.optimizer
    own = {
        "optimizer": options.optimizer if "optimizer" in options.explicit else hosts,
        "lr": host.lr or 0.0,
        "weight_decay": host.weight_decay,
        "betas": (host.adam_beta1, host.adam_beta2),
        "eps": host.adam_eps,
        "momentum": host.sgd_momentum,
        "decay": options.decay if getattr(host, "decoupled_weight_decay", True) else "l2",
        "clip_grad": host.clip_grad,
        "count_zeros": host.log_num_zeros_in_grad,
        "loss_scale": host.loss_scale or ("dynamic" if host.fp16 else None),
        "growth_interval": int(host.loss_scale_window),
        "hysteresis": host.hysteresis,
        "initial_loss_scale": host.initial_loss_scale,
        "min_loss_scale": host.min_loss_scale,
    }
    # With --no-check-for-nan-in-loss-and-grad a training script asks to skip steps. The field of
    # DistributedDataParallelConfig does not show it, because False is its default.
    if (
        "nonfinite" not in options.explicit
        and getattr(arguments(), "check_for_nan_in_loss_and_grad", True) is False
    ):
        own["nonfinite"] = NonFinitePolicy.SKIP.value
    merged = with_hosts_own(options, {**own, **_state_precision(host), **offload_of(host)})
    return TranslatedConfig(merged, request_from(merged, host))


def _state_precision(host: Any) -> dict[str, str]:
    """The options for the precision of the state; empty if the host's config does not set them."""
    if not getattr(host, "use_precision_aware_optimizer", False):
        return {}
    precision = {}
    for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        dtype = getattr(host, name)
        if dtype not in _STATE_DTYPES:
            flag = f"--{name.replace('_', '-')}"
            remedy = f"Write {flag} fp32"
            if name != "main_params_dtype":
                remedy = (
                    f"Write {flag} bf16, or drop --use-precision-aware-optimizer and set "
                    f"{variable_of(name)}=int8"
                )
            found = "fp8" if dtype is torch.uint8 else dtype_name(dtype)
            supported = " or ".join(_STATE_DTYPES.values())
            raise ConfigError(f"{name} is {found}, but it must be {supported}. {remedy}.")
        precision[name] = _STATE_DTYPES[dtype]
    # As in the host, only bf16 params have remainders.
    if (
        precision["main_params_dtype"] == "float32"
        and host.bf16
        and getattr(host, "store_param_remainders", False)
    ):
        precision["main_params_dtype"] = "remainder"
    return precision


def offload_of(host: Any) -> dict[str, float]:
    """The option for state in CPU memory; empty if the host's config does not ask for it.

    Copies are always overlapped, and the kernel is torch's. So `overlap_cpu_optimizer_d2h_h2d` and
    `use_torch_optimizer_for_cpu_offload` have no effect.
    """
    if not getattr(host, "optimizer_cpu_offload", False):
        return {}
    for name in ("pin_cpu_grads", "pin_cpu_params"):
        if not getattr(host, name, True):
            raise ConfigError(
                f"{name} is False, but optimizer_cpu_offload always copies gradients and params "
                f"through pinned memory. Drop --no-{name.replace('_', '-')}."
            )
    return {"offload_fraction": host.optimizer_offload_fraction}


def _check_options(where: str, options: Any) -> None:
    """Refuses the options that facts.py lists as refused, and unknown fields that do not have their
    default."""
    check_refused(options, REFUSED)
    for field in fields(options) if is_dataclass(options) else ():
        default = None if field.default is MISSING else field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        value = getattr(options, field.name)
        if not is_judged(where, field.name) and value != default:
            raise ConfigError(
                f"{field.name} is {value!r} in {type(options).__name__} (default {default!r}), but "
                f"megatron_distopt does not know this field. Leave {field.name} out, or use a "
                "megatron_distopt that supports it."
            )


def check_model(chunks: Sequence[Any], merged: TranslatedConfig) -> InnerChoice | None:
    """Checks everything about the model that one rank can check.

    Returns the inner optimizer, with Muon the Adam for the other params. None on a rank without
    params.
    """
    config, names, choice = merged.options, names_by_param(chunks), None
    devices = {param.device for param in names}
    if devices:
        device = check_devices(devices, find_accelerator(config.accelerator))
        trained = {name: param for param, name in names.items() if param.requires_grad}
        # the groups over which params are sharded do not matter yet
        params = TrainedParams.of(trained, lambda name: Group.of())
        asked = replace(config, optimizer="adam") if merged.muon else config
        if ":" not in asked.optimizer:
            asked = replace(asked, updates=None)  # it describes a class that a framework may build
        choice = choose_inner(asked, device.type, params)
    layouts: list[tuple[BufferLayout, torch.dtype]] = []
    for chunk in chunks:
        _check_ddp(chunk)
        in_chunk = names_by_param([chunk])
        named = {name: param for param, name in in_chunk.items() if param.requires_grad}
        check_dtypes(named, config)
        for name, param in named.items():
            check_refused(param, REFUSED, f" of param {name!r}")
            if param not in chunk.param_to_bucket_group:
                raise LayoutError(
                    f"Param {name!r} is in no buffer of its DistributedDataParallel. Call "
                    "param.requires_grad_(True) before the model is wrapped."
                )
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            layouts.append((layout_of(buffer, names), buffer.param_data.dtype))
    if merged.muon is not None:
        by_name = {name: param for param, name in names.items()}
        check_matrices(by_name, merged.muon, config, chunks)
    if devices:
        check_offload(layouts, config, device)
    return choice


def _check_ddp(chunk: Any) -> None:
    needed = ("ddp_config", "bucket_groups", "param_to_bucket_group")
    if not all(hasattr(chunk, name) for name in needed):
        raise HostError(
            f"A model chunk is a {type(chunk).__name__}, but it must be wrapped in "
            "megatron.core.distributed.DistributedDataParallel. Wrap it, or drop "
            "--use-distributed-optimizer."
        )
    _check_options("ddp_config", chunk.ddp_config)
    check_refused(getattr(chunk, "config", None), REFUSED)
    if not chunk.ddp_config.use_distributed_optimizer:
        raise ConfigError(
            "DistributedDataParallel was built without use_distributed_optimizer. Write "
            "DistributedDataParallelConfig(use_distributed_optimizer=True)."
        )
