"""Every exception that the package raises on purpose; docs/errors.md says what to do about each.

A message is one to three plain sentences: what was found, with its value and place; what is
required; what to type instead.
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
    """An attribute of the host that the package replaces is missing or has another signature."""


class AccessError(DistOptError, RuntimeError):
    """Something was read, changed or copied that is not complete on this rank, or not at this
    time."""


class CheckpointError(DistOptError):
    """A checkpoint cannot be written or read."""


class NonFiniteGradError(DistOptError, FloatingPointError):
    """A gradient is inf or nan, and the option `nonfinite` is "raise"."""


class RanksDisagreeError(DistOptError):
    """Ranks differ in something that must be equal; names the first difference and the ranks."""


class InvariantError(DistOptError, AssertionError):
    """The package breaks one of its own guarantees, which is a bug of the package."""


def some_of(names: Sequence[str]) -> str:
    """The first three names, and how many more there are.

    >>> some_of(["a", "b", "c", "d", "e"])
    "'a', 'b', 'c' and 2 more"
    """
    shown = ", ".join(map(repr, names[:3]))
    num_more = len(names) - 3
    return f"{shown} and {num_more} more" if num_more > 0 else shown
