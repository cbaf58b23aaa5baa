"""Replaces attributes of code that is not ours: all seams are checked first, nothing is changed on a mismatch, and
whatever is changed comes with its undo.

Training modules import the factory *by value*, so replacing it where it is defined is not enough: every loaded module
that holds the same object under the same name is rebound too.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from megatron_distopt.errors import SeamMismatchError, UnknownHostError, refusal
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
    """A seam with the object that was there and the one that is there now."""

    seam: Seam
    original: Any
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
    originals = [_check(patch.seam) for patch in patches]
    pairs = zip(patches, originals, strict=True)
    applied = [_Applied(patch.seam, original, patch.replace(original)) for patch, original in pairs]
    for each in applied:
        _rebind(each.seam.attribute, each.original, each.ours)
    return lambda: _undo(applied)


def _undo(applied: Sequence[_Applied]) -> None:
    for each in applied:
        if getattr(sys.modules.get(each.seam.module), each.seam.attribute, None) is not each.ours:
            got, remedy = "replaced by somebody else since", "Undo that replacement first"
            raise SeamMismatchError(refusal(str(each.seam), got, "still be megatron_distopt's", remedy))
    for each in applied:
        _rebind(each.seam.attribute, each.ours, each.original)


def _rebind(attribute: str, old: Any, new: Any) -> None:
    """In every loaded module that holds `old` under that name."""
    modules = [module for module in sys.modules.values() if isinstance(module, ModuleType)]
    for module in modules:
        if vars(module).get(attribute) is old:
            setattr(module, attribute, new)


def _check(seam: Seam) -> Any:
    try:
        module = import_module(seam.module)
    except ImportError as error:
        rule, remedy = "be importable", "Install megatron-core, or start in the folder of your Megatron"
        raise UnknownHostError(refusal(f"host module {seam.module}", error, rule, remedy)) from error
    if not hasattr(module, seam.attribute):
        raise SeamMismatchError(refusal(str(seam), "missing", "exist", "Use a Megatron that docs/hosts.md lists"))
    original = getattr(module, seam.attribute)
    if not inspect.isfunction(original) or original.__module__ != seam.module:
        owner = getattr(original, "__module__", None) or type(original).__name__
        remedy = "Take the other patcher out, or install megatron_distopt before it"
        raise SeamMismatchError(
            refusal(str(seam), f"not the host's own function but {owner}'s", "be untouched", remedy)
        )
    names = tuple(inspect.signature(original).parameters)
    if names[: len(seam.parameters)] != seam.parameters:
        rule = f"start with ({', '.join(seam.parameters)})"
        remedy = "Use a Megatron that docs/hosts.md lists"
        raise SeamMismatchError(refusal(f"signature of {seam}", f"({', '.join(names)})", rule, remedy))
    return original
