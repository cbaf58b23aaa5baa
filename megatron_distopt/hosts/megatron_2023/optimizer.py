"""The optimizer of the forks of 2023, and how it gets into the fork's `get_megatron_optimizer`.

The fork's own function runs: its param groups, its base optimizer, its grad scaler. Only the class
that it builds is ours, and only while it runs. That class is a subclass of the fork's own, whose
reductions over tensor- and pipeline-parallel groups it uses, and does not run its constructor,
which knows CUDA tensors by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from megatron import get_args
from torch import Tensor

from megatron_distopt.comm import Group, raise_together
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import HostError, HostMismatchError
from megatron_distopt.hosts.base import is_used
from megatron_distopt.hosts.between_steps import not_copied
from megatron_distopt.hosts.megatron_2023.checkpoint import ForkCheckpoints
from megatron_distopt.hosts.megatron_2023.forks import (
    CLASS,
    CLASS_PARAMETERS,
    FLAG,
    MISSING_IMPORTS,
    PATCH_POINT,
    SCRIPT,
    check_flags,
)
from megatron_distopt.hosts.megatron_2023.step import ForkSteps
from megatron_distopt.hosts.patch_points import Replacement, Undo, leave_script, substituted
from megatron_distopt.hosts.protecting import protect_script


class DistributedOptimizer(ForkSteps, ForkCheckpoints):
    """Collective: the fork's class, with the sharded step inside. Its arguments are those of
    `BuiltOptimizer`."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops `param.grad`, or zeroes it. The fork zeroes its own grad buffers; the others are
        zeroed here.

        Collective where the reduce-scatter overlaps with backward, backward ran and no step
        followed.
        """
        for param in self.start.named.values():
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()
        self.communication.drop()

    def get_loss_scale(self) -> Tensor:
        """fp32 [1]."""
        return self.sharded.loss_scale.scale

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise not_copied("copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise not_copied("pickled")

    def get_model_parallel_group(self) -> None:
        """None: statistics are added up over all ranks."""


def replacement(original: Callable[..., Any], options: DistOptConfig) -> Replacement:
    """What takes the place of the fork's function when the package is installed."""
    return Replacement(original, partial(build, original, options))


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
    with substituted(original, names):
        optimizer = original(*args, **kwargs)
    if not isinstance(optimizer, DistributedOptimizer):
        raise HostError(
            f"{PATCH_POINT} built {type(optimizer).__name__}. It has to build its {CLASS} where "
            f"{FLAG} is set. Use a fork that docs/hosts.md lists."
        )
    protect_script(optimizer, SCRIPT, host_args, optimizer.start.device)
    return optimizer


def take_over(options: DistOptConfig) -> Undo:
    """Replaces nothing; returns the undo of what a run may replace in the fork's script."""
    return leave_script


def _check_class(original: Callable[..., Any]) -> None:
    remedy = (
        "Use a fork that docs/hosts.md lists, or call megatron_distopt.DistributedOptimizer in it"
    )
    if CLASS not in original.__globals__:
        raise HostMismatchError(
            f"The module of {PATCH_POINT} has no {CLASS}, which it has to build. {remedy}."
        )
    found = inspect.signature(original.__globals__[CLASS].__init__).parameters
    needed = {
        name for name, each in list(found.items())[1:] if each.default is inspect.Parameter.empty
    }
    if not needed <= set(CLASS_PARAMETERS) <= found.keys():
        raise HostMismatchError(
            f"The constructor of {CLASS} takes ({', '.join(list(found)[1:])}). It has to take "
            f"{', '.join(CLASS_PARAMETERS)}. {remedy}."
        )


def _construct(
    host_class: type, options: DistOptConfig, *args: Any, **kwargs: Any
) -> DistributedOptimizer:
    """The fork may give its arguments in any order that its own signature allows, and more than we
    know."""
    signature = inspect.signature(host_class.__init__)  # type: ignore[misc]
    bound = signature.bind(None, *args, **kwargs)
    bound.apply_defaults()  # the fork may leave out what it has a default for
    given = dict(bound.arguments)
    known = {name: given.pop(name) for name in CLASS_PARAMETERS}
    given.pop(next(iter(signature.parameters)))  # self
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
