"""How long an optimizer step takes without communication, beside what a user would use instead.

    python benchmarks/step.py [--sizes 1 8 32 100 300] [--rounds 5] [--loss-scale N] [--quick] [--json FILE]
                              [--plot FILE]

Sizes are millions of elements. All have the same bf16 params and the same fp32 grads, clip by the global norm, update
fp32 main params by AdamW and round to bf16, in one process of one thread. Round after round each contestant is built,
warmed up, timed and dropped. benchmarks/README.md says how every figure is read, and what came out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

import peers.environment  # noqa: F401 - before torch
import torch
import torch.distributed as dist
from peers.machine import MemoryRates, about, memory_rates
from peers.plot import Drawing
from peers.plot_training import draw_step
from peers.ratios import Spread, over, spread
from peers.script import parser_of, pick, settings_of, table, write
from peers.step_contestants import StepEntry, step_entries
from peers.step_reading import TOLERANCE, StepReading, read
from peers.steppers import StepSetting
from torch import Tensor

#: What a step has to read and write: grad 4, main param 8, two moments 16, model param 2.
FLOOR_NBYTES = 30
#: Least elements of a model and its width.
WIDTHS = ((150e6, 2048), (20e6, 1024), (4e6, 512), (0.0, 256))


def main() -> None:
    args, drawing = parse_args()
    if drawing.of_kept(draw_step):
        return
    start = time.monotonic()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    entries = pick(step_entries(may_compile=not args.quick), args.contestants)
    readings, rates = run(entries, args)
    dist.destroy_process_group()
    settings = list(dict.fromkeys(reading.numel for reading in readings))
    found = [summary(numel, readings, rates[numel]) for numel in settings]
    about_it = about(args.load_before, time.monotonic() - start)
    result = {**about_it, "settings": settings_of(args), "sizes": found, "readings": readings}
    write(result, args.json)
    drawing.of_result(draw_step, result)
    for line in lines(found):
        print(line)


def run(
    entries: Sequence[StepEntry], args: argparse.Namespace
) -> tuple[list[StepReading], dict[int, list[MemoryRates]]]:
    """All readings, and what memory did in each round, by elements."""
    readings: list[StepReading] = []
    rates: dict[int, list[MemoryRates]] = {}
    for size in args.sizes:
        setting = setting_of(size, args.loss_scale)
        reference: list[Tensor] = []
        rates[setting.numel] = []
        for number in range(args.rounds):
            rates[setting.numel].append(memory_rates(FLOOR_NBYTES * setting.numel))
            readings += [read(entry, setting, number, args.repeats, reference) for entry in entries]
    return readings, rates


def setting_of(size: float, loss_scale: float | None) -> StepSetting:
    """Whole layers of about `size` million elements."""
    hidden = next(width for least, width in WIDTHS if size * 1e6 >= least)
    return StepSetting(max(round(size * 1e6 / (12 * hidden**2 + 13 * hidden)), 1), hidden, 0, 1, loss_scale)


def summary(numel: int, readings: Sequence[StepReading], rates: list[MemoryRates]) -> dict[str, Any]:
    """Ratios first."""
    mine = [reading for reading in readings if reading.numel == numel]
    names = list(dict.fromkeys(reading.contestant for reading in mine))
    rounds = {name: [r for r in mine if r.contestant == name] for name in names}
    medians = {name: [spread(r.seconds).median for r in found if r.seconds] for name, found in rounds.items()}
    copies = [rate.copy for rate in rates]
    return {
        "numel": numel,
        "peer / ours": {name: over(medians[name], medians["ours"]) for name in names if name != "ours"},
        "share of the copy bandwidth": {
            name: spread([FLOOR_NBYTES * numel / s / c for s, c in zip(medians[name], copies, strict=False)])
            for name in names
        },
        "copy_bytes_per_second": spread(copies),
        "in_place_bytes_per_second": spread([rate.in_place for rate in rates]),
        "seconds": {name: spread([s for r in rounds[name] for s in r.seconds]) for name in names},
        "deviation": {name: rounds[name][0].deviation for name in names},
        "why_not": {name: rounds[name][0].why_not for name in names if rounds[name][0].why_not},
    }


def lines(sizes: Sequence[dict[str, Any]]) -> Iterator[str]:
    for size in sizes:
        yield ""
        copy, in_place = (size[name].times(1e-9) for name in ("copy_bytes_per_second", "in_place_bytes_per_second"))
        yield f"{size['numel'] / 1e6:.1f} M elements; a copy moves {copy} GB/s, a product in place {in_place}"
        header = ("", "peer / ours", "ms", "GB/s", "of copy", "apart", "")
        yield from table(header, [row(name, size) for name in size["seconds"]])
    yield ""
    yield "; ".join(last_words(size) for size in sizes)


def row(name: str, size: dict[str, Any]) -> tuple[str, ...]:
    seconds: Spread | None = size["seconds"][name]
    if seconds is None:
        return (name, "-", "-", "-", "-", "-", size["why_not"][name])
    off = size["deviation"][name]
    note = "" if off <= TOLERANCE else f"NOT THE SAME WORK: params differ by more than {TOLERANCE:.1%} of their change"
    rate = FLOOR_NBYTES * size["numel"] / seconds.median / 1e9
    share = size["share of the copy bandwidth"][name].median
    ratio = "" if name == "ours" else str(size["peer / ours"][name])
    return (name, ratio, str(seconds.times(1e3)), f"{rate:.1f}", f"{share:.0%}", f"{off:.1e}", note)


def last_words(size: dict[str, Any]) -> str:
    ratios = {name: ratio.median for name, ratio in size["peer / ours"].items() if ratio}
    others = {name: ratio for name, ratio in ratios.items() if not name.startswith("A2")}
    parts = [f"{name}/ours {ratio:.2f}" for name, ratio in ratios.items() if name.startswith("A2")]
    if others:
        best = min(others, key=lambda name: others[name])
        parts.append(f"best peer ({best})/ours {others[best]:.2f}")
    parts.append(f"ours at {size['share of the copy bandwidth']['ours'].median:.0%} of a copy's bandwidth")
    return f"{size['numel'] / 1e6:.0f} M: " + ", ".join(parts)


def parse_args() -> tuple[argparse.Namespace, Drawing]:
    parser = parser_of(__doc__, "4 million elements, 3 rounds; DeepSpeed's ops are not compiled")
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 8, 32, 100, 300], help="millions of elements")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5, help="timed steps in a round")
    parser.add_argument("--loss-scale", type=float, help="that all grads are multiplied with; none where left out")
    Drawing.add_arguments(parser)
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.rounds, args.repeats = [4], 3, 5
    return args, Drawing.taken_from(args, parser)


if __name__ == "__main__":
    main()
