"""Every exception that the package raises on purpose; docs/errors.md says what to do about each.

A message is one to three sentences: what was found, with its value and place; what is required;
what to type instead.
"""

from __future__ import annotations

from collections.abc import Sequence


class DistOptError(Exception):
    """Base of everything that the package raises on purpose."""


class ConfigError(DistOptError, ValueError):
    """An option has a value that cannot work."""


class LayoutError(DistOptError, ValueError):
    """Params, buffers and param groups do not fit together."""


class HostError(DistOptError):
    """The Megatron around the package is not what the package needs."""


class UnknownHostError(HostError):
    """No adapter recognises the Megatron that is installed."""


class HostMismatchError(HostError):
    """An attribute of the host that the package replaces is missing or looks different."""


class AccessError(DistOptError, RuntimeError):
    """Something is read, changed or copied that one rank does not have as a whole, or not at this
    moment."""


class CheckpointError(DistOptError):
    """A checkpoint cannot be written or read."""


class NonFiniteGradError(DistOptError, FloatingPointError):
    """A gradient holds inf or nan, and the policy for that is to stop."""


class RanksDisagreeError(DistOptError):
    """Ranks that must agree on something do not; names the first thing and the ranks."""


class InvariantError(DistOptError, AssertionError):
    """Something that the package guarantees does not hold: a bug of the package."""


def some_of(names: Sequence[str]) -> str:
    """The first three of them, for a text.

    >>> some_of(["a", "b", "c", "d", "e"])
    "'a', 'b', 'c' and 2 more"
    """
    shown = ", ".join(map(repr, names[:3]))
    num_more = len(names) - 3
    return f"{shown} and {num_more} more" if num_more > 0 else shown
