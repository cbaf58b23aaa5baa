"""How rank 0 says what is active."""

from __future__ import annotations

import logging

_log = logging.getLogger("megatron_distopt")


def announce(text: str) -> None:
    """Logs at INFO; in a program that set up no logging at all, to stderr all the same."""
    if not _log.hasHandlers():
        _log.addHandler(logging.StreamHandler())
        _log.setLevel(logging.INFO)
    _log.info("%s", text)
