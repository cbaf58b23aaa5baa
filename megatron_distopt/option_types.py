"""The type of an option's value: what Python takes for it, and what is refused because it would mean something else.

A text such as "no" is true, nan compares false with everything, and True is the number 1: none of them does what was
meant. Numbers of other libraries (numpy's scalars) are numbers. A tensor is not: the option would not follow it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any

from megatron_distopt.errors import ConfigError, refusal

__all__ = ["YES_OR_NO", "of_its_type"]

#: What people write for a switch.
YES_OR_NO = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
#: A value is shown up to this length; a tensor or a module fills pages.
_MOST_SHOWN = 60


def of_its_type(name: str, annotation: str, value: object, default: object) -> Any:
    """`value` as a plain Python value of the option's type.

    Args:
        name: of the option.
        annotation: of its field, e.g. "int | None".
        value: what was given.
        default: of the option, for the remedy where nobody can tell what was meant.

    Raises:
        ConfigError: it is of another type.

    >>> of_its_type("lr", "float", 1, 1e-3)
    1.0
    """
    kinds = [_KINDS[each] for each in annotation.split(" | ")]
    for kind in kinds:
        if kind.holds(value):
            return kind.plain(value)
    shown, rule = repr(value), " or ".join(kind.rule for kind in kinds)
    shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
    remedy = f"Write {name}={_meant(kinds, value, default)!r}"
    raise ConfigError(refusal(name, f"{shown} of type {type(value).__name__}", f"be {rule}", remedy))


@dataclass(frozen=True)
class _Kind:
    """One type that an option may have.

    Args:
        rule: in words.
        holds: whether a value is of it.
        plain: the value as Python's own type.
        guess: what another value may have meant; raises TypeError, ValueError, OverflowError or RuntimeError where
            that cannot be told.
    """

    rule: str
    holds: Callable[[Any], bool]
    plain: Callable[[Any], Any]
    guess: Callable[[Any], Any]


def _meant(kinds: Sequence[_Kind], value: object, default: object) -> object:
    for kind in kinds:
        try:
            return kind.guess(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            continue
    return default


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    """Also one that float64 can hold: Python's whole numbers have no largest one."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _are_numbers(value: object) -> bool:
    return isinstance(value, (tuple, list)) and all(map(_is_number, value))


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or isinstance(value, bool):
        raise ValueError(number)
    return number


def _rounded(value: Any) -> int:
    return max(round(_finite(value)), 1)


def _yes_or_no(value: Any) -> bool:
    """numpy's own True and False have no type in common with Python's."""
    if str(value).lower() not in YES_OR_NO:
        raise ValueError(value)
    return YES_OR_NO[str(value).lower()]


def _named(value: Any) -> str:
    """A class as module:Class, a torch dtype and a member of an enum by name."""
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    if isinstance(value, Enum) and isinstance(value.value, str):
        return value.value
    if type(value).__name__ == "dtype":
        return str(value).rpartition(".")[2]
    raise TypeError(value)


def _two(value: Any) -> tuple[float, ...]:
    first, second = value
    return _finite(first), _finite(second)


def _nothing(value: Any) -> None:
    raise TypeError(value)


#: By annotation.
_KINDS = {
    # str() of a member of an enum of texts would be its name.
    "str": _Kind("a text", lambda value: isinstance(value, str), str.__str__, _named),
    "bool": _Kind("True or False", lambda value: isinstance(value, bool), bool, _yes_or_no),
    "int": _Kind("a whole number", _is_whole, int, _rounded),
    "float": _Kind("a number", _is_number, float, _finite),
    "tuple[float, float]": _Kind("2 numbers", _are_numbers, lambda value: tuple(map(float, value)), _two),
    "None": _Kind("None", lambda value: value is None, lambda value: None, _nothing),
}
