"""The entry point: `distopt` in the group `megatron.optimizer_factories`.

A fork that asks its installed packages for factories (`megatron-distopt patch --apply FORK` adds
the question) calls it once, at the end of the module that defines the factory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from megatron_distopt.comm import show_presence
from megatron_distopt.config import DistOptConfig, Switch, config_from_environment, switch_from
from megatron_distopt.hosts.megatron.flag import SWITCHED_OFF
from megatron_distopt.patch_points import Replacement, Undos, apply
from megatron_distopt.plugin.detect import find_host
from megatron_distopt.plugin.install import fix_host, flags_of


def distopt(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what the fork uses in place of `original`: its own factory, or what another package
    made of it."""
    # refuses a bad variable now; it is read after the fork's flags
    config_from_environment(os.environ)
    if isinstance(original, Replacement):
        return original
    host, is_off = find_host(), switch_from(os.environ) is Switch.OFF
    ours = original if is_off else host.replacement(host.factory.checked(original), DistOptConfig())
    undos = Undos()  # a fork that asks for the package has it until the process ends
    apply(flags_of(host), undos)
    show_presence(SWITCHED_OFF if is_off else "")
    if not is_off:
        fix_host(undos)
        host.take_over(DistOptConfig(), undos)
    return ours
