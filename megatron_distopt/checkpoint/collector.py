"""Python's garbage collector, out of the way for a moment."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_collection"]


@contextmanager
def no_collection() -> Iterator[None]:
    """A plan and a manifest are many small objects, none of them in a cycle. They would set off collections that walk
    through all objects of the process: a tenth of a second each after the imports of a Megatron, while all ranks wait.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
