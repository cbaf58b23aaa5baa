"""What state in low precision and on the host costs in megatron-core, beside its own optimizers for both.

    python benchmarks/core_state.py [--size N] [--rounds N] [--transformer-engine FOLDER] [--quick] [--json FILE]
                                    [--plot FILE]

The same model, DistributedDataParallel and flags for all, one rank, whole steps from gradients to new params. First
state in low precision, on the CPU: its precision-aware optimizer is TransformerEngine's FusedAdam, which has no kernel
for a CPU, so that over stand-ins of its kernels memory alone is read. Then state on the host, on the simulated
accelerator: what the host computes, and where the bytes are. benchmarks/README.md says how every figure is read.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import peers.environment  # noqa: F401 - before torch
from peers.core_offload import DEVICE, Simulated, offload_entries
from peers.core_state import StateReading, low_precision_entries, measure, take_time
from peers.machine import about
from peers.plot import Bar, Drawing, Panel, Row, draw_panels
from peers.ranks import log, run_on_ranks
from peers.ratios import by_round, over, spread
from peers.script import parser_of, settings_of, table, write
from peers.steppers import StepSetting
from torch import Tensor

#: Width of the layers.
_HIDDEN = 512
LOW, HOST = "state in low precision, on the CPU", "state on the host, on the simulated accelerator"
#: Figures of a part, in the order of the columns.
FIGURES = {
    LOW: ("state", "more in a step", "apart"),
    HOST: ("on the host", "pinned", "on the device", "more on the device", "down", "up", "apart"),
}


def main() -> None:
    args, drawing = parse_args()
    if drawing.of_kept(draw):
        return
    start = time.monotonic()
    readings: dict[str, list[StateReading]] = {LOW: [], HOST: []}
    failures = []
    for part, run, variables in (
        # What is freed goes back to the system at once, so that the high-water mark is that of live memory.
        (LOW, read_memory, {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}),
        (LOW, read_times, {}),
        (HOST, read_on_host, {}),
    ):
        with mock.patch.dict(os.environ, variables):
            logged, why = run_on_ranks(run, 1, args)
        readings[part] += [StateReading(**each) for each in logged]
        failures += [why] if why else []
    numel = setting_of(args.size).numel
    parts = {part: summary(found) for part, found in readings.items()}
    about_it = about(args.load_before, time.monotonic() - start)
    result = {**about_it, "settings": settings_of(args), "numel": numel, "parts": parts, "failures": failures}
    write(result, args.json)
    drawing.of_result(draw, result)
    print("\n".join([*failures, *lines(result)]))


def setting_of(size: float, device: str = "cpu") -> StepSetting:
    """Whole layers of about `size` million elements."""
    return StepSetting(max(round(size * 1e6 / (12 * _HIDDEN**2 + 13 * _HIDDEN)), 1), _HIDDEN, 0, 1, None, device)


def read_memory(rank: int, size: int, path: Path, args: argparse.Namespace) -> None:
    """Each contestant with a small model, so that imports are over, then with the real one."""
    entries, reference = low_precision_entries(_folder(args)), list[Tensor]()
    for entry in entries:
        measure(entry, setting_of(0), list[Tensor]())
    for entry in entries:
        log(measure(entry, setting_of(args.size), reference), path)


def read_times(rank: int, size: int, path: Path, args: argparse.Namespace) -> None:
    """Contestants take turns in every round; the first is not counted."""
    for number in range(-1, args.rounds):
        for entry in low_precision_entries(_folder(args)):
            reading = take_time(entry, setting_of(args.size), number, args.repeats)
            if number >= 0:
                log(reading, path)


def read_on_host(rank: int, size: int, path: Path, args: argparse.Namespace) -> None:
    """The same on the simulated accelerator, which this process then has for good."""
    device, reference = Simulated(), list[Tensor]()
    for number in range(-1, args.rounds):
        for entry in offload_entries():
            reading = device.read(entry, setting_of(args.size, DEVICE), number, reference)
            if number >= 0:
                log(reading, path)


def _folder(args: argparse.Namespace) -> Path | None:
    return Path(args.transformer_engine) if args.transformer_engine else None


def summary(readings: Sequence[StateReading]) -> list[dict[str, Any]]:
    """A row a contestant: its time over that of ours in the same state and round, and its bytes."""
    names = {each.name: each.state for each in readings}
    ours = {state: name for name, state in reversed(names.items()) if name.startswith("ours")}
    times = {name: by_round((r.round, r.ns) for r in readings if r.name == name and r.ns) for name in names}
    rows = []
    for name, state in names.items():
        own = [each for each in readings if each.name == name]
        compared = times.get(ours.get(state, ""), {}) if ours.get(state) != name else {}
        row = {
            "name": name,
            "state": state,
            "ns": spread(list(times[name].values())),
            "over": over(times[name], compared),
        }
        figures = next((each.figures for each in own if each.figures), {})
        rows.append({**row, "figures": figures, "why_not": next((each.why_not for each in own if each.why_not), "")})
    return rows


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    for part, rows in result["parts"].items():
        yield f"\n{part}: {result['numel'] / 1e6:.1f} M elements; ns of CPU time of a step, and bytes, an element"
        yield from table(("", "ns", "/ ours", *FIGURES[part], ""), [cells(row, FIGURES[part]) for row in rows])


def cells(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    figures = [row["figures"].get(name) for name in names]
    shown = [
        "-" if value is None else f"{value:.1e}" if name == "apart" else f"{value:.2f}"
        for name, value in zip(names, figures, strict=True)
    ]
    why_not = (
        row["why_not"]
        and f"{'time' if row['figures'] else 'did'} not {'read' if row['figures'] else 'run'}: {row['why_not']}"
    )
    ns, ratio = row["ns"], row["over"]
    return [row["name"], f"{ns.median:.2f}" if ns else "-", f"{ratio.median:.2f}" if ratio else "", *shown, why_not]


def draw(result: Mapping[str, Any], path: Path) -> None:
    """A panel of times and one of bytes for each part."""
    panels = []
    for part, rows in result["parts"].items():
        times = [Row(row["name"], (_times(row),), row["why_not"]) for row in rows]
        kinds = ("state", "more in a step") if part == LOW else ("on the host", "on the device")
        nbytes = [Row(row["name"], tuple(_bytes(row, kind) for kind in kinds), row["why_not"]) for row in rows]
        label = f"bytes an element: {kinds[0]}; pale: {kinds[1]}"
        panels.append([Panel(part, "ns of CPU time of a step, an element", times), Panel("", label, nbytes)])
    draw_panels(f"A step in megatron-core, {result['numel'] / 1e6:.1f} M elements, one rank", panels, path)


def _times(row: Mapping[str, Any]) -> Bar | None:
    found = row["ns"]
    return found and Bar((found["median"], found["least"], found["most"]), f"{found['median']:.1f}")


def _bytes(row: Mapping[str, Any], kind: str) -> Bar | None:
    value = row["figures"].get(kind)
    return None if value is None else Bar([value] * 3, f"{value:.1f}")


def parse_args() -> tuple[argparse.Namespace, Drawing]:
    parser = parser_of(__doc__, "3 million elements, two rounds")
    parser.add_argument("--size", type=float, default=6, help="millions of elements")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="timed steps in a round")
    text = "what `pip install --no-deps --target FOLDER transformer_engine` filled; not to be on Python's path"
    parser.add_argument("--transformer-engine", default="", metavar="FOLDER", help=text)
    Drawing.add_arguments(parser)
    args = parser.parse_args()
    if args.quick:
        args.size, args.rounds, args.repeats = 3, 2, 2
    return args, Drawing.taken_from(args, parser)


if __name__ == "__main__":
    main()
