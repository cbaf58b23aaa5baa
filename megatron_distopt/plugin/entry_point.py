"""The entry point: `distopt` in the group `megatron.optimizer_factories`.

A fork that looks for factories in installed packages calls it once, at the end of the module that
defines the factory. `megatron-distopt patch --apply FORK` adds that code to a fork.
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
    """Returns the factory that the fork uses in place of `original`, which is its own or another
    package's."""
    # raises for a bad variable now, although variables are read after the fork's flags
    config_from_environment(os.environ)
    if isinstance(original, Replacement):
        return original
    host, is_off = find_host(), switch_from(os.environ) is Switch.OFF
    ours = original if is_off else host.replacement(host.factory.checked(original), DistOptConfig())
    undos = Undos()  # never undone: a patched fork uses the package until the process ends
    apply(flags_of(host), undos)
    show_presence(SWITCHED_OFF if is_off else "")
    if not is_off:
        fix_host(undos)
        host.take_over(DistOptConfig(), undos)
    return ours
