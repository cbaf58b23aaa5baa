"""Replaces an optimizer object that a user gave with a new one over main params.

The new one is built from the object's defaults. Its attributes are copied if they are numbers,
texts, functions or lists of them. The constructor has made all other attributes again, such as
lists of its params. If their types differ from those in the object, the constructor had an argument
that is not among the defaults, and the object is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_distopt.errors import ConfigError
from megatron_distopt.optimizer.inner import Build, Groups
from megatron_distopt.optimizer.inner_options import option_values

#: Attributes that torch itself sets, and methods that a scheduler or we have replaced.
_NOT_OF_CLASS = (
    "state",
    "param_groups",
    "defaults",
    "step",
    "zero_grad",
    "add_param_group",
    "load_state_dict",
    "state_dict",
)
#: Types of attributes that are copied.
_COPIED = {
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    torch.dtype,
    torch.device,
    FunctionType,
    BuiltinFunctionType,
}


def check_new(instance: Optimizer) -> None:
    """Refuses an optimizer with state, because it would be lost."""
    # A class that fills its state in the constructor has counts of zero there.
    states = [state for state in instance.state.values() if state and isinstance(state, Mapping)]
    steps = [state["step"] for state in states if "step" in state]
    if states and (not steps or any(float(step) != 0 for step in steps)):
        kind = type(instance)
        raise ConfigError(
            "The optimizer was stepped or loaded before, and its state would be lost. Build the "
            "distributed optimizer before the first step or load_state_dict. If the constructor "
            f"of {kind.__name__} makes that state, name the class with "
            f"DistOptConfig(optimizer='{kind.__module__}:{kind.__name__}')."
        )


def accepted(chosen: type[Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the constructor takes; all of them if it takes any keyword."""
    parameters = inspect.signature(chosen).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    return {name: value for name, value in options.items() if takes_any or name in parameters}


def build_alike(instance: Optimizer) -> Build:
    """Returns a builder of optimizers like `instance`, from its defaults. It does not change the
    object or refer to it.

    Raises:
        ConfigError: if the object was built with arguments that are not among its defaults.
    """
    kind, own = type(instance), _attributes_of(instance)
    rebuild = partial(kind, **accepted(kind, instance.defaults))
    copied = {name: value for name, value in own.items() if _leaf_types(value) <= _COPIED}
    made_anew = own.keys() - copied.keys()
    if made_anew:
        again = _attributes_of(_rebuilt(instance, rebuild))
        for name in made_anew:
            kinds = _leaf_types(own[name]) ^ _leaf_types(again.get(name))
            if kinds - _COPIED - {Tensor} or type(own[name]) is not type(again.get(name)):
                raise ConfigError(
                    f"The distributed optimizer builds {kind.__name__} again from its defaults, "
                    f"but then its attribute {name!r} holds {_names(again.get(name))} instead of "
                    f"{_names(own[name])}. Leave that argument of its constructor out."
                )
    return partial(_build, rebuild, copied, instance.defaults)


def _rebuilt(instance: Optimizer, rebuild: Build) -> Optimizer:
    """A new optimizer over small params."""
    groups = list[dict[str, Any]]()
    for group in instance.param_groups:
        shapes = {(2,) * param.dim() for param in group["params"]}
        params = [torch.zeros(shape) for shape in sorted(shapes)]
        groups.append({**option_values(group), "params": params})
    try:
        return rebuild(groups)
    except Exception as error:
        name = type(instance).__name__
        raise ConfigError(
            f"{name} must be built again over sharded params, but that fails with its defaults "
            f"({type(error).__name__}: {error}). Use another class, such as torch.optim.AdamW."
        ) from error


def _build(
    rebuild: Build, attributes: Mapping[str, Any], defaults: dict[str, Any], groups: Groups
) -> Optimizer:
    built = rebuild(groups)
    vars(built).update(attributes)
    built.defaults = defaults
    return built


def _attributes_of(instance: Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer that its class has set."""
    return {
        name: value
        for name, value in vars(instance).items()
        if name not in _NOT_OF_CLASS and not name.startswith("_optimizer_")
    }


def _leaf_types(value: Any) -> set[type]:
    """The types of all values in lists and dicts; `Tensor` for a tensor of any class."""
    if isinstance(value, Mapping):
        return {kind for pair in value.items() for part in pair for kind in _leaf_types(part)}
    if isinstance(value, (list, tuple, set, frozenset)):
        return {kind for part in value for kind in _leaf_types(part)}
    return {Tensor} if isinstance(value, Tensor) else {type(value)}


def _names(value: Any) -> str:
    return " and ".join(sorted(kind.__name__ for kind in _leaf_types(value))) or "nothing"
