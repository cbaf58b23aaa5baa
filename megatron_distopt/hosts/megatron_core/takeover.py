"""The constructors of the host's two classes, which build ours wherever a factory calls them.

[Note: the constructor is the patch point] Frameworks copy `get_megatron_optimizer`, call the functions below it, or
wrap it, and import the classes by value. All of them construct `DistributedOptimizer`, so its `__init__` is replaced:
an object of exactly the host's class becomes one of ours before anything is allocated. A subclass that others wrote
cannot become ours and is refused, so the host's own is never built while the package is active.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.optimizer import ChainedOptimizer as HostChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as HostDistributedOptimizer

from megatron_distopt.comm import Group, meet, raise_together
from megatron_distopt.config import DistOptConfig, Switch, config_from_environment, switch_from
from megatron_distopt.errors import ConfigError, HostMismatchError, refusal
from megatron_distopt.hosts.base import is_wanted
from megatron_distopt.hosts.megatron_core.config import Merged, check_model, merge_config
from megatron_distopt.hosts.megatron_core.facts import CHAIN, CLASS, CLASS_MAY_TAKE, CLASS_PARAMETERS
from megatron_distopt.hosts.megatron_core.optimizer import ChainedOptimizer, DistributedOptimizer
from megatron_distopt.hosts.megatron_core.start import start_together

_REMEDY = "Use a megatron-core that docs/hosts.md lists"
#: What `constructing` gives to the constructors that run inside it; the last one counts.
_merged: list[Merged] = []


def is_taken_over() -> bool:
    """Whether the host's constructors build ours."""
    return hasattr(HostDistributedOptimizer.__init__, "replaces")


def take_over(options: DistOptConfig) -> Callable[[], None]:
    """Replaces both constructors, and returns the undo.

    Args:
        options: of the installation; variables and the host's config say the others.

    Raises:
        HostMismatchError: the class differs from what is supported, or other code has changed it.
    """
    if is_taken_over():
        return lambda: None
    check_class()
    before = HostDistributedOptimizer.__init__, HostChainedOptimizer.__init__
    ours = _constructor(before[0], options), _chain_constructor(before[1])
    HostDistributedOptimizer.__init__, HostChainedOptimizer.__init__ = ours

    def undo() -> None:
        now = HostDistributedOptimizer.__init__, HostChainedOptimizer.__init__
        for name, found, expected in zip((CLASS, CHAIN), now, ours, strict=True):
            if found not in (expected, *before):
                got, remedy = "replaced by other code since", "Undo that replacement first"
                raise HostMismatchError(refusal(f"{name}.__init__", got, "still be megatron_distopt's", remedy))
        HostDistributedOptimizer.__init__, HostChainedOptimizer.__init__ = before

    return undo


@contextmanager
def taken_over(options: DistOptConfig) -> Iterator[None]:
    """Replaces both constructors for a while; nothing where they are replaced already."""
    undo = take_over(options)
    try:
        yield
    finally:
        undo()


@contextmanager
def constructing(merged: Merged) -> Iterator[None]:
    """Gives constructors options that were merged and checked on all ranks already."""
    _merged.append(merged)
    try:
        yield
    finally:
        _merged.pop()


def check_class() -> None:
    """Checks the constructor's parameters, and that no method that ours takes the place of was changed by other code.

    Raises:
        HostMismatchError
    """
    found = tuple(inspect.signature(HostDistributedOptimizer.__init__).parameters)[1:]
    if tuple(name for name in found if name not in CLASS_MAY_TAKE) != CLASS_PARAMETERS:
        rule = f"be ({', '.join(CLASS_PARAMETERS)})"
        raise HostMismatchError(refusal(f"constructor of {CLASS}", f"({', '.join(found)})", rule, _REMEDY))
    for name, method in vars(HostDistributedOptimizer).items():
        owner = getattr(method, "__globals__", {}).get("__name__", "megatron.core")
        if owner.split(".")[0] not in ("torch", "megatron", "megatron_distopt") and _is_replaced_by_ours(name):
            rule = "be the host's own: ours takes its place, and the change would be lost"
            raise HostMismatchError(refusal(f"{CLASS}.{name}", f"replaced by {owner}", rule, "Switch that patch off"))


def _is_replaced_by_ours(name: str) -> bool:
    mro = DistributedOptimizer.__mro__
    return any(name in vars(each) for each in mro[: mro.index(HostDistributedOptimizer)])


def _constructor(original: Callable[..., None], options: DistOptConfig) -> Callable[..., None]:
    @functools.wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        if not is_wanted(True):
            original(self, *args, **kwargs)
            return
        if type(self) is not HostDistributedOptimizer:
            got = f"a subclass of {CLASS} ({type(self).__module__}.{type(self).__qualname__})"
            remedy = "Build the host's own class, or set MEGATRON_DISTOPT=0"
            raise ConfigError(
                refusal("distributed optimizer", got, "be the class that megatron_distopt replaces", remedy)
            )
        call = inspect.signature(original).bind(self, *args, **kwargs).arguments
        merged = _merged[-1] if _merged else _merge(options, call)
        self.__class__ = DistributedOptimizer
        self.__init__(*args, merged=merged, **kwargs)

    construct.replaces = original  # type: ignore[attr-defined]
    return construct


def _merge(options: DistOptConfig, call: dict[str, Any]) -> Merged:
    """Collective over ranks that hold the same params: those construct together whoever calls."""

    def merge() -> Merged:
        merged = merge_config(config_from_environment(os.environ, options), call["config"])
        check_model(call["model_chunks"], merged)
        return merged

    data = Group.of(call["data_parallel_group"])
    meet(data)
    return raise_together(merge, data)


def _chain_constructor(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def construct(self: Any, chained_optimizers: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        ours = [each for each in chained_optimizers if isinstance(each, DistributedOptimizer)]
        _check_chain(type(self), chained_optimizers, ours)
        original(self, chained_optimizers, *args, **kwargs)
        if ours:
            self.__class__ = ChainedOptimizer
            start_together(ours)

    construct.replaces = original  # type: ignore[attr-defined]
    return construct


def _check_chain(kind: type[Any], chained: Sequence[Any], ours: Sequence[Any]) -> None:
    if ours and (len(ours) != len(chained) or kind is not HostChainedOptimizer):
        others = sorted({type(each).__name__ for each in chained if each not in ours}) or [kind.__name__]
        got = f"chained with {', '.join(others)}"
        rule, remedy = "be alone in its chain", "Set MEGATRON_DISTOPT=0, or use adam or sgd for all params"
        raise ConfigError(refusal("distributed optimizer", got, rule, remedy))
    if not ours and kind is HostChainedOptimizer and switch_from(os.environ) is Switch.REQUIRE:
        is_wanted(False)
