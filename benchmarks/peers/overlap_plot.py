"""Draws what overlap.py found: a panel a rate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers.plot import Bar, Panel, Row, draw_panels

__all__ = ["draw_overlap"]

_LABEL = "ms a step   (light: without communication; %: exposed)"


def draw_overlap(result: Mapping[str, Any], path: Path) -> None:
    """Milliseconds of each contestant with and without communication, and which part of a step is exposed.

    Args:
        result: of overlap.py, as its file has it.
        path: of the picture.
    """
    panels = [_panel(rate) for rate in result["rates"]]
    draw_panels("A training step of two ranks in two network namespaces", [panels], path)


def _panel(rate: Mapping[str, Any]) -> Panel:
    title = f"{rate['gigabits']:g} Gbit/s" if rate["gigabits"] else "no limit"
    relation = "longer" if rate["backward_is_longer"] else "shorter"
    rows = [_row(name, rate) for name in rate["seconds"]]
    return Panel(f"{title}; backward is {relation} than the communication", _LABEL, rows)


def _row(name: str, rate: Mapping[str, Any]) -> Row:
    seconds, alone = rate["seconds"][name], rate["seconds_without_communication"][name]
    if seconds is None or alone is None:
        return Row(name, (None, None), rate["why_not"].get(name, ""))
    exposed = rate["exposed part of the step"][name]
    text = f"{exposed['median']:.0%}" if exposed else ""
    return Row(name, (_bar(seconds, text), _bar(alone, "")))


def _bar(spread: Mapping[str, float], text: str) -> Bar:
    return Bar([1e3 * spread[part] for part in ("median", "least", "most")], text)
