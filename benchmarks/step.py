"""How long an optimizer step takes without communication, beside what a user would use instead.

    python benchmarks/step.py [--sizes 0.5 3.2 8.4 50] [--rounds 5] [--loss-scale N] [--quick]
    [--json FILE]

Sizes are millions of elements. All have the same bf16 params and the same fp32 grads, clip by the
global norm, update fp32 main params by AdamW and round to bf16, in one process of one thread. Round
after round each contestant is built, warmed up, timed and dropped. benchmarks/README.md says how
every figure is read, and what came out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import peers.environment  # noqa: F401 - before torch
import torch
import torch.distributed as dist
from peers.machine import MemoryRates, memory_rates
from peers.script import conclude, parser_of, pick
from peers.step_readings import FLOOR_NBYTES, StepReading, lines, read, summary
from peers.steppers import StepEntry, StepSetting, step_entries
from torch import Tensor

#: Least elements of a model and its width.
WIDTHS = ((150e6, 2048), (20e6, 1024), (4e6, 512), (0.75e6, 256), (0.0, 144))


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    entries = pick(step_entries(may_compile=not args.quick), args.contestants)
    readings, rates = run(entries, args)
    dist.destroy_process_group()
    settings = list(dict.fromkeys(reading.numel for reading in readings))
    found = [summary(numel, readings, rates[numel]) for numel in settings]
    conclude(args, {"sizes": found, "readings": readings}, lines(found))


def run(
    entries: Sequence[StepEntry], args: argparse.Namespace
) -> tuple[list[StepReading], dict[int, list[MemoryRates]]]:
    """All readings, and what memory did in each round, by elements: ours runs between two readings
    of that."""
    readings: list[StepReading] = []
    rates: dict[int, list[MemoryRates]] = {}
    for size in args.sizes:
        setting = setting_of(size, args.loss_scale)
        reference: list[Tensor] = []
        rates[setting.numel] = []
        # As much memory as a step of this size moves, or as much as no cache holds.
        moved = FLOOR_NBYTES * setting.numel
        for number in range(args.rounds):
            before = memory_rates(moved)
            for entry in entries:
                readings.append(read(entry, setting, number, args.repeats, reference))
                if entry is entries[0]:
                    rates[setting.numel].append(before.or_faster(memory_rates(moved)))
    return readings, rates


def setting_of(size: float, loss_scale: float | None) -> StepSetting:
    """Whole layers of about `size` million elements."""
    hidden = next(width for least, width in WIDTHS if size * 1e6 >= least)
    return StepSetting(
        max(round(size * 1e6 / (12 * hidden**2 + 13 * hidden)), 1), hidden, 0, 1, loss_scale
    )


def parse_args() -> argparse.Namespace:
    parser = parser_of(
        __doc__, "0.5 and 3.2 million elements, 3 rounds; DeepSpeed's ops are not compiled"
    )
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=[0.5, 3.2, 8.4, 50], help="millions of elements"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5, help="timed steps in a round")
    parser.add_argument(
        "--loss-scale", type=float, help="that all grads are multiplied with; none where left out"
    )
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.rounds, args.repeats = [0.5, 3.2], 3, 5
    return args


if __name__ == "__main__":
    main()
