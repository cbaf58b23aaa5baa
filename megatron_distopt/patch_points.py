"""The attributes of a host that are replaced, and their replacements while the package is active.

Each host's facts.py lists its patch points; plugin/install.py and the adapters act on them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import zip_longest
from types import ModuleType
from typing import Any

from megatron_distopt.errors import HostMismatchError, UnknownHostError

REMEDY = "Use a Megatron that docs/hosts.md lists"
OTHER = "Remove the other patch, or install megatron_distopt before it"


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
        """The host's own function, even if it is replaced already. Checks its signature."""
        try:
            module = import_module(self.module)
        except ImportError as error:
            raise UnknownHostError(
                f"{self.module} cannot be imported ({error}). Start in the folder of your "
                "Megatron, and install what the import does not find."
            ) from error
        if not hasattr(module, self.attribute):
            raise HostMismatchError(self.missing)
        found = getattr(module, self.attribute)
        return found.original if isinstance(found, Replacement) else self.checked(found)

    @property
    def current(self) -> Any:
        """The object that is there now; None if the module is not loaded or does not have it."""
        return getattr(sys.modules.get(self.module), self.attribute, None)

    @property
    def is_replaced(self) -> bool:
        return isinstance(self.current, Replacement)

    def checked(self, found: Any) -> Callable[..., Any]:
        """Returns `found`. Raises if it is not the function that this patch point expects."""
        if not inspect.isfunction(found) or found.__module__ != self.module:
            owner = getattr(found, "__module__", None) or type(found).__name__
            raise HostMismatchError(
                f"{self} was replaced by a function of {owner}, but the host's own is needed. "
                f"{OTHER}."
            )
        if refusal := self.differs(tuple(inspect.signature(found).parameters)):
            raise HostMismatchError(refusal)
        return found

    @property
    def missing(self) -> str:
        """The error for a host without it."""
        return f"{self} is missing. {REMEDY}."

    def differs(self, parameters: tuple[str, ...], where: str = "") -> str | None:
        """The error for a function with these parameters; None if they are as expected."""
        pairs = zip_longest(self.parameters, parameters[: len(self.parameters)], fillvalue="")
        if all(found in known.split("|") for known, found in pairs):
            return None
        return (
            f"{self}{where} takes ({', '.join(parameters)}), but its signature must start with "
            f"({', '.join(self.parameters)}). {REMEDY}."
        )

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


#: Repairs of the host that are in force, which the block at the start of a run lists.
repairs: list[object] = []


class Undos(ExitStack):
    """Restores what was replaced. If other code has replaced any of it again, it raises and
    restores nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._checks: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, ours: object) -> None:
        """Assigns to an attribute of a module or a class of the host."""
        before = getattr(owner, name)

        def check() -> None:
            if getattr(owner, name) is not ours:
                raise HostMismatchError(
                    f"Other code has replaced {owner.__name__}.{name} after megatron_distopt did. "
                    "Undo that replacement first."
                )

        self._checks.append(check)
        setattr(owner, name, ours)
        self.callback(setattr, owner, name, before)

    def undo(self) -> None:
        """Restores the originals. A second call does nothing.

        Raises:
            HostMismatchError: if other code has replaced one again. Nothing is restored then.
        """
        for check in self._checks:
            check()
        self._checks.clear()
        self.close()


#: Everything that an installation, and the runs after it, have replaced in this process.
in_force = Undos()

#: A patch point, and a function that takes the original and returns the replacement.
Patch = tuple[PatchPoint, Callable[[Any], Any]]


@contextmanager
def substituted(host: dict[str, Any], ours: Mapping[str, Any]) -> Iterator[None]:
    """Replaces names of a module, or attributes of an object, while the context is active."""
    before = {name: host[name] for name in ours if name in host}
    host.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del host[name]
        host.update(before)


def rebind(old: object, new: object) -> None:
    """Replaces an object with another, in every loaded module and under every name."""
    for module in [module for module in sys.modules.values() if isinstance(module, ModuleType)]:
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)


def apply(patches: Sequence[Patch], undos: Undos) -> None:
    """Checks every patch point, makes every replacement, and only then puts them in.

    The undo restores the originals, even in modules that imported a replacement by value.
    """
    originals = [point.find() for point, _ in patches]
    ours = [replace(original) for (_, replace), original in zip(patches, originals, strict=True)]
    for (point, _), new in zip(patches, ours, strict=True):
        put_in(point, new, undos)


def put_in(point: PatchPoint, new: object, undos: Undos) -> None:
    """Replaces the present object of a patch point, which may be an earlier replacement."""
    before = point.current  # may be an earlier replacement
    undos.replace(sys.modules[point.module], point.attribute, new)
    rebind(before, new)
    undos.callback(rebind, new, before)
