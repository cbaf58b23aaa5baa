"""`megatron_distopt.install()` replaces attributes of a host, and its undo restores them.

All patch points are checked first, and nothing is changed on a mismatch. Training modules import
the factory *by value*, so it is not enough to replace it where it is defined. It is replaced in
every loaded module that holds the same object.
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

    config: DistOptConfig  # the options of code and variables; flags may add to them
    is_active: bool  # False if MEGATRON_DISTOPT=0 leaves the host unchanged

    def undo(self) -> None:
        """Restores every attribute of the host. A second call does nothing.

        Raises:
            HostMismatchError: if other code has replaced one of them again.
        """
        if self in _installed:
            in_force.undo()
            _installed.remove(self)


#: The installation of this process, if there is one.
_installed: list[Installation] = []


def install(config: DistOptConfig | None = None) -> Installation:
    """Makes the host's `get_megatron_optimizer` build our optimizer if the host's flag asks for a
    distributed one.

    Call it before the training module is imported; modules that already imported the function are
    rebound. A second call with the same options returns the first installation.

    Args:
        config: options that the host has no flag for. They win over flags and MEGATRON_DISTOPT_*
            variables, which set the other options.

    Raises:
        ConfigError: for a bad variable, or if the package was installed with other options before.
        HostError: if no host is found, or if it is not as expected.
    """
    options = config or DistOptConfig()
    config = config_from_environment(os.environ, options)
    if _installed and not _installed[0].is_active:
        _installed[0].undo()  # MEGATRON_DISTOPT may have another value now
    if _installed:
        current = _installed[0].config
        if (current, current.explicit) != (config, config.explicit):
            raise ConfigError(
                "install() was called before with other options. Call undo() on the Installation "
                "that the first call returned."
            )
        return _installed[0]
    is_active = switch_from(os.environ) is not Switch.OFF
    try:
        if is_active:
            fix_host(in_force)  # before anything of the host is imported
            host = find_host()
            # imports the host; a host that looks for entry points installs this package then
            host.factory.find()
            factory = host.factory, lambda original: host.replacement(original, options)
            apply([factory, *flags_of(host)], in_force)
            host.take_over(options, in_force)
        else:
            # The --distopt flags of a launch script are still parsed, and ignored. A host without a
            # parser is not imported, because the package is switched off.
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
    """Makes the fixes without which the host does not start on today's packages, see
    plugin/fixes.py."""
    if fixes_from(os.environ):
        apply_fixes(needed_fixes(importable_host(sys.path)), undos)


def flags_of(host: Generation) -> list[Patch]:
    """Returns the patch that adds the flags to the host's parser; empty if it is applied
    already."""
    if host.parser is None or host.parser.is_replaced:
        return []
    return [(host.parser, lambda original: parser_with_ours(original, host.check_arguments))]
