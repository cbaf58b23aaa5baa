"""Whether our optimizer is built: every rank decides by itself, and all find out whether they decided alike."""

from __future__ import annotations

import os

from megatron_distopt.comm import Group, is_initialized, meet
from megatron_distopt.config import Switch, switch_from
from megatron_distopt.hosts.patch_points import is_wanted
from megatron_distopt.hosts.report import announce

SWITCHED_OFF = "MEGATRON_DISTOPT=0"


def is_used(has_flag: bool, hint: str = "") -> bool:
    """Whether the host's factory builds ours on all ranks. Ranks that do wait for the others.

    Where it does not, rank 0 says so in one line: the package is loaded, and its user may expect it to be used.

    Args:
        has_flag: whether the host was started with its flag.
        hint: what else there is to say where it was not.

    Raises:
        ConfigError: it is not, and MEGATRON_DISTOPT=require.
        RanksDisagreeError: it is on some ranks only.
    """
    is_off = switch_from(os.environ) is Switch.OFF
    why_not = SWITCHED_OFF if is_off else "" if has_flag else "use_distributed_optimizer is not set"
    if is_initialized():
        meet(Group.of(), why_not)
    is_wanted(has_flag)
    if why_not and is_initialized() and Group.of().rank == 0:
        announce(f"megatron_distopt is loaded and not used: {why_not}{hint}")
    return not why_not
