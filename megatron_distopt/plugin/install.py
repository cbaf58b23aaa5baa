"""`megatron_distopt.install()`: replaces attributes of a host, and puts them back.

All patch points are checked first, and nothing is changed on a mismatch. Training modules import
the factory *by value*, so replacing it where it is defined is not enough: every loaded module that
holds the same object is rebound.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass

from megatron_distopt.comm import show_presence
from megatron_distopt.config import (
    DistOptConfig,
    Switch,
    config_from_environment,
    fixes_from,
    switch_from,
)
from megatron_distopt.errors import ConfigError, UnknownHostError
from megatron_distopt.hosts.megatron.flag import SWITCHED_OFF
from megatron_distopt.patch_points import Patch, Undos, apply, in_force
from megatron_distopt.plugin.arguments import parser_with_ours
from megatron_distopt.plugin.detect import Generation, find_host, recognise
from megatron_distopt.plugin.fixes import apply_fixes, needed_fixes
from megatron_distopt.plugin.fork_source import importable_host


@dataclass(frozen=True, eq=False)
class Installation:
    """An installation of the package, which can be undone."""

    config: DistOptConfig  # the options in force, as far as no flag says more
    is_active: bool  # False where MEGATRON_DISTOPT=0 keeps the host as it is

    def undo(self) -> None:
        """Puts every attribute of the host back; a second call does nothing.

        Raises:
            HostMismatchError: other code has replaced one of them since.
        """
        if self in _installed:
            in_force.undo()
            _installed.remove(self)


#: The installation of this process, if there is one.
_installed: list[Installation] = []


def install(config: DistOptConfig | None = None) -> Installation:
    """Makes the host's `get_megatron_optimizer` build our optimizer where its flag asks for a
    distributed one.

    Call it before the training module is imported; modules that already imported the function are
    rebound. A second call with the same options returns the first installation.

    Args:
        config: options that the host has no flag for. They stand before flags and
            MEGATRON_DISTOPT_* variables, which say the others.

    Raises:
        ConfigError: a bad variable, or another installation with other options.
        HostError: no host, or one that looks different.
    """
    options = config or DistOptConfig()
    config = config_from_environment(os.environ, options)
    if _installed and not _installed[0].is_active:
        _installed[0].undo()  # the switch may have been turned since
    if _installed:
        current = _installed[0].config
        if (current, current.explicit) != (config, config.explicit):
            raise ConfigError(
                "install() was called before with other options. Call undo() on the first "
                "installation."
            )
        return _installed[0]
    is_active = switch_from(os.environ) is not Switch.OFF
    try:
        if is_active:
            fix_host(in_force)  # before anything of the host is imported
            host = find_host()
            # imports it; a host that looks for entry points installs this package then
            host.factory.find()
            factory = host.factory, lambda original: host.replacement(original, options)
            apply([factory, *flags_of(host)], in_force)
            host.take_over(options, in_force)
        else:
            # A launch script keeps its --distopt flags: they are parsed and ignored. A host without
            # a parser is not imported, because nothing is to happen where the package is switched
            # off.
            with suppress(UnknownHostError):
                if recognise(importable_host(sys.path).has).parser is not None:
                    apply(flags_of(find_host()), in_force)
        in_force.callback(show_presence("" if is_active else SWITCHED_OFF))
    except Exception:
        in_force.undo()
        raise
    _installed.append(Installation(config, is_active))
    return _installed[0]


def fix_host(undos: Undos) -> None:
    """Repairs what keeps the host from starting and has nothing to do with its optimizer, see
    plugin/fixes.py."""
    if fixes_from(os.environ):
        apply_fixes(needed_fixes(importable_host(sys.path)), undos)


def flags_of(host: Generation) -> list[Patch]:
    """Returns the patch that adds the flags to the host's parser, or none where it is applied
    already."""
    if host.parser is None or host.parser.is_replaced:
        return []
    return [(host.parser, lambda original: parser_with_ours(original, host.check_arguments))]
