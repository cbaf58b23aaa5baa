"""How rank 0 logs what is active."""

from __future__ import annotations

import logging

_log = logging.getLogger("megatron_distopt")


def announce(text: str) -> None:
    """Logs at INFO. A program that has set up no logging sees it on stderr."""
    if not _log.hasHandlers():
        _log.addHandler(logging.StreamHandler())
        _log.setLevel(logging.INFO)
    _log.info("%s", text)
