"""Whether the script of this process came to its end, for what runs at the exit of the process.

There Python reports the exception that ended a script, except SystemExit: a script that called
`sys.exit(143)` looks like one that came to its end. The outermost frame tells them apart, because
it has returned only in the second case.
"""

from __future__ import annotations

import dis
import signal
import threading
from multiprocessing import parent_process
from types import FrameType
from typing import Any


def came_to_its_end(script: FrameType) -> bool:
    """Whether a script that no known exception has ended came to its end; False where that cannot
    be told. `script` is its outermost frame.

    In a process that `multiprocessing` has started SystemExit is a known exception.
    """
    last = script.f_code.co_code[script.f_lasti]
    return parent_process() is not None or dis.opname[last].startswith("RETURN")


def note_sigterm(was_sent: threading.Event) -> None:
    """Notes a SIGTERM that a handler of the script deals with, after which the script may come to
    its end. Without a handler nothing runs at the exit."""
    handler: Any = signal.getsignal(signal.SIGTERM)

    def noted(number: int, frame: FrameType | None) -> None:
        was_sent.set()
        handler(number, frame)

    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, noted)
