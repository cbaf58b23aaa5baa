"""An optimizer object that a user gave: what of it a new one over main params gets, and what it keeps itself.

[Note: alike] The object is not used. A new one is built from its defaults, with param groups of main params, and gets
its attributes. Those that refer to the object or to params of the model stay behind: the class has made others for the
new one. If these are of other classes, because the constructor had an argument that the defaults do not name, the
object is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.optimizer.inner import Build, Groups
from megatron_distopt.optimizer.owners.reachable import attributes_of, foreign_kinds, refers_to

#: Methods that a scheduler or we have replaced.
_REPLACED = ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict")


def check_new(instance: Optimizer) -> None:
    """Checks that an optimizer has no state, which would be lost.

    Raises:
        ConfigError
    """
    # A class that fills its state in the constructor has counts there that are zero, if only one for a group.
    steps = [state["step"] for state in instance.state.values() if "step" in state]
    if instance.state and (not steps or any(float(step) != 0 for step in steps)):
        remedy = "Build the distributed optimizer before the first step or load_state_dict"
        rule = "be new: without state, or with a count of zero steps"
        raise ConfigError(refusal("optimizer", "one that has state", rule, remedy))


def build_alike(instance: Optimizer, rebuild: Build) -> Build:
    """Builds what is like an object, see [Note: alike].

    Args:
        instance: stays as it is, and is not referred to.
        rebuild: makes one from its defaults.

    Raises:
        ConfigError: it was built with arguments that its defaults do not name.
    """
    own, bound = _own(instance), _bound(instance)
    _check_rebuilt(instance, bound, rebuild)
    return partial(_build, rebuild, {key: own[key] for key in own if key not in bound}, instance.defaults)


def _build(rebuild: Build, attributes: Mapping[str, Any], defaults: dict[str, Any], groups: Groups) -> Optimizer:
    """A new one. Some classes fill their state only in the constructor."""
    built = rebuild(groups)
    vars(built).update(attributes)
    built.defaults = defaults
    return built


def _own(instance: Optimizer) -> dict[str, Any]:
    """Attributes that the class has given it."""
    return {key: value for key, value in attributes_of(instance).items() if key not in _REPLACED}


def _bound(instance: Optimizer) -> dict[str, Any]:
    """Those that lead to it or to one of its params."""
    targets = [instance, *(param for group in instance.param_groups for param in group["params"])]
    return {key: value for key, value in _own(instance).items() if refers_to(value, targets)}


def _check_rebuilt(instance: Optimizer, bound: Mapping[str, Any], rebuild: Build) -> None:
    if not any(foreign_kinds(value, instance) for value in bound.values()):
        return
    again = rebuild([_small_group(group) for group in instance.param_groups])
    for key, value in bound.items():
        other = attributes_of(again).get(key)
        kinds = {type(value)} - {type(other)} or foreign_kinds(value, instance) - foreign_kinds(other, again)
        if kinds:
            kind = min(kind.__name__ for kind in kinds)
            got, rule = f"{type(instance).__name__} with a {kind} in {key!r}", "be the same if built from its defaults"
            remedy = "Leave that argument of its constructor out"
            raise ConfigError(refusal("optimizer", got, rule, remedy))


def _small_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Its options, and a small param for each number of dimensions."""
    shapes = sorted({(2,) * param.dim() for param in group["params"]})
    options = {key: value for key, value in group.items() if key != "param_names"}
    return {**options, "params": [torch.zeros(shape) for shape in shapes]}


def let_go(instance: Optimizer) -> None:
    """Drops the state of an object, and what else it has of params, once another one is built like it."""
    instance.state.clear()
    for key in _bound(instance):
        delattr(instance, key)
