"""How our optimizer gets into the forks of 2023: the fork's own `get_megatron_optimizer` runs.

Its param groups, base optimizer and grad scaler are used. Only the class that it builds is replaced
by ours, and only while it runs.
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
    """Collective: calls `original`. If the fork's flag is set, it builds our class in place of the
    fork's.

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
    # The fork's function uses modules that it forgot to import.
    names |= {
        name: import_module(name) for name in MISSING_IMPORTS if name not in original.__globals__
    }
    with substituted(original.__globals__, names):
        optimizer = original(*args, **kwargs)
    if not isinstance(optimizer, DistributedOptimizer):
        raise HostError(
            f"{PATCH_POINT} built a {type(optimizer).__name__}, but with {FLAG} it must build its "
            f"{CLASS}. Use a fork that docs/hosts.md lists."
        )
    protect_script(optimizer, SCRIPT, host_args, optimizer.sharded.device)
    return optimizer


def _check_class(original: Callable[..., Any]) -> None:
    remedy = (
        "Use a fork that docs/hosts.md lists, or call megatron_distopt.DistributedOptimizer in it"
    )
    if CLASS not in original.__globals__:
        raise HostMismatchError(
            f"The module of {PATCH_POINT} has no class {CLASS}, which is to be replaced. {remedy}."
        )
    found = inspect.signature(original.__globals__[CLASS]).parameters
    needed = {name for name, each in found.items() if each.default is inspect.Parameter.empty}
    if not needed <= set(CLASS_PARAMETERS) <= found.keys():
        raise HostMismatchError(
            f"The constructor of {CLASS} takes ({', '.join(found)}), but it must take "
            f"{', '.join(CLASS_PARAMETERS)}. {remedy}."
        )


def _construct(
    host_class: type, options: DistOptConfig, *args: Any, **kwargs: Any
) -> DistributedOptimizer:
    """Builds our class from the arguments that the fork gives to its own. Refuses arguments that we
    do not know, unless they have their default."""
    signature = inspect.signature(host_class)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()  # the fork may leave out arguments that have defaults
    given = dict(bound.arguments)
    known = {name: given.pop(name) for name in CLASS_PARAMETERS}
    unlike = {
        name: value for name, value in given.items() if value != signature.parameters[name].default
    }
    if unlike:
        names = ", ".join(f"{name}={value!r}" for name, value in unlike.items())
        raise HostMismatchError(
            f"The fork builds its {CLASS} with {names}, which megatron_distopt does not know; it "
            f"knows {', '.join(CLASS_PARAMETERS)}. Leave the fork's option for it off."
        )
    return DistributedOptimizer(**known, options=options)
