"""What every host's factory does when it is called with our optimizer in reach: is it wanted, and how it gets in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron_distopt.config import Switch, switch_from
from megatron_distopt.errors import ConfigError, refusal

__all__ = ["is_wanted", "substituted"]


def is_wanted(has_flag: bool) -> bool:
    """Whether our optimizer is to be built.

    Args:
        has_flag: whether the host was started with its flag.

    Raises:
        ConfigError: it is not, and MEGATRON_DISTOPT=require.
    """
    switch = switch_from(os.environ)
    if switch is Switch.REQUIRE and not has_flag:
        rule, remedy = "be used when MEGATRON_DISTOPT=require", "Add --use-distributed-optimizer, or unset the variable"
        raise ConfigError(refusal("run", "without use_distributed_optimizer", rule, remedy))
    return has_flag and switch is not Switch.OFF


@contextmanager
def substituted(function: Callable[..., Any], ours: Mapping[str, Any]) -> Iterator[None]:
    """Meanwhile `function` finds `ours` under those names in its module; afterwards everything is as before."""
    host = function.__globals__
    before = {name: host[name] for name in ours if name in host}
    host.update(ours)
    try:
        yield
    finally:
        for name in ours:
            if name in before:
                host[name] = before[name]
            else:
                del host[name]
