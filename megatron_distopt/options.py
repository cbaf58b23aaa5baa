"""How an option is declared: its name, type, default, meaning, the values it takes, and who may set
it.

`DistOptConfig` declares its fields with `option(...)`. The checks of values, the flags, the
environment variables, their parsing and help, and the table in docs/reference.md all come from
these declarations. Imports no torch.

The type of a value is checked, because a wrong one would be misunderstood: the text "no" is true,
nan compares false with everything, and True is the number 1. Numbers of other libraries, such as
numpy's scalars, are accepted. A tensor is not, because the option would not follow its changes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, TypeVar

from megatron_distopt.errors import ConfigError

VARIABLE_PREFIX = "MEGATRON_DISTOPT_"
#: What people write for a switch.
YES_OR_NO = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}

_T = TypeVar("_T")


@dataclass(frozen=True)
class Rule:
    """Which values of its type an option takes."""

    values: str  # in words
    allows: Callable[[Any], bool]
    words: tuple[str, ...] = ()  # to suggest the nearest for a misspelled one


@dataclass(frozen=True)
class Option:
    """One option of `DistOptConfig`."""

    name: str
    annotation: str  # its type as it is written, such as "int | None"
    default: object
    meaning: str  # a sentence for people, without a full stop
    rule: Rule | None  # None if it takes all values of its type
    by_host: bool  # in a Megatron only the host's own flags set it, not ours or a variable

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off. Its flag may be given without a value."""
        return "bool" in self._type_names

    @property
    def values(self) -> str:
        if self.is_switch:
            return "yes, no or auto" if self._is_optional else "yes or no"
        words = (
            self.rule.values
            if self.rule
            else " or ".join(_TYPES[each][0] for each in self._type_names)
        )
        return f"{words}, or none" if self._is_optional and "none" not in words else words

    @property
    def shown_default(self) -> str:
        """The default as it is written in a flag or a variable."""
        if self.default is None:
            return self._none
        return {"True": "yes", "False": "no"}.get(str(self.default), str(self.default))

    @property
    def _type_names(self) -> list[str]:
        return self.annotation.split(" | ")

    @property
    def _is_optional(self) -> bool:
        return "None" in self._type_names

    @property
    def _none(self) -> str:
        return "auto" if self.is_switch else "none"

    def checked(self, value: object, spelled: str = "") -> Any:
        """Returns a value as Python's own type for the option. `spelled` is the option as a flag or
        variable, if it was not set in code.

        Raises:
            ConfigError: if the option does not take the value.
        """
        for name in self._type_names:
            try:
                plain = _plain(name, value)
            except (TypeError, OverflowError):
                continue
            if plain is None or self.rule is None or self.rule.allows(plain):
                return plain
        raise self._refusal(value, spelled or self.name)

    def read(self, text: str, spelled: str) -> Any:
        """Reads a word of a command line or variable as a value of the option."""
        if self._is_optional and text.lower() == self._none:
            return None
        try:
            if "int" in self._type_names and text not in (self.rule.words if self.rule else ()):
                return self.checked(int(text), spelled)
            if self._type_names[0] == "float":
                return self.checked(float(text), spelled)
            return YES_OR_NO[text.lower()] if self.is_switch else self.checked(text, spelled)
        except (KeyError, ValueError) as error:
            raise (
                error if isinstance(error, ConfigError) else self._refusal(text, spelled)
            ) from None

    def _refusal(self, value: object, spelled: str) -> ConfigError:
        shown = repr(value)
        # a tensor fills pages
        shown = shown if len(shown) <= 60 else f"{shown[:60]}... of type {type(value).__name__}"
        close = nearest(str(value), self.rule.words) if self.rule else None
        meant = f" Did you mean {close}?" if close else ""
        in_code = self.is_switch and spelled == self.name
        return ConfigError(
            f"{spelled} is {shown}. It must be "
            f"{'True or False' if in_code else self.values}.{meant}"
        )


def option(default: _T, meaning: str, rule: Rule | None = None, *, by_host: bool = False) -> _T:
    """Declares an option as a field of a dataclass; the arguments are those of `Option`."""
    return field(default=default, metadata={"meaning": meaning, "rule": rule, "by_host": by_host})


def options_of(config: type) -> dict[str, Option]:
    """Returns the options that a dataclass declares, by name and in the order of the fields."""
    declared = [each for each in dataclasses.fields(config) if each.metadata]
    return {
        each.name: Option(each.name, str(each.type), each.default, **each.metadata)
        for each in declared
    }


def flag_of(name: str) -> str:
    """Spells an option as a flag, such as --distopt-bucket-size."""
    return "--distopt-" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """Spells an option as an environment variable, such as MEGATRON_DISTOPT_BUCKET_SIZE."""
    return VARIABLE_PREFIX + name.upper()


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Returns the word that was probably meant, ignoring case; None if no word is similar."""
    by_lower = {each.lower(): each for each in words}
    close = get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None


# --- rules


def one_of(*words: str, pattern: re.Pattern[str] | None = None) -> Rule:
    """Returns the rule that an option is one of a few words. The last word may stand for all values
    that match `pattern`."""

    def allows(value: str) -> bool:
        return value in words or (pattern is not None and pattern.fullmatch(value) is not None)

    return Rule(f"one of {', '.join(words)}", allows, words)


def at_least(number: int) -> Rule:
    return Rule(f"a whole number of at least {number}", lambda value: value >= number)


FRACTION = Rule("a number from 0 to 1", lambda value: 0.0 <= value <= 1.0)
NOT_NEGATIVE = Rule(
    "a finite number of at least 0", lambda value: math.isfinite(value) and value >= 0
)


# --- types


def _plain(annotation: str, value: Any) -> Any:
    """Returns a value as Python's own type; raises TypeError or OverflowError for another type."""
    _, kinds, convert = _TYPES[annotation]
    if not isinstance(value, kinds) or (isinstance(value, bool) and annotation != "bool"):
        raise TypeError(value)
    return convert(value)


#: By annotation: its name in messages, the classes that are accepted, and the conversion to
#: Python's own type.
_TYPES: dict[str, tuple[str, type | tuple[type, ...], Callable[[Any], Any]]] = {
    "str": ("a text", str, str.__str__),  # str() of a str enum's member would be its name
    "bool": ("True or False", bool, bool),
    "int": ("a whole number", Integral, int),
    "float": ("a number", Real, float),  # OverflowError for a whole number that float64 cannot hold
    "tuple[float, float]": (
        "2 numbers",
        (tuple, list),
        lambda value: tuple(_plain("float", each) for each in value),
    ),
    "None": ("none", type(None), lambda value: value),
}
