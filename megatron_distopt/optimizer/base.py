"""Which optimizer does the update: Adam from the best source that is there, SGD, or a class of the user's.

The choice is by device and by a probe of the real symbol, and says why. All sources compute the same: weight decay is
decoupled on every device (Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019), as apex's FusedAdam does
by default; the seed systems silently use L2 decay off CUDA.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.optimizer.accelerator import CPU, CUDA, has_torch_fused

__all__ = ["InnerChoice", "adopt_instance", "choose_inner", "step_divided"]

#: Classes of torch and of its neighbours that look at whole params or call a closure.
_NOT_ELEMENTWISE = (
    "Adafactor",
    "FusedLAMB",
    "FusedLamb",
    "LAMB",
    "LARS",
    "LBFGS",
    "Muon",
    "SOAP",
    "Shampoo",
    "SparseAdam",
)

Groups = list[dict[str, Any]]
Build = Callable[[Groups], Optimizer]


@dataclass(frozen=True)
class InnerChoice:
    """The inner optimizer that was chosen.

    Args:
        name: of the source, e.g. "torch_fused".
        build: from param groups of main params.
        why: how it came to that; one line for each better source that was passed over.
    """

    name: str
    build: Build
    why: tuple[str, ...] = ()


@dataclass(frozen=True)
class _AdamSource:
    """One implementation of Adam.

    Args:
        missing: why it cannot be used on a device type, or None where it can.
        build: from param groups and config.
        must_compile: why it would first have to be compiled, which is done only for one that is asked for by name.
    """

    missing: Callable[[str], str | None]
    build: Callable[..., Optimizer]
    must_compile: Callable[[], str | None] = lambda: None


def choose_inner(config: DistOptConfig, device_type: str) -> InnerChoice:
    """Picks the inner optimizer.

    Args:
        config: `optimizer` and `adam` say what is wanted.
        device_type: of the main params.

    Raises:
        ConfigError: what was asked for by name is not there.
    """
    if config.optimizer == "sgd":
        return InnerChoice("torch_sgd", partial(_build_sgd, config=config, device_type=device_type))
    if config.optimizer != "adam":
        return InnerChoice(config.optimizer, _user_class(config))
    if config.adam != "auto":
        return _named_adam(config, device_type)
    return _best_adam(config, device_type)


def adopt_instance(instance: Optimizer) -> InnerChoice:
    """The user's own optimizer object, whose param groups will hold main params in place of model params.

    Args:
        instance: element-wise (it must not look across the elements of a param), and not yet stepped.

    Raises:
        ConfigError: it was stepped or loaded before, or is known not to be element-wise.
    """
    _check_elementwise(type(instance))
    steps = [state.get("step") for state in instance.state.values()]
    if any(step is None or float(step) != 0 for step in steps):
        remedy = "Build the distributed optimizer before the first step or load_state_dict"
        raise ConfigError(refusal("optimizer", "one that has state", "be new", remedy))
    accepted = inspect.signature(type(instance)).parameters
    options = {name: value for name, value in instance.defaults.items() if name in accepted}
    rebuild = _checked(partial(type(instance), **options), type(instance).__name__)
    return InnerChoice(type(instance).__name__, partial(_retarget, instance, rebuild), ("an instance was given",))


def _retarget(instance: Optimizer, rebuild: Build, groups: Groups) -> Optimizer:
    """Keeps the object, which a scheduler may hold. Some classes fill their state only in the constructor."""
    fresh = rebuild(groups)
    instance.param_groups, instance.state = fresh.param_groups, fresh.state
    return instance


def _checked(build: Build, name: str) -> Build:
    """Builds one of nothing much first, so that a constructor that refuses does so before anything is moved."""
    try:
        build([{"params": [torch.zeros(1)]}])
    except Exception as error:
        rule, remedy = "be buildable from param groups alone", "Give the class defaults for its other arguments"
        raise ConfigError(refusal("optimizer", f"{name} ({error})", rule, remedy)) from error
    return build


def _best_adam(config: DistOptConfig, device_type: str) -> InnerChoice:
    """The last one of every list, torch's for-each AdamW, runs everywhere."""
    passed_over: list[str] = []
    *better, last = _PREFERENCES.get(device_type, _PREFERENCE_ELSEWHERE)
    for name in better:
        reason = _ADAMS[name].missing(device_type) or _ADAMS[name].must_compile()
        if reason is None:
            return InnerChoice(name, partial(_ADAMS[name].build, config=config), tuple(passed_over))
        passed_over.append(f"not {name}: {reason}")
    return InnerChoice(last, partial(_ADAMS[last].build, config=config), tuple(passed_over))


def _named_adam(config: DistOptConfig, device_type: str) -> InnerChoice:
    reason = _ADAMS[config.adam].missing(device_type)
    if reason is not None:
        rule, remedy = "be usable when it is asked for by name", "Install it, or write adam='auto'"
        raise ConfigError(refusal(f"adam {config.adam!r}", reason, rule, remedy))
    return InnerChoice(config.adam, partial(_ADAMS[config.adam].build, config=config), ("asked for by name",))


def step_divided(inner: Optimizer, grads: Sequence[Tensor], divisor: float) -> None:
    """One step of the inner optimizer with every gradient divided by `divisor` (loss scale, average and clip in one).

    torch's fused kernels divide while they read the gradient anyway; for the others it is a pass of its own. Where
    torch's kernels divide they write the quotient back, so `grads` hold it afterwards either way.

    Args:
        grads: the `.grad` of all params of the inner optimizer.
    """
    if divisor == 1.0 or not grads:
        inner.step()
    elif _divides_itself(inner):
        inner.grad_scale = torch.full((), divisor, dtype=torch.float32, device=grads[0].device)  # type: ignore[attr-defined]
        try:
            inner.step()
        finally:
            del inner.grad_scale  # type: ignore[attr-defined]
    else:
        torch._foreach_div_(list(grads), divisor)
        inner.step()


def _divides_itself(inner: Optimizer) -> bool:
    """Whether `inner.grad_scale` is read. Others set torch's flag for it too and mean a keyword of `step`."""
    is_torchs = type(inner).__module__.startswith("torch.optim.")
    return is_torchs and all(group.get("fused") for group in inner.param_groups)


def _needs_cuda(device_type: str) -> str | None:
    return None if device_type == CUDA else f"has no kernels for {device_type}"


def _missing_symbol(module: str, symbol: str) -> str | None:
    """Other people's packages check themselves while they are imported, and raise whatever they like."""
    try:
        return None if hasattr(import_module(module), symbol) else f"{module} has no {symbol}"
    except ModuleNotFoundError as error:
        return f"not installed ({error})"
    except Exception as error:  # noqa: BLE001 - becomes the reason why it is passed over
        return f"installed, but its import fails ({error})"


def _is_installed(package: str) -> bool:
    """Also for a stand-in that somebody put into sys.modules, which has no spec."""
    try:
        return find_spec(package) is not None
    except ValueError:
        return package in sys.modules


def _missing_transformer_engine(device_type: str) -> str | None:
    return _needs_cuda(device_type) or _missing_symbol("transformer_engine.pytorch.optimizers", "FusedAdam")


def _folders(package: str) -> list[str]:
    if package in sys.modules:
        return list(getattr(sys.modules[package], "__path__", []))
    spec = find_spec(package)
    return [] if spec is None else list(spec.submodule_search_locations or [])


def _missing_apex(device_type: str) -> str | None:
    """NVIDIA apex is not on PyPI; the project of that name there is another one and is told apart by its folders."""
    folders = _folders("apex")
    if folders and not any((Path(folder) / "optimizers").is_dir() for folder in folders):
        remedy = "pip uninstall apex, then build NVIDIA apex from its sources"
        return f"the installed 'apex' is not NVIDIA's but an unrelated project of that name from PyPI; {remedy}"
    missing = _needs_cuda(device_type) or _missing_symbol("apex.optimizers", "FusedAdam")
    return missing or (None if _is_installed("amp_C") else "built without its CUDA extensions (no amp_C)")


def _missing_deepspeed(device_type: str) -> str | None:
    if device_type == CPU:
        return "has no fused Adam for cpu (adam='deepspeed_cpu' is its Adam for cpu)"
    return None if _is_installed("deepspeed") else "not installed"


def _must_compile_deepspeed() -> str | None:
    missing = _missing_symbol("deepspeed.git_version_info", "installed_ops")
    if missing is not None:
        return missing
    installed = import_module("deepspeed.git_version_info").installed_ops
    return None if installed.get("fused_adam") else "its fused_adam op was not built at install time"


def _missing_deepspeed_cpu(device_type: str) -> str | None:
    if device_type != CPU:
        return f"runs on cpu, not on {device_type}"
    return None if _is_installed("deepspeed") else "not installed"


def _missing_torch_fused(device_type: str) -> str | None:
    return None if has_torch_fused(device_type) else f"torch {torch.__version__} has no fused AdamW for {device_type}"


def _adam_options(config: DistOptConfig) -> dict[str, Any]:
    return {"lr": config.lr, "betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}


def _build_torch(groups: Groups, config: DistOptConfig, **implementation: Any) -> Optimizer:
    adam = torch.optim.AdamW if config.decoupled_weight_decay else torch.optim.Adam
    return adam(groups, **_adam_options(config), **implementation)


def _builder(module: str, symbol: str, mode: str) -> Callable[[Groups, DistOptConfig], Optimizer]:
    def build(groups: Groups, config: DistOptConfig) -> Optimizer:
        adam = getattr(import_module(module), symbol)
        optimizer: Optimizer = adam(groups, **_adam_options(config), **{mode: config.decoupled_weight_decay})
        return optimizer

    return build


_ADAMS = {
    "transformer_engine": _AdamSource(
        _missing_transformer_engine, _builder("transformer_engine.pytorch.optimizers", "FusedAdam", "adam_w_mode")
    ),
    "apex": _AdamSource(_missing_apex, _builder("apex.optimizers", "FusedAdam", "adam_w_mode")),
    "deepspeed": _AdamSource(
        _missing_deepspeed, _builder("deepspeed.ops.adam", "FusedAdam", "adam_w_mode"), _must_compile_deepspeed
    ),
    "deepspeed_cpu": _AdamSource(
        _missing_deepspeed_cpu, _builder("deepspeed.ops.adam", "DeepSpeedCPUAdam", "adamw_mode")
    ),
    "torch_fused": _AdamSource(_missing_torch_fused, lambda groups, config: _build_torch(groups, config, fused=True)),
    "torch_foreach": _AdamSource(
        lambda device_type: None, lambda groups, config: _build_torch(groups, config, foreach=True)
    ),
}

_PREFERENCE_ELSEWHERE = ("deepspeed", "torch_fused", "torch_foreach")
_PREFERENCES: dict[str, tuple[str, ...]] = {
    CUDA: ("transformer_engine", "apex", "deepspeed", "torch_fused", "torch_foreach"),
    CPU: ("torch_fused", "torch_foreach"),
}


def _build_sgd(groups: Groups, config: DistOptConfig, device_type: str) -> Optimizer:
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "momentum": config.momentum}
    if has_torch_fused(device_type):
        options["fused"] = True  # older releases of torch do not know the option
    return torch.optim.SGD(groups, **options)


def _user_class(config: DistOptConfig) -> Build:
    chosen = _import_optimizer(config.optimizer)
    _check_elementwise(chosen)
    options = {**_adam_options(config), "momentum": config.momentum}
    accepted = inspect.signature(chosen).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values()):
        options = {name: value for name, value in options.items() if name in accepted}
    return _checked(partial(chosen, **options), repr(config.optimizer))


def _import_optimizer(name: str) -> type[Optimizer]:
    module_name, _, class_name = name.partition(":")
    try:
        chosen = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        rule, remedy = "be importable as module:Class", "Check the spelling and the PYTHONPATH"
        raise ConfigError(refusal("optimizer", f"{name!r} ({error})", rule, remedy)) from error
    if not (isinstance(chosen, type) and issubclass(chosen, Optimizer)):
        rule, remedy = "name a subclass of torch.optim.Optimizer", "Give a class such as torch.optim:Adagrad"
        raise ConfigError(refusal("optimizer", repr(name), rule, remedy))
    return chosen


def _check_elementwise(chosen: type[Optimizer]) -> None:
    """A shard is a flat piece of a param: what needs its rows, its norm or several gradients of it cannot work."""
    if chosen.__name__ in _NOT_ELEMENTWISE:
        rule, remedy = "update each element by itself", "Use an element-wise one, such as torch.optim:Adagrad"
        raise ConfigError(refusal("optimizer", chosen.__name__, rule, remedy))
