"""A process that is forked in the middle of training, as some data loaders and writers do it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

#: After which a process that waits for what no thread of it will do is ended.
_SECONDS = 15


def in_fork(compute: Callable[[], float]) -> float:
    """The number that a function returns in a process forked from this one; nan where it does not
    return."""
    return float(text_in_fork(lambda: repr(compute())) or "nan")


def text_in_fork(compute: Callable[[], str]) -> str:
    """The text that a function returns in a process forked from this one; empty where it does not
    return."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.alarm(_SECONDS)
            os.write(write, compute().encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        return pipe.read()
