"""What the scripts have in common: their options, their tables, their result files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar


def parser_of(doc: str | None, quick: str) -> argparse.ArgumentParser:
    """A parser with the options that every script has.

    Args:
        doc: of the script.
        quick: what its quick form runs.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--contestants", nargs="+", default=[], help="names; all where left out; ours always runs")
    parser.set_defaults(load_before=os.getloadavg())
    return parser


def add_training(parser: argparse.ArgumentParser, *, layers: int, hidden: int) -> None:
    """Options of the scripts that train on several ranks.

    Args:
        parser: gets them.
        layers, hidden: of the model where nothing is said.
    """
    parser.add_argument("--ours", nargs="+", default=[], help="name=value of DistOptConfig: ours once more with these")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="data-parallel ranks")
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--hidden", type=int, default=hidden, help="a multiple of 64")
    parser.add_argument("--bucket-size", type=int, default=2_500_000, help="for those that take it")


class _Named(Protocol):
    @property
    def name(self) -> str:
        """In results."""


_Entry = TypeVar("_Entry", bound=_Named)


def pick(entries: Sequence[_Entry], names: Sequence[str]) -> list[_Entry]:
    """The contestants that `--contestants` names, and ours.

    Raises:
        SystemExit: a name is not one of theirs.
    """
    known = [entry.name for entry in entries]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"Invalid --contestants: {unknown[0]!r}. Must be one of {known}. Quote a name with a space.")
    return [entry for entry in entries if not names or entry.name in ("ours", *names)]


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, for the result file."""
    return {name: value for name, value in vars(args).items() if name not in ("json", "load_before")}


def _rounded(value: Any) -> Any:
    """Dataclasses as mappings, floats with six digits."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _rounded(dataclasses.asdict(value))
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write(result: dict[str, Any], path: Path | None) -> None:
    if path:
        path.write_text(json.dumps(_rounded(result), indent=1) + "\n")
