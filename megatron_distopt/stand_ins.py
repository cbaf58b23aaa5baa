"""Who has put code into the place of a function of torch's or of a host's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def code_of(function: Any) -> Iterator[tuple[str, str]]:
    """Module and file of the code of a function and of what it wraps, the outermost first.

    A decorator gives its function the `__module__` of what it wraps, so that is not asked.
    """
    while function is not None:
        code = getattr(function, "__code__", None)
        file = getattr(code, "co_filename", "no file")
        names = getattr(function, "__globals__", {})
        module = names.get("__name__", type(function).__module__)
        yield module, file
        function = getattr(function, "__wrapped__", None)
