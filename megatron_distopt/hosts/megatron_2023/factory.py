"""How our optimizer gets into the fork's `get_megatron_optimizer`.

The fork's own function runs: its param groups, its base optimizer, its grad scaler. Only the class that it builds is
ours, and only while it runs.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from megatron import get_args

from megatron_distopt.comm import Group, raise_together
from megatron_distopt.config import DistOptConfig, config_from_arguments, config_from_environment
from megatron_distopt.errors import HostError, HostMismatchError
from megatron_distopt.hosts.base import is_used
from megatron_distopt.hosts.megatron_2023.forks import (
    CLASS,
    CLASS_PARAMETERS,
    FLAG,
    MISSING_IMPORTS,
    PATCH_POINT,
    check_flags,
)
from megatron_distopt.hosts.megatron_2023.optimizer import DistributedOptimizer
from megatron_distopt.hosts.patch_points import Replacement, substituted


def replacement(original: Callable[..., Any], options: DistOptConfig) -> Replacement:
    """What takes the place of the fork's function when the package is installed."""
    return Replacement(original, partial(build, original, options))


def build(original: Callable[..., Any], options: DistOptConfig, *args: Any, **kwargs: Any) -> Any:
    """Collective: `original`, with our class in place of the fork's where its arguments ask for a distributed one.

    Raises:
        ConfigError, HostError, LayoutError, RanksDisagreeError: on all ranks, before training.
    """
    host_args = get_args()
    if not is_used(bool(getattr(host_args, FLAG, False))):
        return original(*args, **kwargs)

    def checked() -> DistOptConfig:
        check_flags(host_args)
        _check_class(original)
        return config_from_environment(os.environ, config_from_arguments(host_args, options))

    config = raise_together(checked, Group.of())
    with substituted(original, _names_for(original, config)):
        optimizer = original(*args, **kwargs)
    if not isinstance(optimizer, DistributedOptimizer):
        raise HostError(
            f"{PATCH_POINT} built {type(optimizer).__name__}. It has to build its {CLASS} where {FLAG} is set. Use a "
            "fork that docs/hosts.md lists."
        )
    return optimizer


def _check_class(original: Callable[..., Any]) -> None:
    remedy = "Use a fork that docs/hosts.md lists, or call megatron_distopt.DistributedOptimizer in it"
    if CLASS not in original.__globals__:
        raise HostMismatchError(f"The module of {PATCH_POINT} has no {CLASS}, which it has to build. {remedy}.")
    found = inspect.signature(original.__globals__[CLASS].__init__).parameters
    missing = [name for name in CLASS_PARAMETERS if name not in found]
    unknown = [
        name
        for name, parameter in list(found.items())[1:]
        if name not in CLASS_PARAMETERS and parameter.default is inspect.Parameter.empty
    ]
    if missing or unknown:
        raise HostMismatchError(
            f"The constructor of {CLASS} takes ({', '.join(list(found)[1:])}). It has to take "
            f"{', '.join(CLASS_PARAMETERS)}. {remedy}."
        )


def _names_for(original: Callable[..., Any], config: DistOptConfig) -> Mapping[str, Any]:
    """Our class; and modules that a branch of the fork's function uses without importing them."""
    host_class = original.__globals__[CLASS]
    forgotten = [name for name in MISSING_IMPORTS if name not in original.__globals__]
    return {CLASS: partial(_construct, host_class, config), **{name: import_module(name) for name in forgotten}}


def _construct(host_class: type, config: DistOptConfig, *args: Any, **kwargs: Any) -> DistributedOptimizer:
    """The fork may give its arguments in any order that its own signature allows, and more than we know."""
    signature = inspect.signature(host_class.__init__)  # type: ignore[misc]
    bound = signature.bind(None, *args, **kwargs)
    bound.apply_defaults()  # the fork may leave out what it has a default for
    given = dict(bound.arguments)
    known = {name: given.pop(name) for name in CLASS_PARAMETERS}
    given.pop(next(iter(signature.parameters)))  # self
    unlike = {name: value for name, value in given.items() if value != signature.parameters[name].default}
    if unlike:
        names = ", ".join(f"{name}={value!r}" for name, value in unlike.items())
        raise HostMismatchError(
            f"Unknown arguments of {CLASS}: {names}. It takes {', '.join(CLASS_PARAMETERS)} alone. Leave the fork's "
            "option behind it off."
        )
    return DistributedOptimizer(**known, options=config)
