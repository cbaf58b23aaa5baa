"""Who has put code into the place of a function of torch's or of a host's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def code_of(function: Any) -> Iterator[tuple[str, str]]:
    """Module and file of the code of a function and of what it wraps, the outermost first.

    A decorator gives its function the `__module__` of what it wraps, so that is not asked.
    """
    while function is not None:
        file = getattr(getattr(function, "__code__", None), "co_filename", "no file")
        yield getattr(function, "__globals__", {}).get("__name__", type(function).__module__), file
        function = getattr(function, "__wrapped__", None)
