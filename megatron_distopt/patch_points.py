"""The attributes of a host that are replaced, as data, and what stands in them while the package is
active.

Each host's facts.py lists its patch points; plugin/install.py and the adapters act on them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import zip_longest
from types import ModuleType
from typing import Any

from megatron_distopt.errors import HostMismatchError, UnknownHostError

Undo = Callable[[], None]
REMEDY = "Use a Megatron that docs/hosts.md lists"
OTHER = "Take the other patcher out, or install megatron_distopt before it"


@dataclass(frozen=True, eq=False)
class Replacement:
    """The object in a patch point while the package is active."""

    original: Callable[..., Any]  # the host's own function
    ours: Callable[..., Any]  # takes the same arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.ours(*args, **kwargs)


@dataclass(frozen=True)
class PatchPoint:
    """One attribute of a host that is replaced."""

    module: str  # where it is defined
    attribute: str  # its name there, and in the modules that import it by value
    parameters: tuple[str, ...]  # the names that its signature must start with, "a|b" for either

    def find(self) -> Callable[..., Any]:
        """The host's own function, also where it is replaced already, after checking its
        signature."""
        try:
            module = import_module(self.module)
        except ImportError as error:
            remedy = "Start in the folder of your Megatron, and mend what its import misses"
            raise UnknownHostError(
                f"{self.module} cannot be imported ({error}). {remedy}."
            ) from error
        if not hasattr(module, self.attribute):
            raise HostMismatchError(self.missing)
        found = getattr(module, self.attribute)
        return found.original if isinstance(found, Replacement) else self.checked(found)

    @property
    def current(self) -> Any:
        """The object that is there now; None where the module is not loaded or lacks it."""
        return getattr(sys.modules.get(self.module), self.attribute, None)

    @property
    def is_replaced(self) -> bool:
        return isinstance(self.current, Replacement)

    def checked(self, found: Any) -> Callable[..., Any]:
        """Returns `found`, where it is the function that this patch point expects."""
        if not inspect.isfunction(found) or found.__module__ != self.module:
            owner = getattr(found, "__module__", None) or type(found).__name__
            raise HostMismatchError(
                f"{self} is not the host's own function but {owner}'s. {OTHER}."
            )
        if refusal := self.differs(tuple(inspect.signature(found).parameters)):
            raise HostMismatchError(refusal)
        return found

    @property
    def missing(self) -> str:
        """The refusal of a host without it."""
        return f"{self} is missing. {REMEDY}."

    def differs(self, parameters: tuple[str, ...], where: str = "") -> str | None:
        """The refusal of a function with these parameters; None where they are as expected."""
        pairs = zip_longest(self.parameters, parameters[: len(self.parameters)], fillvalue="")
        if all(found in known.split("|") for known, found in pairs):
            return None
        rule = f"its signature must start with ({', '.join(self.parameters)})"
        return f"{self}{where} takes ({', '.join(parameters)}); {rule}. {REMEDY}."

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


#: What ends the replacements in the script that trains.
script_undos: list[Undo] = []
#: Repairs of the host that are in force, which the block at the start of a run lists.
repairs: list[object] = []


def leave_script() -> None:
    """Puts the functions of the script back."""
    while script_undos:
        script_undos[-1]()
        script_undos.pop()


def replaced_since(place: object) -> HostMismatchError:
    """The refusal of an undo where other code has replaced what is in the place."""
    return HostMismatchError(
        f"{place} was replaced by other code since. Undo that replacement first."
    )


#: A patch point, and a function from what is there to what takes its place.
Patch = tuple[PatchPoint, Callable[[Any], Any]]


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
            del host[name]
        host.update(before)


def rebind(olds: Sequence[Any], news: Sequence[Any]) -> None:
    """Replaces objects by others, in every loaded module and under every name."""
    new_of = {id(old): new for old, new in zip(olds, news, strict=False)}
    for module in [module for module in sys.modules.values() if isinstance(module, ModuleType)]:
        if new_of.keys().isdisjoint(map(id, vars(module).values())):
            continue  # thousands of modules are loaded, and this is fast
        for name, value in list(vars(module).items()):
            if id(value) in new_of:
                setattr(module, name, new_of[id(value)])


def apply(patches: Sequence[Patch]) -> Undo:
    """Checks every patch point, makes every replacement, and only then puts them in; returns the
    undo.

    That puts the originals back, also into modules that imported a replacement by value since. It
    refuses, and changes nothing, where other code has replaced the replacement.
    """
    originals = [point.find() for point, _ in patches]
    before = [point.current for point, _ in patches]  # may be an earlier replacement
    ours = [replace(original) for (_, replace), original in zip(patches, originals, strict=True)]
    rebind(before, ours)

    def undo() -> None:
        for (point, _), replacement in zip(patches, ours, strict=False):
            if point.module in sys.modules and point.current is not replacement:
                raise replaced_since(point)
        rebind(ours, before)
        ours.clear()  # a second call finds nothing to do

    return undo
