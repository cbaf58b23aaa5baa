"""Whether a Megatron's run asks for this package, and what its flags decide."""

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
    """Whether this package's optimizer is to be built; refuses where it is not and
    MEGATRON_DISTOPT=require."""
    switch = switch_from(os.environ)
    if switch is Switch.REQUIRE and not has_flag:
        raise ConfigError(
            "MEGATRON_DISTOPT=require, and the run is without use_distributed_optimizer. Add "
            "--use-distributed-optimizer, or unset the variable."
        )
    return has_flag and switch is not Switch.OFF


def is_used(has_flag: bool, hint: str = "") -> bool:
    """Collective: whether the host's factory builds ours on all ranks, which must agree.

    Where it does not, rank 0 says so in one line and adds `hint`: the package is loaded, and its
    user may expect it.
    """
    is_off = switch_from(os.environ) is Switch.OFF
    why_not = SWITCHED_OFF if is_off else "" if has_flag else "use_distributed_optimizer is not set"
    if is_initialized():
        meet(Group.of(), why_not)
    is_wanted(has_flag)
    if why_not and is_initialized() and Group.of().rank == 0:
        announce(f"megatron_distopt is loaded and not used: {why_not}{hint}")
    return not why_not


def with_hosts_own(options: DistOptConfig, own: Mapping[str, Any]) -> DistOptConfig:
    """`options` with those that the host decides, of which code must not have given another
    value."""
    merged = dataclasses.replace(options, **own)
    for name in own:
        given, value = getattr(options, name), getattr(merged, name)
        if name in options.explicit and given != value:
            raise ConfigError(
                f"{name} is {given!r} in DistOptConfig(...), and the host's own is {value!r}. Drop "
                "it there, and give the host's flag that value."
            )
    return merged
