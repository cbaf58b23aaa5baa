"""Refuses options of a host that cannot be combined with this optimizer. facts.py of each Megatron
lists them. Imports nothing of the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_distopt.errors import ConfigError


@dataclass(frozen=True)
class Refused:
    """An option of the host and the values of it that are refused."""

    option: str  # its name in the parsed arguments or in a config
    remedy: str  # what to type instead
    values: tuple[object, ...] = ()  # refused values; if empty, every truthy value

    def refusal(self, options: object, of: str = "") -> str | None:
        """The error for `options`; None if they do not have the option or its value is allowed.
        `of` says whose options they are."""
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
