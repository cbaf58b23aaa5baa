"""Draws results as bars with their spread: a panel a setting, a row a contestant. Draws that of checkpoints.

matplotlib is imported when something is drawn; nothing else needs it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["OURS", "PEER", "Bar", "Drawing", "Panel", "Row", "draw", "draw_panels"]

OURS, PEER = "#1f6fb4", "#9aa5b1"
_FAILED, _LINE, _SPREAD = "#aa3333", "#d9822b", "#555555"
#: Of the first and the second bar of a row.
_SHADES = (1.0, 0.45)
_STYLES = ("--", ":")
_ROW, _DPI = 0.8, 110
_SMALL, _TEXT = 7, 9
#: Of a result, into a file.
Draw = Callable[[Any, Path], None]


@dataclass(frozen=True)
class Bar:
    """Median, least and most, and what stands beside it."""

    values: Sequence[float]
    text: str


@dataclass(frozen=True)
class Row:
    """A contestant.

    Args:
        name: of it; one that begins with "ours" is of our colour.
        bars: one or two, the darker first; None for what there is not.
        why_not: the reason, where it was not run.
        mark: where a short black line crosses the first bar.
    """

    name: str
    bars: tuple[Bar | None, ...]
    why_not: str = ""
    mark: float | None = None


@dataclass(frozen=True)
class Panel:
    """One setting.

    Args:
        title: the setting.
        label: of the axis, with the unit.
        rows: from the top.
        lines: values that all are held against, and what they are.
    """

    title: str
    label: str
    rows: Sequence[Row]
    lines: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True)
class Drawing:
    """What a script's `--plot` and `--from` say."""

    path: Path | None
    kept: Path | None

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw it; needs matplotlib")
        text = "run nothing and draw what --json wrote; beside --plot"
        parser.add_argument("--from", dest="kept", type=Path, metavar="FILE", help=text)

    @classmethod
    def taken_from(cls, args: argparse.Namespace, parser: argparse.ArgumentParser) -> Drawing:
        """Takes both out of `args`, whose rest is what was measured."""
        drawing = cls(args.plot, args.kept)
        if drawing.kept and not drawing.path:
            parser.error("Invalid --from: no --plot beside it. Must say where to draw. Write --plot FILE beside it.")
        del args.plot, args.kept
        return drawing

    def of_kept(self, drawn: Draw) -> bool:
        """Draws what `--from` names, if it names something; then nothing is to be run."""
        if self.kept and self.path:
            drawn(json.loads(self.kept.read_text()), self.path)
        return self.kept is not None

    def of_result(self, drawn: Draw, result: Any) -> None:
        """Draws what was found, as it would be read back from a file, where `--plot` asks for it."""
        if self.path:
            drawn(json.loads(json.dumps(result, default=dataclasses.asdict)), self.path)


def draw_panels(title: str, panels: Sequence[Sequence[Panel]], path: Path) -> None:
    """
    Args:
        title: above all.
        panels: in rows and columns, as many columns in each row.
        path: of the picture; its ending says the format.
    """
    from matplotlib.figure import Figure

    rows = sum(0.9 + 0.3 * max(len(panel.rows) for panel in across) for across in panels)
    figure = Figure(figsize=(2.2 + 4.4 * len(panels[0]), 0.5 + rows), layout="constrained")
    grid = figure.subplots(len(panels), len(panels[0]), squeeze=False)
    for across, places in zip(panels, grid, strict=True):
        for panel, axes in zip(across, places, strict=True):
            _draw_panel(axes, panel)
            if [row.name for row in panel.rows] == [row.name for row in across[0].rows] and axes is not places[0]:
                axes.set_yticklabels([])
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=_DPI)


def _draw_panel(axes: Any, panel: Panel) -> None:
    for place, row in enumerate(panel.rows):
        _draw_row(axes, place, row)
    for (value, text), style in zip(panel.lines, _STYLES, strict=False):
        axes.axvline(value, color=_LINE, linewidth=1.2, linestyle=style, label=text, zorder=0)
    if panel.lines:
        axes.legend(loc="lower right", fontsize=_SMALL, frameon=False)
    axes.set_yticks(range(len(panel.rows)), [row.name for row in panel.rows], fontsize=_TEXT)
    axes.set_ylim(len(panel.rows) - 0.4 + len(panel.lines), -0.6)
    axes.set_xlim(0, 1.3 * max([1e-9, *(bar.values[2] for row in panel.rows for bar in row.bars if bar)]))
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel(panel.label, fontsize=_TEXT)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_row(axes: Any, place: int, row: Row) -> None:
    if not any(row.bars):
        why_not = row.why_not.split(":")[0].split(" (")[0] or "not run"
        axes.text(0, place, f" {why_not}", va="center", fontsize=_SMALL, color=_FAILED)
        return
    color, height = OURS if row.name.startswith("ours") else PEER, _ROW / len(row.bars)
    for number, (bar, shade) in enumerate(zip(row.bars, _SHADES, strict=False)):
        if bar is not None:
            _draw_bar(axes, place + height * (number + 0.5) - _ROW / 2, bar, 0.9 * height, (color, shade))
    if row.mark is not None:
        axes.plot([row.mark] * 2, [place - _ROW / 2, place - _ROW / 2 + height], color="black", linewidth=2)


def _draw_bar(axes: Any, place: float, bar: Bar, height: float, color: tuple[str, float]) -> None:
    median, least, most = bar.values
    axes.barh(place, median, height=height, color=color[0], alpha=color[1])
    if most > least:
        axes.errorbar(median, place, xerr=[[median - least], [most - median]], ecolor=_SPREAD, elinewidth=1, capsize=2)
    axes.text(most, place, f" {bar.text}", va="center", fontsize=_SMALL)


def draw(result: dict[str, Any], path: Path) -> None:
    """Of checkpoints: seconds of a save until it is on the disk, and of a load; a panel a size and number of ranks.

    Args:
        result: of the script.
        path: of the picture.
    """
    settings = [(ratios["ranks"], ratios["numel"]) for ratios in result["ratios"]]
    ranks, numels = sorted({setting[0] for setting in settings}), sorted({setting[1] for setting in settings})
    panels = [[_checkpoint_panel(result["medians"], size, numel) for numel in numels] for size in ranks]
    draw_panels("Saving the optimizer state until it is on the disk, and loading it; median and spread", panels, path)


def _checkpoint_panel(medians: Sequence[dict[str, Any]], ranks: int, numel: int) -> Panel:
    here = [each for each in medians if (each["ranks"], each["numel"]) == (ranks, numel)]
    label = "s   (dark: save, light: load, black line: stall)"
    return Panel(f"{numel / 1e6:.0f} M elements on {ranks} ranks", label, [_checkpoint_row(each) for each in here])


def _checkpoint_row(each: dict[str, Any]) -> Row:
    bars = [each["disk_seconds"], each["load_seconds"] if each["disk_seconds"] else None]
    shown = tuple(None if values is None else Bar(values, f"{values[0]:.2g}") for values in bars)
    stall = each["save_seconds"] if each["contestant"] == "ours async" else None
    return Row(each["contestant"], shown, each["why_not"], stall[0] if stall else None)
