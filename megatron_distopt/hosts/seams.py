"""What of a host we replace, as data: each host's facts.py lists its seams, plugin/patcher.py acts on them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Seam"]


@dataclass(frozen=True)
class Seam:
    """One attribute of a host that we replace.

    Args:
        module: where it is defined.
        attribute: its name there, and in the modules that import it by value.
        parameters: the names that its signature must start with.
    """

    module: str
    attribute: str
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"
