"""What the scripts have in common: their options, their tables, their result files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from peers.machine import about


def parser_of(
    doc: str | None, quick: str, *, has_contestants: bool = True
) -> argparse.ArgumentParser:
    """A parser with the options that every script has; `quick` says what its quick form runs."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, help="where to write the result")
    if has_contestants:
        parser.add_argument(
            "--contestants",
            nargs="+",
            default=[],
            help="names; all where left out; the first one always",
        )
    parser.set_defaults(load_before=os.getloadavg(), started=time.monotonic())
    return parser


def add_training(parser: argparse.ArgumentParser, *, layers: int, hidden: int) -> None:
    """Options of the scripts that train on several ranks; `layers` and `hidden` are of the model by
    default."""
    parser.add_argument(
        "--ours",
        nargs="+",
        default=[],
        help="name=value of DistOptConfig: ours once more with these",
    )
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
        raise SystemExit(
            f"Invalid --contestants: {unknown[0]!r}. Must be one of {known}. Quote a name with a "
            "space."
        )
    return [entry for entry in entries if not names or entry.name in ("ours", *names)]


def _rounded(value: Any) -> Any:
    """Dataclasses as mappings, floats with six digits."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _rounded(dataclasses.asdict(value))
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return float(f"{value:.6g}") if isinstance(value, float) else value


def conclude(args: argparse.Namespace, result: dict[str, Any], lines: Iterable[str]) -> None:
    """Writes what was found, with machine, command and settings, to where `--json` says, and prints
    the lines."""
    if args.json:
        known = about(args.load_before, time.monotonic() - args.started)
        settings = {
            name: value
            for name, value in vars(args).items()
            if name not in ("json", "load_before", "started")
        }
        args.json.write_text(
            json.dumps(_rounded({**known, "settings": settings, **result}), indent=1) + "\n"
        )
    print("\n".join(lines))
