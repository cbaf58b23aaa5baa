"""Draws the pictures of README.md and docs/ from what benchmarks/results holds. Needs matplotlib.

Usage: python scripts/plots.py

[Note: stale pictures] Each SVG holds a digest of everything that it was made from: the result files
and this script. `tests/benchmarks/test_plots.py` compares it, so that a new result or a new way of
drawing asks for new pictures.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"

OURS, PEER, FEWER, TEXT = "#1f6fb4", "#a9b4c0", "#d1622b", "#24292f"
#: Opacity of the part of a bar that is held between two steps.
LIGHT = 0.45
#: Contestants of the results in the order of the rows, with the names that a reader knows.
NAMES = {
    "ours": "megatron-distopt",
    "ours, messages": "megatron-distopt, over sockets",
    "fork of 2023": "Megatron fork's own optimizer",
    "fork of 2023, fused Adam": "the same with a fused Adam",
    "megatron-core": "megatron-core 0.16.1",
    "megatron-core, fused Adam": "the same with a fused Adam",
    "DeepSpeed ZeRO-1": "DeepSpeed ZeRO-1",
    "DeepSpeed ZeRO-2": "DeepSpeed ZeRO-2",
    "torch DDP + ZeroRedundancy": "torch DDP + ZeroRedundancy",
    "torch FSDP2": "torch FSDP2 (shards params)",
}
#: Makes the identifiers inside of an SVG the same at every run.
STYLE = {
    "svg.hashsalt": "megatron-distopt",
    "svg.fonttype": "path",
    "font.size": 9,
    "text.color": TEXT,
}


@dataclass(frozen=True)
class Picture:
    """One SVG."""

    name: str  # of the picture, without its ending
    result_name: str  # of the file that it is made from
    draw: Callable[[Any, Mapping[str, Any]], None]  # fills a figure from the result

    @property
    def result(self) -> Path:
        return RESULTS / f"{self.result_name}.json"

    @property
    def path(self) -> Path:
        return IMAGES / f"{self.name}.svg"

    def digest(self) -> str:
        """SHA-256 of what the picture is made from, see [Note: stale pictures]."""
        return hashlib.sha256(self.result.read_bytes() + Path(__file__).read_bytes()).hexdigest()


def _draw_bars(
    title: str,
    label: str,
    draw_panel: Callable[[Any, Mapping[str, Any]], None],
    figure: Any,
    result: Mapping[str, Any],
) -> None:
    """A panel for each number of ranks, a row for each contestant; narrow, so that it can be read
    on a phone."""
    figure.set_size_inches(5.2, 5.4)
    panels = figure.subplots(len(result["ranks"]), 1)
    for axes, entry in zip(panels, result["ranks"], strict=True):
        draw_panel(axes, entry)
        axes.set_title(
            f"{entry['ranks']} ranks, {entry['numel'] / 1e6:.0f} M parameters", fontsize=9
        )
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        names = [text.get_text() for text in axes.get_yticklabels()]
        axes.set_yticks(range(len(names)), [NAMES[name] for name in names])
        axes.invert_yaxis()
    figure.suptitle(title, fontsize=10)


def _draw_seconds(axes: Any, entry: Mapping[str, Any]) -> None:
    found = {name: entry["seconds"][name] for name in NAMES if entry["seconds"].get(name)}
    middles = [1e3 * seconds["median"] for seconds in found.values()]
    least = [
        middle - 1e3 * seconds["least"]
        for middle, seconds in zip(middles, found.values(), strict=True)
    ]
    most = [
        1e3 * seconds["most"] - middle
        for middle, seconds in zip(middles, found.values(), strict=True)
    ]
    spread = {"ecolor": "#57606a", "elinewidth": 1, "capsize": 2}
    axes.barh(
        list(found), middles, xerr=(least, most), color=_colors(found), height=0.68, error_kw=spread
    )
    _label(
        axes,
        [1e3 * seconds["most"] for seconds in found.values()],
        [f"{middle:.0f}" for middle in middles],
    )


def _draw_bytes(axes: Any, entry: Mapping[str, Any]) -> None:
    found = {
        name: entry["bytes an element"][name] for name in NAMES if name in entry["bytes an element"]
    }
    peaks = [values["peak of a step"] for values in found.values()]
    held = [values["held between steps"] for values in found.values()]
    axes.barh(list(found), peaks, color=_colors(found), alpha=LIGHT, height=0.68)
    axes.barh(list(found), held, color=_colors(found), height=0.68)
    _label(axes, peaks, [f"{low:.1f} to {high:.1f}" for low, high in zip(held, peaks, strict=True)])


def _colors(names: Mapping[str, Any]) -> list[str]:
    return [OURS if name.startswith("ours") else PEER for name in names]


def _label(axes: Any, ends: Sequence[float], texts: Sequence[str]) -> None:
    for row, (end, text) in enumerate(zip(ends, texts, strict=True)):
        axes.annotate(
            text, (end, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_xlim(0, 1.25 * max(ends))


#: Iterations of a moving average.
_SMOOTH = 10


def _smooth(losses: Sequence[float]) -> list[float]:
    """A moving average of the last iterations."""
    return [
        sum(losses[max(0, at - _SMOOTH + 1) : at + 1]) / min(at + 1, _SMOOTH)
        for at in range(len(losses))
    ]


def _draw_trainings(figure: Any, result: Mapping[str, Any]) -> None:
    """Loss curves of the first seed, and by seed how validation differs from that of the first
    training."""
    figure.set_size_inches(11, 4)
    curves, points = figure.subplots(1, 2, width_ratios=(1.1, 1))
    names = list(dict.fromkeys(run["name"] for run in result["runs"]))
    plain = {run["seed"]: run["validation"] for run in result["runs"] if run["name"] == names[0]}
    for number, name in enumerate(names):
        own = [run for run in result["runs"] if run["name"] == name]
        curves.plot(_smooth(own[0]["losses"]), color=f"C{number}", linewidth=1, label=name)
        values = [run["validation"] - plain[run["seed"]] for run in own]
        points.plot(values, [number] * len(values), "o", color=f"C{number}", alpha=0.7)
    curves.set(xlabel="iteration", ylabel=f"loss of the first seed, nats a byte, mean of {_SMOOTH}")
    curves.legend(frameon=False, fontsize=7)
    points.set_yticks(range(len(names)), names, fontsize=8)
    points.invert_yaxis()
    points.axvline(0, color="#999999", linewidth=0.8)
    points.set_xlabel(f"validation, bits a byte more than {names[0]}; a point a seed")
    for axes in (curves, points):
        axes.spines[["top", "right"]].set_visible(False)


def _draw_lost_node(figure: Any, result: Mapping[str, Any]) -> None:
    """Loss and learning rate by step, and steps by time, of a run with and without a lost node."""
    figure.set_size_inches(11, 4)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.2, 1), height_ratios=(2.4, 1))
    loss, steps = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[:, 1])
    rate = figure.add_subplot(grid[1, 0], sharex=loss)
    plain, lost = result["runs"]
    for axes, of in ((loss, "loss"), (rate, "lr")):
        axes.plot(plain["step"], plain[of], color=PEER, linewidth=4, label=plain["name"])
    steps.plot(plain["seconds"], plain["step"], color=PEER, linewidth=4, label=plain["name"])
    steps.plot(lost["seconds"], lost["step"], color=PEER, linestyle=":", linewidth=1)
    for first, end in _starts(lost["step"]):
        ranks = lost["ranks"][first]
        color, other = (
            (OURS, None) if ranks == max(lost["ranks"]) else (FEWER, f"the same with {ranks} ranks")
        )
        name = lost["name"] if first == 0 else other
        for axes, of in ((loss, "loss"), (rate, "lr")):
            axes.plot(
                lost["step"][first:end], lost[of][first:end], color=color, linewidth=1, label=name
            )
        steps.plot(lost["seconds"][first:end], lost["step"][first:end], color=color, linewidth=1.5)
    for text, seconds in result["events"].items():
        done = max(
            step
            for step, when in zip(lost["step"], lost["seconds"], strict=True)
            if when <= seconds
        )
        steps.annotate(
            text, (seconds, done), xytext=(3, -4), va="top", textcoords="offset points", fontsize=8
        )
    loss.set_ylabel("loss")
    rate.set(xlabel="step", ylabel="learning rate")
    steps.set(xlabel="seconds since the first step", ylabel="step")
    loss.tick_params(labelbottom=False)
    loss.legend(frameon=False, fontsize=8)
    for axes in (loss, rate, steps):
        axes.spines[["top", "right"]].set_visible(False)


def _starts(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Where each start of a run begins and ends: the next one goes back to an earlier step."""
    begins = [0, *(at for at in range(1, len(steps)) if steps[at] <= steps[at - 1]), len(steps)]
    return list(pairwise(begins))


_TIME = "Time of a training step, lower is better:\nmedian and range of the rounds"
_MEMORY = "Memory of a rank, lower is better:\nheld between steps (dark) and peak of a step (light)"
PICTURES = (
    Picture("train", "train", partial(_draw_bars, _TIME, "ms", _draw_seconds)),
    Picture("memory", "memory", partial(_draw_bars, _MEMORY, "bytes per parameter", _draw_bytes)),
    Picture("state_quality", "quality_precision", _draw_trainings),
    Picture("protect", "lost_node", _draw_lost_node),
    Picture("muon", "quality_muon", _draw_trainings),
)


def draw(picture: Picture, path: Path) -> None:
    """Draws a picture.

    Args:
        picture: one of `PICTURES`.
        path: of the file; an SVG has the digest of the picture in its description.
    """
    import matplotlib

    with matplotlib.rc_context(STYLE):
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        picture.draw(figure, json.loads(picture.result.read_text(encoding="utf-8")))
        metadata = {"Date": None, "Description": picture.digest()} if path.suffix == ".svg" else {}
        figure.savefig(path, metadata=metadata, dpi=110)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for each in PICTURES:
        draw(each, each.path)
