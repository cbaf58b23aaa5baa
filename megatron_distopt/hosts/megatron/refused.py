"""Options of a host that cannot be combined with this optimizer; which they are is in facts.py of
each Megatron. Imports nothing of the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_distopt.errors import ConfigError


@dataclass(frozen=True)
class Refused:
    """An option of the host that must be off, or another one."""

    option: str  # its name in the parsed arguments or in a config
    remedy: str  # what to type instead
    values: tuple[object, ...] = ()  # those that are refused; none for whatever is truthy

    def refusal(self, options: object, of: str = "") -> str | None:
        """What is wrong with `options`, which may not have it at all; None where nothing is. `of`
        says whose they are."""
        found = getattr(options, self.option, None)
        is_refused = found in self.values if self.values else bool(found)
        if not is_refused:
            return None
        return (
            f"{self.option}{of} is {found!r}, which cannot be combined with this distributed "
            f"optimizer. {self.remedy}."
        )


def check_refused(options: object, rows: Iterable[Refused], of: str = "") -> None:
    for row in rows:
        refusal = row.refusal(options, of)
        if refusal is not None:
            raise ConfigError(refusal)
