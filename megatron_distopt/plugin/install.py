"""`megatron_distopt.install()`: the package as a library."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from megatron_distopt.config import DistOptConfig, Switch, config_from_environment, switch_from
from megatron_distopt.errors import ConfigError, UnknownHostError, refusal
from megatron_distopt.hosts.detect import Host, find_host, recognise
from megatron_distopt.hosts.source.tree import importable_host
from megatron_distopt.plugin.arguments import parser_with_ours
from megatron_distopt.plugin.patcher import Patch, Undo, apply

__all__ = ["Installation", "flags_of", "install"]


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
        return _keep(Installation(config, is_active=False, _undo=_install_flags_alone()))
    host = find_host()
    host.patch_point.find()  # imports it; a host that looks for entry points installs this package then
    factory = Patch(
        host.patch_point, lambda original: host.replacement(original, options)
    )  # flags come before variables
    return _keep(Installation(config, is_active=True, _undo=apply([factory, *flags_of(host)])))


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
