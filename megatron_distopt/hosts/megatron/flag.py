"""Whether a Megatron's run uses this package, and the options that the host's flags decide."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from megatron_distopt.comm import Group, is_initialized, meet
from megatron_distopt.config import DistOptConfig, Switch, switch_from
from megatron_distopt.errors import ConfigError
from megatron_distopt.session.announce import announce

SWITCHED_OFF = "MEGATRON_DISTOPT=0"


def is_wanted(has_flag: bool) -> bool:
    """Whether this package's optimizer is to be built. Raises if MEGATRON_DISTOPT=require and it is
    not."""
    switch = switch_from(os.environ)
    if switch is Switch.REQUIRE and not has_flag:
        raise ConfigError(
            "MEGATRON_DISTOPT=require is set, but use_distributed_optimizer is not. Add "
            "--use-distributed-optimizer, or unset the variable."
        )
    return has_flag and switch is not Switch.OFF


def is_used(has_flag: bool, hint: str = "") -> bool:
    """Collective: whether the host's factory builds our optimizer. All ranks must agree.

    If it does not, rank 0 logs one line with the reason and `hint`, because the package is loaded
    and its user may expect it to be used.
    """
    is_off = switch_from(os.environ) is Switch.OFF
    why_not = SWITCHED_OFF if is_off else "" if has_flag else "use_distributed_optimizer is not set"
    if is_initialized():
        meet(Group.of(), why_not)
    is_wanted(has_flag)
    if why_not and is_initialized() and Group.of().rank == 0:
        announce(f"megatron_distopt is loaded but not used: {why_not}{hint}")
    return not why_not


def with_hosts_own(options: DistOptConfig, own: Mapping[str, Any]) -> DistOptConfig:
    """`options` with the values that the host decides. Refuses an option that code set to another
    value."""
    merged = dataclasses.replace(options, **own)
    for name in own:
        given, value = getattr(options, name), getattr(merged, name)
        if name in options.explicit and given != value:
            raise ConfigError(
                f"{name} is {given!r} in DistOptConfig(...), but the host's own value is "
                f"{value!r}. Leave {name} out there, and set it with the host's flag."
            )
    return merged
