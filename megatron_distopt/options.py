"""How an option is declared, once: its name, type, default, meaning, the values it takes, and who may set it.

`DistOptConfig` declares its fields with `option(...)`. From that come the checks of values, the flags, the environment
variables, the parsing and the help of both, and the table in docs/reference.md. Imports no torch.

The type of a value is checked because another one would mean something else: the text "no" is true, nan compares false
with everything, and True is the number 1. Numbers of other libraries (numpy's scalars) are numbers. A tensor is not:
the option would not follow it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from numbers import Integral, Real
from typing import Any, TypeVar

from megatron_distopt.errors import ConfigError, refusal

VARIABLE_PREFIX = "MEGATRON_DISTOPT_"
#: What people write for a switch.
YES_OR_NO = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
#: A value is shown up to this length; a tensor or a module fills pages.
_MOST_SHOWN = 60

_T = TypeVar("_T")
#: The sentence that says what to type, for an option and a value.
Write = Callable[[str, object], str]


class SetBy(Enum):
    """The ways to set an option, in addition to code."""

    #: A flag `--distopt-...` and a variable `MEGATRON_DISTOPT_...`.
    FLAG = "flag"
    #: The host's own flags in a Megatron; in plain torch the optimizer that is given, or code alone.
    HOST = "host"


@dataclass(frozen=True)
class Rule:
    """The values of its type that an option takes.

    Args:
        values: in a few words, for the reference table.
        check: raises ConfigError for a value that it does not take; gets name, value, and what to write instead.
    """

    values: str
    check: Callable[[str, Any, Write], None]


@dataclass(frozen=True)
class Option:
    """One option of `DistOptConfig`.

    Args:
        name: of the field.
        annotation: its type as it is written, such as "int | None".
        default: its value where it is not set.
        meaning: a sentence for people, without a full stop.
        set_by: how it may be set, in addition to code.
        rule: which values it takes; None for all of its type.
    """

    name: str
    annotation: str
    default: object
    meaning: str
    set_by: SetBy
    rule: Rule | None

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off; as a flag it stands alone or with a word."""
        return "bool" in self._type_names

    @property
    def values(self) -> str:
        """The values that a flag or a variable takes, in a few words."""
        if self.rule is not None:
            return self.rule.values
        if self.is_switch:
            return "yes, no or auto" if self.is_optional else "yes or no"
        return " or ".join(_KINDS[each].rule for each in self._type_names if each != "None")

    @property
    def is_optional(self) -> bool:
        """Whether it may be None."""
        return "None" in self._type_names

    @property
    def shown_default(self) -> str:
        """The default as it is written in a flag or a variable."""
        if self.default is None:
            return "auto" if self.is_switch else "none"
        return _word(self.default)

    @property
    def _type_names(self) -> list[str]:
        return self.annotation.split(" | ")

    def typed(self, value: object) -> Any:
        """Returns `value` as a plain Python value of the option's type.

        Raises:
            ConfigError: `value` is of another type.

        >>> Option("lr", "float", 1e-3, "learning rate", SetBy.HOST, None).typed(1)
        1.0
        """
        kinds = [_KINDS[each] for each in self._type_names]
        for kind in kinds:
            if kind.holds(value):
                return kind.plain(value)
        shown, rule = repr(value), " or ".join(kind.rule for kind in kinds)
        shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
        remedy = in_code(self.name, _meant(kinds, value, self.default))
        raise ConfigError(refusal(self.name, f"{shown} of type {type(value).__name__}", f"be {rule}", remedy))

    def check(self, value: Any, write: Write) -> None:
        """Raises ConfigError for a value of its type that the option does not take."""
        if self.rule is not None:
            self.rule.check(self.name, value, write)

    def read(self, text: str, write: Write) -> object:
        """Reads a word of a command line or of a variable as a value of the option's type.

        Raises:
            ConfigError: the word is no such value.
        """
        if self.is_optional and text.lower() == ("auto" if self.is_switch else "none"):
            return None
        if "int" in self._type_names:
            return _whole_number(self.name, text, write)
        if self._type_names == ["float"]:
            return _number(self.name, text, self.default, write)
        if self.is_switch:
            return _switch(self.name, text, self.values, write)
        return text


def option(default: _T, meaning: str, *, set_by: SetBy = SetBy.FLAG, rule: Rule | None = None) -> _T:
    """Declares an option as a field of a dataclass; the arguments are those of `Option`."""
    return field(default=default, metadata={"meaning": meaning, "set_by": set_by, "rule": rule})


def options_of(config: type) -> dict[str, Option]:
    """Returns the options that a dataclass declares, by name and in the order of the fields."""
    declared = [each for each in dataclasses.fields(config) if each.metadata]
    return {each.name: Option(each.name, str(each.type), each.default, **each.metadata) for each in declared}


def flag_of(name: str) -> str:
    """Spells an option as a flag.

    >>> flag_of("bucket_size")
    '--distopt-bucket-size'
    """
    return "--distopt-" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """Spells an option as an environment variable.

    >>> variable_of("bucket_size")
    'MEGATRON_DISTOPT_BUCKET_SIZE'
    """
    return VARIABLE_PREFIX + name.upper()


def in_code(name: str, value: object) -> str:
    """Says what to write in code."""
    return f"Write {name}={value!r}"


def as_flag(name: str, value: object) -> str:
    """Says what to write on a command line."""
    return f"Drop {flag_of(name)}" if value is None else f"Write {flag_of(name)} {_word(value)}"


def as_variable(name: str, value: object) -> str:
    """Says what to write in the environment."""
    return f"Unset {variable_of(name)}" if value is None else f"Write {variable_of(name)}={_word(value)}"


def _word(value: object) -> str:
    return {"True": "yes", "False": "no"}.get(str(value), str(value))


def nearest(word: str, words: Iterable[str]) -> str | None:
    """Returns the word that was probably meant, whichever letters are capitals; None where no word is near."""
    by_lower = {each.lower(): each for each in words}
    close = get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None


def _whole_number(name: str, text: str, write: Write) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(refusal(name, repr(text), "be a whole number", write(name, 10))) from None


def _number(name: str, text: str, default: object, write: Write) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(refusal(name, repr(text), "be a number", write(name, default))) from None


def _switch(name: str, text: str, words: str, write: Write) -> bool:
    if text.lower() not in YES_OR_NO:
        raise ConfigError(refusal(name, repr(text), f"be {words}", write(name, True)))
    return YES_OR_NO[text.lower()]


def one_of(*words: str, pattern: re.Pattern[str] | None = None) -> Rule:
    """Returns the rule that an option is one of a few words.

    Args:
        words: the first one is proposed where none is near; "None" stands for None.
        pattern: of the values that the last word stands for, where it is no value itself.
    """

    def check(name: str, value: object, write: Write) -> None:
        word = str(value)
        if word not in words and not (pattern and pattern.fullmatch(word)):
            close = nearest(word, words) or words[0]
            remedy = write(name, None if close == "None" else close)
            raise ConfigError(refusal(name, repr(word), f"be one of {', '.join(words)}", remedy))

    return Rule(", ".join(word for word in words if word != "None"), check)


def at_least(number: int, unit: str = "", meant: int | None = 1, otherwise: str = "") -> Rule:
    """Returns the rule that an option is None or a whole number of at least `number`.

    Args:
        number: the least value.
        unit: written after the number, such as " steps".
        meant: the value that the remedy proposes; None to leave the option out.
        otherwise: written after the remedy.
    """

    def check(name: str, value: int | None, write: Write) -> None:
        if value is not None and value < number:
            raise ConfigError(refusal(name, value, f"be at least {number}{unit}", write(name, meant) + otherwise))

    return Rule(f"a whole number of at least {number}", check)


def _check_fraction(name: str, value: float, write: Write) -> None:
    """Proposes the nearest fraction; what is above 1 and at most 100 was probably meant in percent."""
    if not 0.0 <= value <= 1.0:
        meant = value / 100 if 1.0 < value <= 100.0 else float(value > 100.0)
        raise ConfigError(refusal(name, value, "be a number from 0 to 1", write(name, meant)))


FRACTION = Rule("a number from 0 to 1", _check_fraction)


def _check_not_negative(name: str, value: float, write: Write) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(refusal(name, value, "be a finite number of at least 0", f"Write {name}=0.0 for none"))


NOT_NEGATIVE = Rule("a number of at least 0", _check_not_negative)


@dataclass(frozen=True)
class _Kind:
    """One type that an option may have.

    Args:
        rule: in words.
        holds: whether a value is of it.
        plain: the value as Python's own type.
        guess: returns what another value may have meant; raises TypeError, ValueError, OverflowError or RuntimeError
            where it cannot.
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
    """Whether a value is a number that float64 can hold; Python's whole numbers have no largest one."""
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
    """Reads True and False of other libraries, whose types are not Python's."""
    if str(value).lower() not in YES_OR_NO:
        raise ValueError(value)
    return YES_OR_NO[str(value).lower()]


def _named(value: Any) -> str:
    """Names a class as module:Class, and a torch dtype or a member of an enum by its name."""
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
