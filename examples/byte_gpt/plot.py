"""The curves of a run, or of two, as a PNG."""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from byte_gpt.report import Run
from byte_gpt.settings import Source

STYLES = {Source.OURS: ("tab:blue", "-"), Source.HOST: ("tab:orange", "--")}


def plot(path: Path, runs: Sequence[Run], *, order0_bits_per_byte: float, title: str) -> None:
    """Loss, gradient norm and learning rate above each other; with two runs also how far their losses are apart."""
    matplotlib.use("Agg")
    rows = 3 if len(runs) == 1 else 4
    figure = Figure(figsize=(9, 3 * rows), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, height_ratios=[2] + [1] * (rows - 1))
    _plot_loss(axes[0], runs, order0_bits_per_byte)
    _plot_gradient_norm(axes[1], runs)
    _plot_learning_rate(axes[2], runs)
    if len(runs) == 2:
        _plot_deviation(axes[3], runs)
    axes[0].set_title(title)
    axes[-1].set_xlabel("iteration")
    for panel in axes:
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _plot_loss(panel: Axes, runs: Sequence[Run], order0_bits_per_byte: float) -> None:
    panel.axhline(order0_bits_per_byte, color="gray", linestyle=":", label="order-0 entropy of the text")
    for run in runs:
        color, line = STYLES[run.source]
        bits = [iteration.loss / math.log(2) for iteration in run.history]
        panel.plot(_iterations(run), bits, line, color=color, linewidth=1, label=f"training, {run.source.value}")
        label = f"validation at the end, {run.source.value}: {run.validation_bits_per_byte:.3f}"
        marker = "o" if run.source is Source.OURS else "x"
        panel.plot([len(run.history)], [run.validation_bits_per_byte], marker, color=color, label=label)
    panel.set_ylabel("loss (bits per byte)")
    panel.legend()


def _plot_gradient_norm(panel: Axes, runs: Sequence[Run]) -> None:
    for run in runs:
        color, line = STYLES[run.source]
        norms = [math.nan if iteration.grad_norm is None else iteration.grad_norm for iteration in run.history]
        panel.plot(_iterations(run), norms, line, color=color, linewidth=1)
    panel.set_yscale("log")
    panel.set_ylabel("gradient norm\n(before clipping)")


def _plot_learning_rate(panel: Axes, runs: Sequence[Run]) -> None:
    for run in runs:
        color, line = STYLES[run.source]
        panel.plot(_iterations(run), [iteration.learning_rate for iteration in run.history], line, color=color)
    panel.set_ylabel("learning rate")


def _plot_deviation(panel: Axes, runs: Sequence[Run]) -> None:
    ours, host = runs
    pairs = zip(ours.history, host.history, strict=True)
    panel.plot(_iterations(ours), [abs(one.loss - other.loss) / math.log(2) for one, other in pairs], color="tab:red")
    panel.set_ylabel("difference of the\nlosses (bits per byte)")


def _iterations(run: Run) -> list[int]:
    return [iteration.iteration for iteration in run.history]
