"""How our optimizer gets into the forks of 2023: the fork's own `get_megatron_optimizer` runs.

Its param groups, its base optimizer and its grad scaler stay. Only the class that it builds is
ours, and only while it runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from megatron import get_args

from megatron_distopt.comm import Group, raise_together
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import HostError, HostMismatchError
from megatron_distopt.hosts.megatron.flag import is_used
from megatron_distopt.hosts.megatron.protecting import protect_script
from megatron_distopt.hosts.megatron_2023.facts import (
    CLASS,
    CLASS_PARAMETERS,
    FLAG,
    MISSING_IMPORTS,
    PATCH_POINT,
    SCRIPT,
    check_flags,
)
from megatron_distopt.hosts.megatron_2023.optimizer import DistributedOptimizer
from megatron_distopt.patch_points import substituted


def build(original: Callable[..., Any], options: DistOptConfig, *args: Any, **kwargs: Any) -> Any:
    """Collective: `original`, with our class in place of the fork's where its arguments ask for a
    distributed one.

    Raises:
        ConfigError, HostError, LayoutError, RanksDisagreeError: on all ranks, before training.
    """
    host_args = get_args()
    if not is_used(bool(getattr(host_args, FLAG, False))):
        return original(*args, **kwargs)

    def check() -> None:
        check_flags(host_args)
        _check_class(original)

    raise_together(check, Group.of())
    names: dict[str, Any] = {CLASS: partial(_construct, original.__globals__[CLASS], options)}
    # A branch of the fork's function uses modules without importing them.
    names |= {
        name: import_module(name) for name in MISSING_IMPORTS if name not in original.__globals__
    }
    with substituted(original.__globals__, names):
        optimizer = original(*args, **kwargs)
    if not isinstance(optimizer, DistributedOptimizer):
        raise HostError(
            f"{PATCH_POINT} built {type(optimizer).__name__}. It has to build its {CLASS} where "
            f"{FLAG} is set. Use a fork that docs/hosts.md lists."
        )
    protect_script(optimizer, SCRIPT, host_args, optimizer.sharded.device)
    return optimizer


def _check_class(original: Callable[..., Any]) -> None:
    remedy = (
        "Use a fork that docs/hosts.md lists, or call megatron_distopt.DistributedOptimizer in it"
    )
    if CLASS not in original.__globals__:
        raise HostMismatchError(
            f"The module of {PATCH_POINT} has no {CLASS}, which it has to build. {remedy}."
        )
    found = inspect.signature(original.__globals__[CLASS]).parameters
    needed = {name for name, each in found.items() if each.default is inspect.Parameter.empty}
    if not needed <= set(CLASS_PARAMETERS) <= found.keys():
        raise HostMismatchError(
            f"The constructor of {CLASS} takes ({', '.join(found)}). It has to take "
            f"{', '.join(CLASS_PARAMETERS)}. {remedy}."
        )


def _construct(
    host_class: type, options: DistOptConfig, *args: Any, **kwargs: Any
) -> DistributedOptimizer:
    """The fork may give its arguments in any order that its own signature allows, and more than we
    know."""
    signature = inspect.signature(host_class)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()  # the fork may leave out what it has a default for
    given = dict(bound.arguments)
    known = {name: given.pop(name) for name in CLASS_PARAMETERS}
    unlike = {
        name: value for name, value in given.items() if value != signature.parameters[name].default
    }
    if unlike:
        names = ", ".join(f"{name}={value!r}" for name, value in unlike.items())
        raise HostMismatchError(
            f"Unknown arguments of {CLASS}: {names}. It takes {', '.join(CLASS_PARAMETERS)} alone. "
            "Leave the fork's option behind it off."
        )
    return DistributedOptimizer(**known, options=options)
