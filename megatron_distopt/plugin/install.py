"""`megatron_distopt.install()`: the library door."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from megatron_distopt.config import DistOptConfig, Switch, config_from_environment, switch_from
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.hosts.detect import find_host
from megatron_distopt.plugin.patcher import Patch, Undo, apply

__all__ = ["Installation", "install"]


@dataclass(frozen=True, eq=False)
class Installation:
    """What was installed, and the way back.

    Args:
        config: the options in force.
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
        config: options that the host has no flag for; MEGATRON_DISTOPT_* variables override them.

    Raises:
        ConfigError: a bad variable, or another installation with other options.
        HostError: no host, or one that looks different.
    """
    config = config_from_environment(os.environ, config)
    if _installed:
        return _same(_installed[0], config)
    if switch_from(os.environ) is Switch.OFF:
        return Installation(config, is_active=False, _undo=lambda: None)
    host = find_host()
    undo = apply([Patch(host.seam, lambda original: host.replacement(original, config))])
    _installed.append(Installation(config, is_active=True, _undo=undo))
    return _installed[0]


def _same(current: Installation, config: DistOptConfig) -> Installation:
    if current.config != config:
        remedy = "Call undo() on the first installation, or install once"
        raise ConfigError(refusal("second install()", "other options", "have the options of the first", remedy))
    return current
