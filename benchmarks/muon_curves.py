"""What Muon does to a training beside AdamW: the quickstart's model, both optimizers from the same seeds.

    python benchmarks/muon_curves.py [--iterations 300] [--seeds 1 2] [--quick] [--json FILE] [--plot FILE]

Every training has two ranks with one thread each, bf16 params, and the quickstart's own learning rate and decay, which
suit AdamW; Muon's rate is adjusted so that it fits (`muon_adjust_lr`, match_rms_adamw).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import peers.environment  # noqa: F401 - before torch
from peers.machine import about
from peers.plot import Drawing
from peers.plot_quality import smoothed
from peers.quickstart import train
from peers.script import table, write

#: By name: what asks for it.
OPTIMIZERS: Mapping[str, Mapping[str, str]] = {"AdamW": {}, "Muon and AdamW": {"OPTIMIZER": "muon"}}
_RANKS = 2
_TICKS = (1.5, 2, 3, 4, 5)


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        optimizer: a key of `OPTIMIZERS`.
        seed: of params and batches.
        validation: bits a byte of text that was not trained on.
        state_nbytes: main params and moments of a rank.
        losses: of every iteration, in nats a byte.
    """

    optimizer: str
    seed: int
    validation: float
    state_nbytes: int
    losses: Sequence[float]


def main() -> None:
    args, drawing = parse_args()
    if drawing.of_kept(draw):
        return
    start, runs = time.monotonic(), []
    for seed in args.seeds:
        for name, variables in OPTIMIZERS.items():
            summary, losses = train(variables, seed, args.iterations, _RANKS)
            nbytes = summary["memory_per_rank"]["state_nbytes"]
            runs.append(Run(name, seed, summary["validation_bits_per_byte"], nbytes, losses))
            print(f"{name}, seed {seed}: {runs[-1].validation:.4f} bits a byte", flush=True)
    machine = about(args.load_before, time.monotonic() - start)
    result = {**machine, "iterations": args.iterations, "runs": [asdict(each) for each in runs]}
    write(result, args.json)
    drawing.of_result(draw, result)
    print("\n".join(lines(runs)))


def lines(runs: Sequence[Run]) -> Iterator[str]:
    rows = [
        [name, f"{own[0].state_nbytes:,}", f"{statistics.mean(each.validation for each in own):.4f}", _by_seed(own)]
        for name, own in ((name, [each for each in runs if each.optimizer == name]) for name in OPTIMIZERS)
    ]
    yield from table(("optimizer", "bytes of state a rank", "bits a byte", "by seed"), rows)


def _by_seed(runs: Sequence[Run]) -> str:
    return "  ".join(f"{each.validation:.4f}" for each in runs)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """A curve a training, those of an optimizer in one color."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(OPTIMIZERS):
        own = [run for run in result["runs"] if run["optimizer"] == name]
        mean = statistics.mean(run["validation"] for run in own)
        for index, run in enumerate(own):
            label = f"{name}: {mean:.3f} bits a byte in validation" if not index else None
            axes.plot(smoothed(run["losses"]), color=f"C{number}", linewidth=1, alpha=0.85, label=label)
    axes.set(xlabel="iteration", ylabel="loss, nats a byte, mean of 10 iterations", yscale="log")
    axes.set_yticks(_TICKS, map(str, _TICKS))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title("The quickstart's model, a curve a seed", fontsize=10)
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def parse_args() -> tuple[argparse.Namespace, Drawing]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--quick", action="store_true", help="8 iterations of one seed")
    parser.add_argument("--json", type=Path, help="where to write the result")
    Drawing.add_arguments(parser)
    args = parser.parse_args()
    args.load_before = os.getloadavg()
    if args.quick:
        args.iterations, args.seeds = 8, [1]
    return args, Drawing.taken_from(args, parser)


if __name__ == "__main__":
    main()
