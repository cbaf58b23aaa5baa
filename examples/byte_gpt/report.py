"""What is left of a run: metrics, summary and plot in a folder, and the figures on the screen."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from byte_gpt.choose import Choice
from byte_gpt.records import Iteration, Memory, StepTime, median_step
from byte_gpt.settings import Source


@dataclass(frozen=True)
class Run:
    """One training run and what came of it."""

    source: Source
    history: list[Iteration]
    validation_bits_per_byte: float
    memory: Memory
    undistributed_memory: Memory
    sample: str


@dataclass(frozen=True)
class Summary:
    """summary.json. Losses are in nats a byte.

    Args:
        choice: precision, iterations and batch, why these, and what was measured for it.
        step: of each part the median over the iterations, on rank 0.
        memory_per_rank: of the rank that keeps most, as allocated.
        memory_undistributed: of each rank if no state were sharded, computed.
        seconds: of training alone.
    """

    first_loss: float
    last_loss: float
    validation_bits_per_byte: float
    order0_bits_per_byte: float
    choice: Choice
    step: StepTime
    memory_per_rank: Memory
    memory_undistributed: Memory
    ranks: int
    launcher: str
    device: str
    seconds: float


def summarize(
    run: Run, choice: Choice, *, order0_bits_per_byte: float, ranks: int, launcher: str, device: str
) -> Summary:
    return Summary(
        first_loss=run.history[0].loss,
        last_loss=run.history[-1].loss,
        validation_bits_per_byte=run.validation_bits_per_byte,
        order0_bits_per_byte=order0_bits_per_byte,
        choice=choice,
        step=median_step(run.history),
        memory_per_rank=run.memory,
        memory_undistributed=run.undistributed_memory,
        ranks=ranks,
        launcher=launcher,
        device=device,
        seconds=run.history[-1].seconds,
    )


def write(folder: Path, summary: Summary, runs: Sequence[Run]) -> None:
    """summary.json and metrics.jsonl of the first run, and metrics-host.jsonl of the one that it is
    compared with."""
    (folder / "summary.json").write_text(
        json.dumps(asdict(summary), indent=2, default=_name) + "\n"
    )
    for name, run in zip(("metrics.jsonl", "metrics-host.jsonl"), runs, strict=False):
        lines = [json.dumps(asdict(iteration)) + "\n" for iteration in run.history]
        (folder / name).write_text("".join(lines))


def largest_deviation(ours: Run, host: Run) -> float:
    """The largest difference of the two training losses at one iteration, in nats a byte.

    In fp32 it is rounding, 2e-6 after 12 iterations. In bf16 it grows to a few hundredths within
    100: as far as megatron-core's own curve moves when the learning rate is changed by 1e-7 of
    itself.
    """
    deviations = [
        abs(one.loss - other.loss) for one, other in zip(ours.history, host.history, strict=True)
    ]
    return max(deviations)


def describe(summary: Summary) -> str:
    kept, whole, step = (
        summary.memory_per_rank.nbytes,
        summary.memory_undistributed.nbytes,
        summary.step,
    )
    return "\n".join(
        (
            f"training loss     {_both(summary.first_loss)} at the first iteration",
            f"                  {_both(summary.last_loss)} at the last",
            f"validation loss   {summary.validation_bits_per_byte:.3f} bits a byte"
            f" (order-0 entropy of the text: {summary.order0_bits_per_byte:.3f})",
            f"one iteration     {step.forward_backward_seconds * 1e3:.0f} ms forward and backward, "
            f"{step.communication_seconds * 1e3:.0f} ms communication, "
            f"{step.update_seconds * 1e3:.0f} ms update",
            f"memory            {kept / 1e6:.1f} MB of params, grads and optimizer state on each "
            f"of {summary.ranks} ranks; undistributed {whole / 1e6:.1f} MB",
            f"training took     {summary.seconds:.0f} s on {summary.device}, started by "
            f"{summary.launcher}",
        )
    )


def describe_comparison(ours: Run, host: Run) -> str:
    return (
        f"megatron-core's   {host.memory.nbytes / 1e6:.1f} MB a rank, validation loss"
        f" {host.validation_bits_per_byte:.3f} bits a byte;"
        f" largest deviation of the training loss {largest_deviation(ours, host):.2e} nats a byte"
    )


def _name(value: Any) -> str:
    """What json cannot write by itself: the precisions."""
    if isinstance(value, Enum):
        return value.name.lower()
    raise TypeError(f"Invalid value for summary.json: {value!r}.")


def _both(nats: float) -> str:
    return f"{nats:.3f} nats = {nats / math.log(2):.3f} bits a byte"
