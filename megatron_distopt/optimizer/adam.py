"""Chooses the implementation of Adam: the best one that is installed, or the one that the option
`adam` names.

The choice depends on the device and on whether the class can be imported, and its reasons are
logged. On CUDA it is torch's fused kernel. That takes divisor and non-finite flag as tensors, so
the CPU never waits for a step ([Note: deferred check] in deferred.py). The implementations of apex,
TransformerEngine and DeepSpeed have to be named. All compute the same: weight decay is decoupled on
every device (Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019), as in apex's
FusedAdam by default. The Megatron forks of 2023 silently use L2 decay on devices other than CUDA.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.optim import Optimizer

from megatron_distopt.config import LOW_PRECISION, DistOptConfig
from megatron_distopt.device import CPU
from megatron_distopt.errors import ConfigError
from megatron_distopt.optimizer.accelerator import (
    CUDA,
    find_accelerator,
    has_dtype,
    has_torch_fused,
)
from megatron_distopt.optimizer.inner import Build, Groups, InnerChoice
from megatron_distopt.optimizer.low_precision.low_precision_adam import LowPrecisionAdam
from megatron_distopt.optimizer.low_precision.low_precision_tensor import Precision

_FUSED, _FOREACH = "torch_fused", "torch_foreach"
#: Values of `adam` with which state may be in low precision; the others have only fp32 state.
_LOW_PRECISION_FROM = ("auto", _FUSED, _FOREACH)
_DEEPSPEED = "deepspeed"
#: Options of torch's Adam in a param group that other implementations ignore, with the value as
#: which they compute.
_TORCH_ONLY = {"amsgrad": False, "maximize": False, "differentiable": False}


@dataclass(frozen=True)
class _AdamClass:
    """An implementation of Adam in a package other than torch."""

    module: str
    name: str
    decouples: str  # the keyword for decoupled weight decay
    runs_on: str | None  # type of device; None for that of DeepSpeed's accelerator


_ABOUT_APEX = (
    " Build NVIDIA apex from its sources: the 'apex' of PyPI is an unrelated project, so run pip "
    "uninstall apex if you have that."
)
_DEEPSPEED_MODULE = "deepspeed.ops.adam"
_TE_MODULE = "transformer_engine.pytorch.optimizers"
_OF_OTHERS = {
    "transformer_engine": _AdamClass(_TE_MODULE, "FusedAdam", "adam_w_mode", CUDA),
    "apex": _AdamClass("apex.optimizers", "FusedAdam", "adam_w_mode", CUDA),
    _DEEPSPEED: _AdamClass(_DEEPSPEED_MODULE, "FusedAdam", "adam_w_mode", None),
    "deepspeed_cpu": _AdamClass(_DEEPSPEED_MODULE, "DeepSpeedCPUAdam", "adamw_mode", CPU),
}


def choose_adam(config: DistOptConfig, device_type: str) -> InnerChoice:
    """The best implementation that is installed. The last choice, torch's for-each AdamW, runs on
    every device.

    Raises:
        ConfigError: if `config.adam` names an implementation that cannot be used.
    """
    if config.adam != "auto":
        missing = _missing(config.adam, device_type)
        if missing is not None:
            about = _ABOUT_APEX if config.adam == "apex" else ""
            raise ConfigError(
                f"adam is {config.adam!r}, which cannot be used: {missing}. Install it, or write "
                f"adam='auto'.{about}"
            )
        return _chosen(config.adam, config, ("named by the option adam",))
    passed_over: list[str] = []
    names = (_FUSED,) if device_type in (CUDA, CPU) else (_DEEPSPEED, _FUSED)
    for name in names:
        reason = _missing(name, device_type)
        if name == _DEEPSPEED and reason is None:
            reason = "cannot offload state" if config.offload_fraction else _not_compiled()
        if reason is None:
            return _chosen(name, config, tuple(passed_over))
        passed_over.append(f"not {name}: {reason}")
    return _chosen(_FOREACH, config, tuple(passed_over))


def _chosen(name: str, config: DistOptConfig, why: tuple[str, ...]) -> InnerChoice:
    options, is_decoupled = adam_options(config), config.is_decoupled
    if name in _OF_OTHERS:
        of_others = partial(_build_of_others, name=name, options=options, is_decoupled=is_decoupled)
        return InnerChoice(name, of_others, why)
    build = _torch_adam(options, is_decoupled=is_decoupled, is_fused=name == _FUSED)
    is_fused = name == _FUSED and has_torch_fused(CPU)
    on_host = _torch_adam(options, is_decoupled=is_decoupled, is_fused=is_fused)
    return InnerChoice(name, build, why, on_host=on_host)


def adam_options(config: DistOptConfig) -> dict[str, Any]:
    return {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }


def _torch_adam(options: Mapping[str, Any], *, is_decoupled: bool, is_fused: bool) -> Build:
    """Returns a builder of torch's Adam, with its fused or for-each kernel."""
    implementation: dict[str, Any] = {"fused": True} if is_fused else {"foreach": True}
    kind = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    return partial(kind, **options, **implementation)


def choose_low_precision(
    config: DistOptConfig,
    device_type: str,
    options: Mapping[str, Any],
    *,
    is_decoupled: bool,
    why: tuple[str, ...],
    defaults: tuple[str, ...] = (),
) -> InnerChoice:
    """Adam with state in the precision that a config asks for.

    Raises:
        ConfigError: if the option `adam` names another implementation, or if the device has no
            fp16. The build raises it if a param group has an option that this one does not support.
    """
    if config.adam not in _LOW_PRECISION_FROM:
        raise ConfigError(
            f"adam is {config.adam!r}, but state in low precision needs one of "
            f"{', '.join(_LOW_PRECISION_FROM)}. Write adam='auto', or leave the dtypes of the "
            "state at float32."
        )
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        # Codes of 8 bits are made of fp16 numbers, see [Note: block codes] in block_codes.py.
        if getattr(config, name) == "int8" and not has_dtype(device_type, torch.float16):
            raise ConfigError(
                f"{name} is 'int8', which needs float16, but the {device_type} device has no "
                f"float16. Write {name}='bfloat16'."
            )

    def build(groups: Groups) -> Optimizer:
        _check_groups(groups, LOW_PRECISION, is_decoupled=is_decoupled)
        precision = Precision.of(config)
        return LowPrecisionAdam(
            groups, **options, decoupled=is_decoupled, precision=precision, device_type=device_type
        )

    # State in CPU memory is fp32.
    on_host = _torch_adam(options, is_decoupled=is_decoupled, is_fused=has_torch_fused(CPU))
    return InnerChoice(LOW_PRECISION, build, why, defaults, on_host)


def _build_of_others(
    groups: Groups, *, name: str, options: Mapping[str, Any], is_decoupled: bool
) -> Optimizer:
    _check_groups(groups, name, is_decoupled=is_decoupled)
    known = _OF_OTHERS[name]
    adam = getattr(import_module(known.module), known.name)
    optimizer: Optimizer = adam(groups, **options, **{known.decouples: is_decoupled})
    return optimizer


def _check_groups(groups: Groups, name: str, *, is_decoupled: bool) -> None:
    wanted = {**_TORCH_ONLY, "decoupled_weight_decay": is_decoupled}
    for number, group in enumerate(groups):
        for option, value in wanted.items():
            if group.get(option, value) != value:
                raise ConfigError(
                    f"Param group {number} has {option}={group[option]!r}, but adam {name!r} "
                    f"supports only {option}={value!r}. Drop the option, or write "
                    "adam='torch_fused'."
                )


def _missing(name: str, device_type: str) -> str | None:
    """Why an implementation cannot be used on a device; None if it can."""
    if name not in _OF_OTHERS:
        if name == _FOREACH or has_torch_fused(device_type):
            return None
        return f"torch {torch.__version__} has no fused AdamW for {device_type}"
    known = _OF_OTHERS[name]
    if name == _DEEPSPEED and not _is_installed("deepspeed"):
        return "not installed"
    # DeepSpeed's fused Adam is an op of its accelerator and reads only memory of that device.
    runs_on = known.runs_on or find_accelerator("deepspeed").device_type
    if device_type != runs_on:
        hint = " (adam='deepspeed_cpu' is DeepSpeed's Adam for cpu)" if device_type == CPU else ""
        return f"it runs on {runs_on}, but the params are on {device_type}{hint}"
    if known.module == _DEEPSPEED_MODULE:  # whose import may compile
        return None if _is_installed("deepspeed") else "not installed"
    missing = _missing_symbol(known.module, known.name)
    if name == "apex" and missing is None and not _is_installed("amp_C"):
        return "it was built without its CUDA extensions (there is no amp_C)"
    return missing


def _missing_symbol(module: str, symbol: str) -> str | None:
    """Why a symbol of a module cannot be used; None if it can. The import may raise any exception,
    because some packages check the machine when they are imported."""
    try:
        return None if hasattr(import_module(module), symbol) else f"{module} has no {symbol}"
    except ModuleNotFoundError as error:
        return f"not installed ({error})"
    except Exception as error:  # noqa: BLE001 - it becomes the reason why the class is not used
        return f"it is installed, but its import fails ({error})"


def _is_installed(package: str) -> bool:
    """Whether a package is installed. A module without a spec in sys.modules counts as well."""
    try:
        return find_spec(package) is not None
    except ValueError:
        return package in sys.modules


def _not_compiled() -> str | None:
    """Why DeepSpeed's Adam would first have to be compiled, which is done only if the option `adam`
    names it; None if it would not."""
    missing = _missing_symbol("deepspeed.git_version_info", "installed_ops")
    if missing is None:
        installed = import_module("deepspeed.git_version_info").installed_ops
        if not installed.get("fused_adam"):
            missing = "its fused_adam op was not built at install time"
    return missing
