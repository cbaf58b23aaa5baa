"""What of a host we replace, as data: each host's facts.py lists its patch points, plugin/patcher.py acts on them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megatron_distopt.errors import HostMismatchError, UnknownHostError, refusal

__all__ = ["PatchPoint", "Replacement"]


@dataclass(frozen=True, eq=False)
class Replacement:
    """What stands in a patch point while the package is active.

    Args:
        original: the host's own function.
        ours: takes the same arguments.
    """

    original: Callable[..., Any]
    ours: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Ours."""
        return self.ours(*args, **kwargs)


@dataclass(frozen=True)
class PatchPoint:
    """One attribute of a host that we replace.

    Args:
        module: where it is defined.
        attribute: its name there, and in the modules that import it by value.
        parameters: the names that its signature must start with.
    """

    module: str
    attribute: str
    parameters: tuple[str, ...]

    def find(self) -> Callable[..., Any]:
        """The host's own function, also behind ours, after making sure that it is that and looks as expected.

        Raises:
            UnknownHostError: the module cannot be imported.
            HostMismatchError: the attribute is missing, has another signature, or was replaced by somebody.
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
        """What stands there now, the host's or ours; None where the module is not loaded or lacks it."""
        return getattr(sys.modules.get(self.module), self.attribute, None)

    @property
    def is_replaced(self) -> bool:
        """Whether ours stands there already; asks only a module that is loaded."""
        return isinstance(self.stands, Replacement)

    def checked(self, found: Any) -> Callable[..., Any]:
        """`found`, where it is what this patch point expects.

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
