"""Replaces attributes of a host: checks all patch points first, changes nothing on a mismatch, and returns the undo.

Training modules import the factory *by value*, so replacing it where it is defined is not enough: every loaded module
that holds the same object under the same name is rebound too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megatron_distopt.errors import HostMismatchError, refusal
from megatron_distopt.hosts.patch_points import PatchPoint

__all__ = ["Patch", "Undo", "apply"]

Undo = Callable[[], None]


@dataclass(frozen=True)
class Patch:
    """A patch point and what takes its place.

    Args:
        patch_point: what is replaced.
        replace: from the original to the replacement.
    """

    patch_point: PatchPoint
    replace: Callable[[Any], Any]


@dataclass(frozen=True)
class _Applied:
    """A patch point with the object that was there, which may be an earlier replacement, and the new one."""

    patch_point: PatchPoint
    before: Any
    ours: Any


def apply(patches: Sequence[Patch]) -> Undo:
    """Checks every patch point, makes every replacement, and only then puts them in.

    Returns:
        A function that puts the originals back, also into modules that imported a replacement by value since. It
        refuses, and changes nothing, where other code has replaced the replacement.

    Raises:
        UnknownHostError: a module cannot be imported.
        HostMismatchError: an attribute is missing, has another signature, or was replaced by other code.
    """
    originals = [patch.patch_point.find() for patch in patches]
    pairs = zip(patches, originals, strict=True)
    applied = [
        _Applied(patch.patch_point, patch.patch_point.stands, patch.replace(original)) for patch, original in pairs
    ]
    _rebind([(each.before, each.ours) for each in applied])
    return lambda: _undo(applied)


def _undo(applied: list[_Applied]) -> None:
    for each in applied:
        home = sys.modules.get(each.patch_point.module)
        if home is not None and getattr(home, each.patch_point.attribute, None) is not each.ours:
            got, remedy = "replaced by other code since", "Undo that replacement first"
            raise HostMismatchError(refusal(str(each.patch_point), got, "still be megatron_distopt's", remedy))
    _rebind([(each.ours, each.before) for each in applied])
    applied.clear()  # a second call finds nothing to do


def _rebind(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Replaces the first object of each pair by the second, in every loaded module and under every name."""
    new_of = {id(old): new for old, new in pairs}
    for module in [module for module in sys.modules.values() if isinstance(module, ModuleType)]:
        if new_of.keys().isdisjoint(map(id, vars(module).values())):
            continue  # thousands of modules are loaded, and this is fast
        for name, value in list(vars(module).items()):
            if id(value) in new_of:
                setattr(module, name, new_of[id(value)])
