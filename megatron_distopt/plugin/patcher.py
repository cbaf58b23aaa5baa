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


def apply(patches: Sequence[Patch]) -> Undo:
    """Checks every seam, then replaces all of them.

    Raises:
        UnknownHostError: a module cannot be imported.
        SeamMismatchError: an attribute is missing, has another signature, or was replaced by somebody else.
    """
    originals = [_check(patch.seam) for patch in patches]
    rebound: list[tuple[ModuleType, str, Any]] = []
    for patch, original in zip(patches, originals, strict=True):
        ours = patch.replace(original)
        for module in _holders(patch.seam.attribute, original):
            rebound.append((module, patch.seam.attribute, original))
            setattr(module, patch.seam.attribute, ours)
    return lambda: _restore(rebound)


def _check(seam: Seam) -> Any:
    try:
        module = import_module(seam.module)
    except ImportError as error:
        rule, remedy = "be importable", "Install megatron-core, or start in the folder of your Megatron"
        raise UnknownHostError(refusal(f"host module {seam.module}", error, rule, remedy)) from error
    original = getattr(module, seam.attribute, None)
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


def _holders(attribute: str, original: Any) -> list[ModuleType]:
    modules = [module for module in sys.modules.values() if isinstance(module, ModuleType)]
    return [module for module in modules if vars(module).get(attribute) is original]


def _restore(rebound: Sequence[tuple[ModuleType, str, Any]]) -> None:
    for module, attribute, original in rebound:
        setattr(module, attribute, original)
