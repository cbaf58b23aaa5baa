"""Marks the methods of an optimizer that all ranks have to call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from megatron_distopt.comm import meet_in_call

Method = TypeVar("Method", bound=Callable[..., Any])


def on_all_ranks(method: Method) -> Method:
    """Makes a collective method raise if not all ranks call it, see [Note: a call on one rank] in
    comm/meeting.py."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        meet_in_call(method.__name__, self.stats_group)
        return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]
