"""Finds the code behind a function that others may have replaced or wrapped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def code_of(function: Any) -> Iterator[tuple[str, str]]:
    """Module and file of the code of a function and of the functions that it wraps, the outermost
    first.

    A decorator copies the `__module__` of the function that it wraps, so that is not used.
    """
    while function is not None:
        code = getattr(function, "__code__", None)
        file = getattr(code, "co_filename", "no file")
        names = getattr(function, "__globals__", {})
        module = names.get("__name__", type(function).__module__)
        yield module, file
        function = getattr(function, "__wrapped__", None)
