"""Replaces attributes of code that is not ours: all seams are checked first, nothing is changed on a mismatch, and
whatever is changed comes with its undo.

Training modules import the factory *by value*, so replacing it where it is defined is not enough: every loaded module
that holds the same object under the same name is rebound too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megatron_distopt.errors import SeamMismatchError, refusal
from megatron_distopt.hosts.seams import Seam

__all__ = ["Patch", "Undo", "apply"]

Undo = Callable[[], None]


@dataclass(frozen=True)
class Patch:
    """A seam and what takes its place.

    Args:
        seam: what is replaced.
        replace: from the original to the replacement.
    """

    seam: Seam
    replace: Callable[[Any], Any]


@dataclass(frozen=True)
class _Applied:
    """A seam with the object that was there, which may be an earlier replacement of ours, and the one there now."""

    seam: Seam
    before: Any
    ours: Any


def apply(patches: Sequence[Patch]) -> Undo:
    """Checks every seam, makes every replacement, and only then puts them in.

    Returns:
        What puts the originals back, also into modules that imported a replacement by value since. It refuses, and
        changes nothing, where somebody has replaced ours meanwhile.

    Raises:
        UnknownHostError: a module cannot be imported.
        SeamMismatchError: an attribute is missing, has another signature, or was replaced by somebody else.
    """
    originals = [patch.seam.find() for patch in patches]
    pairs = zip(patches, originals, strict=True)
    applied = [_Applied(patch.seam, patch.seam.stands, patch.replace(original)) for patch, original in pairs]
    for each in applied:
        _rebind(each.before, each.ours)
    return lambda: _undo(applied)


def _undo(applied: list[_Applied]) -> None:
    for each in applied:
        home = sys.modules.get(each.seam.module)
        if home is not None and getattr(home, each.seam.attribute, None) is not each.ours:
            got, remedy = "replaced by somebody else since", "Undo that replacement first"
            raise SeamMismatchError(refusal(str(each.seam), got, "still be megatron_distopt's", remedy))
    for each in reversed(applied):
        _rebind(each.ours, each.before)
    applied.clear()  # a second call finds nothing to do


def _rebind(old: Any, new: Any) -> None:
    """In every loaded module, under whatever name it holds `old`."""
    modules = [module for module in sys.modules.values() if isinstance(module, ModuleType)]
    for module in modules:
        names = [name for name, value in vars(module).items() if value is old]
        for name in names:
            setattr(module, name, new)
