"""The curves of a run, or of two, as a PNG."""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from byte_gpt.records import median_step
from byte_gpt.report import Run
from byte_gpt.settings import Source

STYLES = {Source.OURS: ("tab:blue", "-"), Source.HOST: ("tab:orange", "--")}
MEMORY_PARTS = {"params": "param_nbytes", "grads": "grad_nbytes", "optimizer state": "state_nbytes"}
MEMORY_COLORS = {"params": "tab:green", "grads": "tab:gray", "optimizer state": "tab:purple"}


def plot(
    path: Path, runs: Sequence[Run], *, order0_bits_per_byte: float, title: str, ranks: int
) -> None:
    """Loss, gradient norm and learning rate over the iterations, and what a step takes in time and
    memory.

    With two runs also how far their losses are apart.
    """
    matplotlib.use("Agg")
    rows = 3 if len(runs) == 1 else 4
    figure = Figure(figsize=(10, 3 * rows + 4), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[3 * rows, 4], hspace=0.02, squeeze=False)[
        :, 0
    ]
    above.suptitle(title)
    _plot_curves(
        above.subplots(rows, 1, sharex=True, height_ratios=[2] + [1] * (rows - 1)),
        runs,
        order0_bits_per_byte,
    )
    step, memory = below.subplots(1, 2)
    _plot_step(step, runs)
    _plot_memory(memory, runs, ranks)
    figure.savefig(path, dpi=120)


def _plot_curves(panels: Sequence[Axes], runs: Sequence[Run], order0_bits_per_byte: float) -> None:
    _plot_loss(panels[0], runs, order0_bits_per_byte)
    _plot_gradient_norm(panels[1], runs)
    _plot_learning_rate(panels[2], runs)
    if len(runs) == 2:
        _plot_deviation(panels[3], runs)
    panels[-1].set_xlabel("iteration")
    for panel in panels:
        panel.grid(alpha=0.3)


def _plot_loss(panel: Axes, runs: Sequence[Run], order0_bits_per_byte: float) -> None:
    panel.axhline(
        order0_bits_per_byte, color="gray", linestyle=":", label="order-0 entropy of the text"
    )
    for run in runs:
        color, line = STYLES[run.source]
        bits = [iteration.loss / math.log(2) for iteration in run.history]
        panel.plot(
            _iterations(run),
            bits,
            line,
            color=color,
            linewidth=1,
            label=f"training, {run.source.value}",
        )
        label = f"validation at the end, {run.source.value}: {run.validation_bits_per_byte:.3f}"
        marker = "o" if run.source is Source.OURS else "x"
        panel.plot(
            [len(run.history)], [run.validation_bits_per_byte], marker, color=color, label=label
        )
    panel.set_ylabel("loss (bits per byte)")
    panel.legend()


def _plot_gradient_norm(panel: Axes, runs: Sequence[Run]) -> None:
    for run in runs:
        color, line = STYLES[run.source]
        norms = [
            math.nan if iteration.grad_norm is None else iteration.grad_norm
            for iteration in run.history
        ]
        panel.plot(_iterations(run), norms, line, color=color, linewidth=1)
    panel.set_yscale("log")
    panel.set_ylabel("gradient norm\n(before clipping)")


def _plot_learning_rate(panel: Axes, runs: Sequence[Run]) -> None:
    for run in runs:
        color, line = STYLES[run.source]
        panel.plot(
            _iterations(run),
            [iteration.learning_rate for iteration in run.history],
            line,
            color=color,
        )
    panel.set_ylabel("learning rate")


def _plot_deviation(panel: Axes, runs: Sequence[Run]) -> None:
    ours, host = runs
    pairs = zip(ours.history, host.history, strict=True)
    panel.plot(
        _iterations(ours),
        [abs(one.loss - other.loss) / math.log(2) for one, other in pairs],
        color="tab:red",
    )
    panel.set_ylabel("difference of the\nlosses (bits per byte)")


def _plot_step(panel: Axes, runs: Sequence[Run]) -> None:
    """A bar for each part and run, not one bar of all parts: communication and update can be a few
    percent."""
    height, longest = 0.8 / len(runs), 0.0
    for index, run in enumerate(runs):
        step = median_step(run.history)
        seconds = (step.forward_backward_seconds, step.communication_seconds, step.update_seconds)
        places = [part - 0.4 + height * (index + 0.5) for part in range(len(seconds))]
        color, name = STYLES[run.source][0], run.source.value
        bars = panel.barh(places, [each * 1e3 for each in seconds], height, color=color, label=name)
        labels = [f"{each * 1e3:.3g} ms ({each / step.seconds:.1%})" for each in seconds]
        panel.bar_label(bars, labels, padding=4)
        longest = max(longest, *(each * 1e3 for each in seconds))
    panel.set_yticks(range(3), ["forward and\nbackward", "communication\n(with waiting)", "update"])
    panel.invert_yaxis()
    panel.set_xlim(0, 1.6 * longest)  # with room for the labels
    panel.set_xlabel("ms an iteration")
    panel.legend(loc="lower right", fontsize="small", frameon=False)
    panel.set_title("Step time on rank 0, median of the iterations", fontsize="medium")


def _plot_memory(panel: Axes, runs: Sequence[Run], ranks: int) -> None:
    memories = [(f"{run.source.value}\none of {ranks} ranks", run.memory) for run in runs]
    memories.append(("undistributed\n(computed)", runs[0].undistributed_memory))
    widest = max(memory.nbytes for _, memory in memories)
    ends = [0.0] * len(memories)
    for name, field in MEMORY_PARTS.items():
        widths = [getattr(memory, field) / 1e6 for _, memory in memories]
        bars = panel.barh(
            range(len(memories)), widths, 0.6, left=ends, label=name, color=MEMORY_COLORS[name]
        )
        inside = [f"{width:.1f}" if width * 1e6 > widest / 10 else "" for width in widths]
        panel.bar_label(bars, inside, label_type="center", color="white")
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for place, end in enumerate(ends):
        panel.annotate(
            f"{end:.1f} MB", (end, place), (4, 0), textcoords="offset points", va="center"
        )
    panel.set_yticks(range(len(memories)), [name for name, _ in memories])
    panel.set_ylim(len(memories) - 0.5, -1.0)  # the first on top, room for the legend above it
    panel.set_xlim(0, 1.25 * widest / 1e6)
    panel.set_xlabel("MB a rank (millions of bytes)")
    panel.set_title("Memory between steps", fontsize="medium")
    panel.legend(loc="upper center", ncols=len(MEMORY_PARTS), fontsize="small", frameon=False)


def _iterations(run: Run) -> list[int]:
    return [iteration.iteration for iteration in run.history]
