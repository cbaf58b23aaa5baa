"""`megatron_distopt.install()`: replaces attributes of a host, and puts them back.

All patch points are checked first, and nothing is changed on a mismatch. Training modules import the factory *by
value*, so replacing it where it is defined is not enough: every loaded module that holds the same object is rebound.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_distopt.comm import show_presence
from megatron_distopt.config import DistOptConfig, Switch, config_from_environment, fixes_from, switch_from
from megatron_distopt.errors import ConfigError, HostMismatchError, UnknownHostError, refusal
from megatron_distopt.hosts.detect import Host, find_host, recognise
from megatron_distopt.hosts.fixes import apply_fixes, needed_fixes
from megatron_distopt.hosts.handshake import SWITCHED_OFF
from megatron_distopt.hosts.patch_points import PatchPoint
from megatron_distopt.hosts.source.tree import importable_host
from megatron_distopt.plugin.arguments import parser_with_ours

Undo = Callable[[], None]


@dataclass(frozen=True, eq=False)
class Installation:
    """An installation of the package, which can be undone.

    Args:
        config: the options in force, as far as no flag says more.
        is_active: False where MEGATRON_DISTOPT=0 keeps the host as it is.
    """

    config: DistOptConfig
    is_active: bool
    _undo: Undo = field(repr=False)

    def undo(self) -> None:
        """Puts every attribute of the host back; a second call does nothing."""
        if self in _installed:
            self._undo()
            _installed.remove(self)


#: The installation of this process, if there is one.
_installed: list[Installation] = []


def install(config: DistOptConfig | None = None) -> Installation:
    """Makes the host's `get_megatron_optimizer` build our optimizer where its flag asks for a distributed one.

    Call it before the training module is imported; modules that already imported the function are rebound. A second
    call with the same options returns the first installation.

    Args:
        config: options that the host has no flag for. They stand before flags and MEGATRON_DISTOPT_* variables, which
            say the others.

    Raises:
        ConfigError: a bad variable, or another installation with other options.
        HostError: no host, or one that looks different.
    """
    options = config or DistOptConfig()
    config = config_from_environment(os.environ, options)
    if _installed and not _installed[0].is_active:
        _installed[0].undo()  # the switch may have been turned since
    if _installed:
        return _same(_installed[0], config)
    if switch_from(os.environ) is Switch.OFF:
        undo = _in_turn(_install_flags_alone(), show_presence(SWITCHED_OFF))
        return _keep(Installation(config, is_active=False, _undo=undo))
    undo_fixes = fix_host()  # before anything of the host is imported
    try:
        undo = _install_into(find_host(), options)
    except Exception:
        undo_fixes()
        raise
    return _keep(Installation(config, is_active=True, _undo=_in_turn(undo, undo_fixes)))


def _in_turn(*undos: Undo) -> Undo:
    def undo() -> None:
        for each in undos:
            each()

    return undo


def fix_host() -> Undo:
    """Repairs what keeps the host from starting and has nothing to do with its optimizer, see hosts/fixes.py."""
    if not fixes_from(os.environ):
        return lambda: None
    tree = importable_host(Path(sys.path[0] or "."), sys.path)
    return apply_fixes(needed_fixes(tree))


def _install_into(host: Host, options: DistOptConfig) -> Undo:
    host.patch_point.find()  # imports it; a host that looks for entry points installs this package then
    factory = Patch(
        host.patch_point, lambda original: host.replacement(original, options)
    )  # flags come before variables
    return _in_turn(_apply_all(host, [factory, *flags_of(host)], options), show_presence())


def _apply_all(host: Host, patches: list[Patch], options: DistOptConfig) -> Undo:
    undo_patches = apply(patches)
    try:
        undo_classes = host.take_over(options)
    except Exception:
        undo_patches()
        raise

    def undo() -> None:
        undo_patches()
        undo_classes()

    return undo


def _keep(installation: Installation) -> Installation:
    _installed.append(installation)
    return installation


def _install_flags_alone() -> Undo:
    """Lets a launch script keep its --distopt flags with MEGATRON_DISTOPT=0: they are parsed and ignored.

    A host without a parser is not imported, because nothing is to happen where the package is switched off.
    """
    try:
        generation = recognise(importable_host(Path(sys.path[0] or "."), sys.path).has)
        has_parser = len(generation.patch_points) > 1
        return apply(flags_of(find_host())) if has_parser else lambda: None
    except UnknownHostError:
        return lambda: None


def flags_of(host: Host) -> list[Patch]:
    """Returns the patch that adds the flags to the host's parser, or none where it is applied already."""
    if host.parser is None or host.parser.is_replaced:
        return []
    return [Patch(host.parser, lambda original: parser_with_ours(original, host.check_arguments))]


def _same(current: Installation, config: DistOptConfig) -> Installation:
    if (current.config, current.config.explicit) != (config, config.explicit):
        remedy = "Call undo() on the first installation, or install once"
        raise ConfigError(refusal("second install()", "other options", "have the options of the first", remedy))
    return current


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
