"""The options of param groups: which of them were changed, in which form kernels take them, and as
texts that ranks compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Integral, Number, Real
from typing import Any

import torch

from megatron_distopt.device import CPU

#: Options of torch's param groups that choose a kernel and not a result.
IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
#: Types of options that cannot change in place.
FIXED = (type(None), Number, str)
#: Options of torch's classes that are one number, and those that are on or off.
NUMBERS = ("lr", "initial_lr", "eps", "weight_decay", "momentum", "dampening")
_SWITCHES = ("amsgrad", "maximize", "nesterov")
#: Keys of a param group that are not options.
_PARAMS = ("params", "param_names")
_NOT_FOLLOWED = frozenset((*_PARAMS, *IMPLEMENTATION))
_MISSING = object()

Options = Mapping[str, Any]


def option_values(group: Options) -> dict[str, Any]:
    """A param group without its params."""
    return _without(group, _PARAMS)


def without_implementation(group: Options) -> dict[str, Any]:
    """A param group without the options that choose a kernel."""
    return _without(group, IMPLEMENTATION)


def _without(group: Options, keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in keys}


def changed_options(group: Options, before: Options) -> dict[str, Any]:
    """Options of a param group that are other objects than before, so they were written. Leaves out
    those that choose a kernel."""
    changed = dict[str, Any]()
    for key, value in group.items():
        if value is not before.get(key, _MISSING) and key not in _NOT_FOLLOWED:
            changed[key] = value
    return changed


def python_number(value: Any) -> Any:
    """Converts a number of any type to Python's own type; returns other values unchanged."""
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return value


def for_kernels(options: Options) -> dict[str, Any]:
    """Options in the types that torch's fused kernels need. Other kernels also take fractions, and
    numbers for switches."""
    taken = dict(options)
    for key, value in options.items():
        if key in NUMBERS:
            taken[key] = python_number(value)
        elif key in _SWITCHES:
            taken[key] = bool(value)
        elif key == "betas" and isinstance(value, tuple):
            taken[key] = tuple(map(python_number, value))
    return taken


def option_text(value: Any, *, waits: bool = True) -> str:
    """A text of an option's value that is equal on all ranks with equal values. For an object it is
    only the class, because its text may contain an address.

    If it must not wait, a tensor of a device is identified by its object and version.
    """
    text = partial(option_text, waits=waits)
    if isinstance(value, Mapping):
        members = ", ".join(f"{key}: {text(member)}" for key, member in value.items())
        return f"{{{members}}}"
    if isinstance(value, (list, tuple)):
        members = ", ".join(map(text, value))
        return f"[{members}]"
    if isinstance(value, (set, frozenset)):
        return f"set {sorted(map(text, value))}"
    if torch.is_tensor(value):
        if waits or value.device.type == CPU:
            return f"tensor {value.tolist()}"
        return f"tensor {(id(value), value._version)}"
    if isinstance(value, FIXED):
        return repr(value)
    if hasattr(value, "tolist"):
        return f"array {value.tolist()}"
    return type(value).__name__
