"""Which implementation of Adam: the best that is there, or the one that was asked for by name.

The choice is by device and by a probe of the real symbol, and says why. On CUDA it is torch's fused
kernel, which is given divisor and non-finite flag as tensors, so that the CPU never waits for a
step ([Note: deferred check] in deferred.py); those of apex, TransformerEngine and DeepSpeed are
taken by name. All compute the same: weight decay is decoupled on every device (Loshchilov & Hutter,
"Decoupled Weight Decay Regularization", 2019), as apex's FusedAdam does by default; the Megatron
forks of 2023 silently use L2 decay off CUDA.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from megatron_distopt.config import LOW_PRECISION, DistOptConfig
from megatron_distopt.device import CPU
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.optimizer import blocked_adam
from megatron_distopt.optimizer.accelerator import CUDA, find_accelerator, has_torch_fused
from megatron_distopt.optimizer.inner import Build, Groups, InnerChoice
from megatron_distopt.optimizer.low_precision.low_precision_adam import LowPrecisionAdam
from megatron_distopt.optimizer.low_precision.low_precision_tensor import Precision

#: Sources that can update what is on the host. They keep the same state; those of other packages do
#: not.
_ON_HOST = ("torch_fused", "torch_foreach")
#: Values of `adam` with which state may be in low precision; others keep fp32 state only.
_LOW_PRECISION_FROM = ("auto", "torch_fused", "torch_foreach")


@dataclass(frozen=True)
class _AdamSource:
    """One implementation of Adam."""

    # why it cannot be used on a device type, or None where it can
    missing: Callable[[str], str | None]
    build: Callable[..., Optimizer]  # from param groups and config
    # why it would first have to be compiled, which is done only for one that is asked for by name
    must_compile: Callable[[], str | None] = lambda: None


def choose_adam(config: DistOptConfig, device_type: str) -> InnerChoice:
    """The best one that is there; the last one of every list, torch's for-each AdamW, runs
    everywhere.

    Raises:
        ConfigError: one was asked for by name, and is not there.
    """
    if config.adam != "auto":
        missing = _ADAMS[config.adam].missing(device_type)
        if missing is not None:
            rule, remedy = (
                "be usable when it is asked for by name",
                "Install it, or write adam='auto'",
            )
            raise ConfigError(refusal(f"adam {config.adam!r}", missing, rule, remedy))
        return _chosen(config.adam, config, ("asked for by name",))
    passed_over: list[str] = []
    *better, last = _PREFERENCES.get(device_type, _PREFERENCE_ELSEWHERE)
    for name in better:
        reason = _ADAMS[name].missing(device_type) or _ADAMS[name].must_compile()
        if config.offload_fraction and name not in _ON_HOST:
            reason = "has no state on the host"
        if reason is None:
            return _chosen(name, config, tuple(passed_over))
        passed_over.append(f"not {name}: {reason}")
    return _chosen(last, config, tuple(passed_over))


def _chosen(name: str, config: DistOptConfig, why: tuple[str, ...]) -> InnerChoice:
    build_there = (
        adam_on_host(config, for_each=name == "torch_foreach") if name in _ON_HOST else None
    )
    return InnerChoice(name, partial(_ADAMS[name].build, config=config), why, on_host=build_there)


def adam_on_host(
    config: DistOptConfig, options: Mapping[str, Any] | None = None, *, for_each: bool = False
) -> Build:
    """Builds torch's Adam for the fp32 state of the host."""
    given = (
        {**adam_options(config), "decoupled": config.is_decoupled}
        if options is None
        else dict(options)
    )
    is_decoupled = given.pop("decoupled")
    if for_each or not has_torch_fused(CPU):
        return partial(
            torch.optim.AdamW if is_decoupled else torch.optim.Adam, **given, foreach=True
        )
    return partial(blocked_adam.AdamW if is_decoupled else blocked_adam.Adam, **given, fused=True)


def low_precision_adam(
    config: DistOptConfig, device_type: str, options: Mapping[str, Any] | None = None
) -> Build:
    """Builds Adam for state in the precision that a config asks for.

    Raises:
        ConfigError: another Adam was asked for by name, or one that is not there; or, from the
            function that is returned, a param group asks for what this one does not do.
    """
    if config.adam not in _LOW_PRECISION_FROM:
        got, rule = (
            f"{config.adam!r} for state in low precision",
            f"be one of {', '.join(_LOW_PRECISION_FROM)}",
        )
        raise ConfigError(
            refusal(
                "adam", got, rule, "Write adam='auto', or leave the dtypes of the state at float32"
            )
        )
    given = (
        {**adam_options(config), "decoupled": config.is_decoupled}
        if options is None
        else dict(options)
    )

    def build(groups: Groups) -> Optimizer:
        _check_groups(groups, LOW_PRECISION, is_decoupled=given["decoupled"])
        return LowPrecisionAdam(
            groups, **given, precision=Precision.of(config), device_type=device_type
        )

    return build


def _needs_cuda(device_type: str) -> str | None:
    return None if device_type == CUDA else f"has no kernels for {device_type}"


def _missing_symbol(module: str, symbol: str) -> str | None:
    """Imports the module, which may raise any exception: some packages check the machine when they
    are imported."""
    try:
        return None if hasattr(import_module(module), symbol) else f"{module} has no {symbol}"
    except ModuleNotFoundError as error:
        return f"not installed ({error})"
    except Exception as error:  # noqa: BLE001 - becomes the reason why it is passed over
        return f"installed, but its import fails ({error})"


def _is_installed(package: str) -> bool:
    """True also for a module without a spec that was put into sys.modules."""
    try:
        return find_spec(package) is not None
    except ValueError:
        return package in sys.modules


def _missing_apex(device_type: str) -> str | None:
    """NVIDIA apex is not on PyPI; the project of that name there is another one and is told apart
    by its folders."""
    if "apex" in sys.modules:
        folders = list(getattr(sys.modules["apex"], "__path__", []))
    else:
        spec = find_spec("apex")
        folders = [] if spec is None else list(spec.submodule_search_locations or [])
    if folders and not any((Path(folder) / "optimizers").is_dir() for folder in folders):
        remedy = "pip uninstall apex, then build NVIDIA apex from its sources"
        return (
            "the installed 'apex' is not NVIDIA's but an unrelated project of that name from PyPI; "
            f"{remedy}"
        )
    missing = _needs_cuda(device_type) or _missing_symbol("apex.optimizers", "FusedAdam")
    return missing or (
        None if _is_installed("amp_C") else "built without its CUDA extensions (no amp_C)"
    )


def _missing_deepspeed(device_type: str) -> str | None:
    """Its fused Adam is an op of its accelerator, which may be the CPU too; it reads memory of no
    other device."""
    if not _is_installed("deepspeed"):
        return "not installed"
    named = find_accelerator("deepspeed").device_type
    if device_type != named:
        hint = " (adam='deepspeed_cpu' is its Adam for cpu)" if device_type == CPU else ""
        return f"has kernels for its accelerator {named}, and the params are on {device_type}{hint}"
    return None


def _must_compile_deepspeed() -> str | None:
    missing = _missing_symbol("deepspeed.git_version_info", "installed_ops")
    if missing is not None:
        return missing
    installed = import_module("deepspeed.git_version_info").installed_ops
    return (
        None if installed.get("fused_adam") else "its fused_adam op was not built at install time"
    )


def _missing_deepspeed_cpu(device_type: str) -> str | None:
    if device_type != CPU:
        return f"runs on cpu, not on {device_type}"
    return None if _is_installed("deepspeed") else "not installed"


def _missing_torch_fused(device_type: str) -> str | None:
    return (
        None
        if has_torch_fused(device_type)
        else f"torch {torch.__version__} has no fused AdamW for {device_type}"
    )


def adam_options(config: DistOptConfig) -> dict[str, Any]:
    return {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }


def _build_fused(groups: Groups, config: DistOptConfig) -> Optimizer:
    if all(param.device.type == CPU for group in groups for param in group["params"]):
        return adam_on_host(config)(groups)
    return (torch.optim.AdamW if config.is_decoupled else torch.optim.Adam)(
        groups, **adam_options(config), fused=True
    )


#: Options of torch's Adam in a param group that other implementations ignore, with the value that
#: they behave as.
_TORCH_ONLY = {"amsgrad": False, "maximize": False, "differentiable": False}


def _check_groups(groups: Groups, name: str, *, is_decoupled: bool) -> None:
    wanted = {**_TORCH_ONLY, "decoupled_weight_decay": is_decoupled}
    for number, group in enumerate(groups):
        for option, value in wanted.items():
            if group.get(option, value) != value:
                rule = f"have {option}={value!r}, which is all that adam {name!r} does"
                remedy = "Drop the option, or write adam='torch_fused'"
                raise ConfigError(
                    refusal(f"param group {number}", f"{option}={group[option]!r}", rule, remedy)
                )


def _builder(
    name: str, module: str, symbol: str, mode: str
) -> Callable[[Groups, DistOptConfig], Optimizer]:
    def build(groups: Groups, config: DistOptConfig) -> Optimizer:
        _check_groups(groups, name, is_decoupled=config.is_decoupled)
        adam = getattr(import_module(module), symbol)
        optimizer: Optimizer = adam(groups, **adam_options(config), **{mode: config.is_decoupled})
        return optimizer

    return build


_ADAMS = {
    "transformer_engine": _AdamSource(
        lambda device: (
            _needs_cuda(device)
            or _missing_symbol("transformer_engine.pytorch.optimizers", "FusedAdam")
        ),
        _builder(
            "transformer_engine",
            "transformer_engine.pytorch.optimizers",
            "FusedAdam",
            "adam_w_mode",
        ),
    ),
    "apex": _AdamSource(
        _missing_apex, _builder("apex", "apex.optimizers", "FusedAdam", "adam_w_mode")
    ),
    "deepspeed": _AdamSource(
        _missing_deepspeed,
        _builder("deepspeed", "deepspeed.ops.adam", "FusedAdam", "adam_w_mode"),
        _must_compile_deepspeed,
    ),
    "deepspeed_cpu": _AdamSource(
        _missing_deepspeed_cpu,
        _builder("deepspeed_cpu", "deepspeed.ops.adam", "DeepSpeedCPUAdam", "adamw_mode"),
    ),
    "torch_fused": _AdamSource(_missing_torch_fused, _build_fused),
    "torch_foreach": _AdamSource(
        lambda device: None, lambda groups, config: adam_on_host(config, for_each=True)(groups)
    ),
}

_PREFERENCE_ELSEWHERE = ("deepspeed", "torch_fused", "torch_foreach")
_PREFERENCES: dict[str, tuple[str, ...]] = dict.fromkeys(
    (CUDA, CPU), ("torch_fused", "torch_foreach")
)
