"""What the package says: errors, compared without pinning their wording, and lines of its log."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

__all__ = ["Said", "assert_mentions", "assert_says", "logged", "raised", "refused", "says"]

#: A word that is a value: a number, a quoted name, a path, a flag, an identifier, a call, a list.
_VALUE = re.compile(r"[0-9'_/=(\[]|--|\w\.\w|[a-z][A-Z]")


def assert_says(text: str, example: str) -> None:
    """Asserts that a text names what an example of it names: what was refused, and every value.

    The words between the values are free.

    >>> message = "Invalid bucket_size: 100. Must be alike. Write --bucket-size."
    >>> assert_says("bucket_size is 100 on rank 2.", message)
    Traceback (most recent call last):
    AssertionError: --bucket-size not in: bucket_size is 100 on rank 2.
    """
    has_subject = example.startswith("Invalid ")
    subject = example.removeprefix("Invalid ").partition(": ")[0] if has_subject else ""
    values = [
        word for word in (each.strip("«»,;:.") for each in example.split()) if _VALUE.search(word)
    ]
    missing = [each for each in dict.fromkeys([subject, *values]) if each not in text]
    if missing:
        raise AssertionError(f"{', '.join(missing)} not in: {text}")


@dataclass(frozen=True, eq=False)
class Said:
    """Equal to every message that begins with what was found and ends with the remedy.

    >>> said = Said("Invalid fork: missing", "Write its path.")
    >>> "Invalid fork: missing. Must exist. Write its path." == said
    True
    """

    found: str
    remedy: str

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, str)
            and other.startswith(f"{self.found}. ")
            and other.endswith(f". {self.remedy}")
        )

    __hash__ = None  # type: ignore[assignment]


def says(error: BaseException, text: str) -> bool:
    """Whether the message of an error begins and ends as the text does before and after " ... "."""
    found, _, remedy = text.partition(" ... ")
    return Said(found, remedy) == str(error)


def assert_mentions(text: object, *parts: str) -> None:
    """Asserts that a message has the values and the remedy that a user needs; its other words are
    free."""
    missing = [part for part in parts if part not in str(text)]
    if missing:
        raise AssertionError(f"{', '.join(missing)} not in: {text}")


def raised(call: Callable[[], object]) -> tuple[str, str]:
    """Class and text of what it raises. The fork of 2023 leaves with sys.exit where it gives up."""
    try:
        call()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the test says which one it must be
        return type(error).__name__, str(error)
    return "nothing", ""


def refused(kind: type[Exception], call: Callable[[], object]) -> str:
    """The text of the error that a call has to raise."""
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


@contextmanager
def logged(level: int = logging.INFO) -> Iterator[list[str]]:
    """The lines that the package logs in the block."""
    lines: list[str] = []
    handler, log = logging.Handler(level), logging.getLogger("megatron_distopt")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before = log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
