"""The attributes of a host that are replaced, as data, and what stands in them while the package is active.

Each host's facts.py lists its patch points; plugin/install.py and the adapters act on them.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megatron_distopt.config import Switch, switch_from
from megatron_distopt.errors import ConfigError, HostMismatchError, UnknownHostError, refusal


@dataclass(frozen=True, eq=False)
class Replacement:
    """The object in a patch point while the package is active.

    Args:
        original: the host's own function.
        ours: takes the same arguments.
    """

    original: Callable[..., Any]
    ours: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the replacement."""
        return self.ours(*args, **kwargs)


@dataclass(frozen=True)
class PatchPoint:
    """One attribute of a host that is replaced.

    Args:
        module: where it is defined.
        attribute: its name there, and in the modules that import it by value.
        parameters: the names that its signature must start with.
    """

    module: str
    attribute: str
    parameters: tuple[str, ...]

    def find(self) -> Callable[..., Any]:
        """Returns the host's own function, also where it is replaced already, after checking its signature.

        Raises:
            UnknownHostError: the module cannot be imported.
            HostMismatchError: the attribute is missing, has another signature, or was replaced by other code.
        """
        try:
            module = import_module(self.module)
        except ImportError as error:
            rule, remedy = "be importable", "Start in the folder of your Megatron, and mend what its import misses"
            raise UnknownHostError(refusal(f"host module {self.module}", error, rule, remedy)) from error
        if not hasattr(module, self.attribute):
            raise HostMismatchError(refusal(str(self), "missing", "exist", "Use a Megatron that docs/hosts.md lists"))
        found = getattr(module, self.attribute)
        return found.original if isinstance(found, Replacement) else self.checked(found)

    @property
    def stands(self) -> Any:
        """The object that is there now; None where the module is not loaded or lacks it."""
        return getattr(sys.modules.get(self.module), self.attribute, None)

    @property
    def is_replaced(self) -> bool:
        """Whether it is replaced already; looks only at a loaded module."""
        return isinstance(self.stands, Replacement)

    def checked(self, found: Any) -> Callable[..., Any]:
        """Returns `found`, where it is the function that this patch point expects.

        Raises:
            HostMismatchError
        """
        if not inspect.isfunction(found) or found.__module__ != self.module:
            owner = getattr(found, "__module__", None) or type(found).__name__
            got = f"not the host's own function but {owner}'s"
            remedy = "Take the other patcher out, or install megatron_distopt before it"
            raise HostMismatchError(refusal(str(self), got, "be untouched", remedy))
        names = tuple(inspect.signature(found).parameters)
        if names[: len(self.parameters)] != self.parameters:
            rule = f"start with ({', '.join(self.parameters)})"
            remedy = "Use a Megatron that docs/hosts.md lists"
            raise HostMismatchError(refusal(f"signature of {self}", f"({', '.join(names)})", rule, remedy))
        return found

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


def is_wanted(has_flag: bool) -> bool:
    """Whether this package's optimizer is to be built.

    Args:
        has_flag: whether the host was started with its flag.

    Raises:
        ConfigError: it is not, and MEGATRON_DISTOPT=require.
    """
    switch = switch_from(os.environ)
    if switch is Switch.REQUIRE and not has_flag:
        rule, remedy = "be used when MEGATRON_DISTOPT=require", "Add --use-distributed-optimizer, or unset the variable"
        raise ConfigError(refusal("run", "without use_distributed_optimizer", rule, remedy))
    return has_flag and switch is not Switch.OFF


@contextmanager
def substituted(function: Callable[..., Any], ours: Mapping[str, Any]) -> Iterator[None]:
    """Replaces names in the module of `function` while the context is active."""
    host = function.__globals__
    before = {name: host[name] for name in ours if name in host}
    host.update(ours)
    try:
        yield
    finally:
        for name in ours:
            if name in before:
                host[name] = before[name]
            else:
                del host[name]
