"""Texts of refusals, compared without pinning their wording."""

from __future__ import annotations

import re

__all__ = ["assert_says"]

#: A word that is a value: a number, a quoted name, a path, a flag, an identifier, a call, a list.
_VALUE = re.compile(r"[0-9'_/=(\[]|--|\w\.\w|[a-z][A-Z]")


def assert_says(text: str, example: str) -> None:
    """Asserts that a text names what an example of it names: what was refused, and every value.

    The words between the values are free.

    >>> assert_says("bucket_size is 100 on rank 2.", "Invalid bucket_size: 100. Must be alike. Write --bucket-size.")
    Traceback (most recent call last):
    AssertionError: --bucket-size not in: bucket_size is 100 on rank 2.
    """
    subject, _, _ = example.removeprefix("Invalid ").partition(": ")
    values = [word for word in (each.strip("«»,;:.") for each in example.split()) if _VALUE.search(word)]
    missing = [each for each in dict.fromkeys([subject, *values]) if each not in text]
    if missing:
        raise AssertionError(f"{', '.join(missing)} not in: {text}")
