"""What a command found, for people and for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Answer"]


@dataclass(frozen=True)
class Answer:
    """The outcome of one command.

    Args:
        document: everything, as JSON values.
        lines: the same for people, for a terminal of that width in characters; None for any.
        status: of the process when it exits.
    """

    document: Mapping[str, Any]
    lines: Callable[[int | None], Sequence[str]]
    status: int = 0

    def as_text(self, width: int | None) -> str:
        """For people."""
        return "\n".join(self.lines(width))

    def as_json(self) -> str:
        """For programs; inf and nan, which JSON lacks, are the texts "inf", "-inf" and "nan"."""
        return json.dumps(_plain(self.document), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
