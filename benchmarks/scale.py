"""What it costs to plan and to build the optimizer of one rank, against the number of ranks and of params.

    python benchmarks/scale.py [--rounds 5] [--quick] [--json FILE] [--plot FILE]

A GPT in bf16 with fp32 grads, buckets of 40 million elements, data parallelism alone, rank 0 of torch's fake process
group. Params, buffers, main params and moments are meta tensors, which have no memory; everything else is the code that
training runs. Every reading is taken in a process of its own, in processor time, which other processes stretch less.
benchmarks/README.md says how each figure is read.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import peers.environment  # noqa: F401 - before torch
import torch
from peers.machine import about
from peers.plot import Drawing
from peers.plot_scale import draw_scale
from peers.ratios import ByRound, Spread, by_round, over, spread
from peers.script import table, write

from megatron_distopt.cli.plan_build import build
from megatron_distopt.cli.plan_choice import plan_choice, plan_stage
from megatron_distopt.cli.plan_model import Choice, GptSizes, ParallelSizes
from megatron_distopt.cli.plan_times import Assumed, times_of

BUCKET_SIZE = 40_000_000
RANKS = (2, 8, 32, 128, 512, 2048, 8192)
#: Layers and width of models of 10**6 to 10**12 elements.
MODELS = ((4, 144), (8, 320), (12, 832), (24, 1856), (40, 4544), (80, 10240), (128, 25600))
#: Layers of one width, for the number of tensors alone.
LAYERS = (32, 256, 2048)
MODEL_OF_RANKS, RANKS_OF_MODELS, WIDTH_OF_LAYERS = (24, 1856), 4096, 64


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is planned and built."""

    sweep: str
    ranks: int
    layers: int
    hidden: int

    @property
    def gpt(self) -> GptSizes:
        return GptSizes(layers=self.layers, hidden=self.hidden, vocab=128, positions=0)


@dataclasses.dataclass(frozen=True)
class Reading:
    """One setting in one round.

    Args:
        numel, tensors: params of the model.
        plan_seconds: layout, bytes, collectives and timeline, without torch.
        group_seconds, layout_seconds, optimizer_seconds, update_seconds: see `plan_build.Seconds`.
        process_nbytes: by which building raised the peak of the process.
        holds_nbytes: what the rank would hold.
        wall_seconds: of planning and building together, by the clock on the wall.
    """

    setting: Setting
    round: int
    numel: int
    tensors: int
    plan_seconds: float
    group_seconds: float
    layout_seconds: float
    optimizer_seconds: float
    update_seconds: float
    process_nbytes: int
    holds_nbytes: int
    wall_seconds: float

    @property
    def build_seconds(self) -> float:
        """Until training could begin."""
        return self.layout_seconds + self.optimizer_seconds


def main() -> None:
    args, drawing = parse_args()
    if drawing.of_kept(draw_scale):
        return
    start = time.monotonic()
    torch.set_num_threads(1)
    warm_up()
    settings = settings_of(quick=args.quick)
    readings = [in_a_process(read, setting, number) for number in range(args.rounds) for setting in settings]
    result = {**about(args.load_before, time.monotonic() - start), "ratios": ratios(readings), "readings": readings}
    write(result, args.json)
    for line in lines(readings):
        print(line)
    drawing.of_result(draw_scale, result)
    print(last_line(readings))


def settings_of(*, quick: bool) -> list[Setting]:
    """The quick form leaves out what lies between the ends."""
    every = 3 if quick else 1
    found = [Setting("ranks", ranks, *MODEL_OF_RANKS) for ranks in RANKS[::every]]
    found += [Setting("params", RANKS_OF_MODELS, *model) for model in MODELS[::every]]
    return found + [Setting("tensors", RANKS_OF_MODELS, layers, WIDTH_OF_LAYERS) for layers in LAYERS]


def in_a_process(function: Callable[..., Any], *args: object) -> Any:
    """Forked, so that it starts with what is imported here and leaves nothing behind."""
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return pool.apply(function, args)


def warm_up() -> None:
    """torch imports a part of itself when the first optimizer is made; the processes inherit it.

    What is there by then is kept from the garbage collector, which would make the processes copy it.
    """
    build(plan_stage(GptSizes(layers=1, hidden=64, vocab=128), Choice(ParallelSizes(dp=2)), 0), 0)
    gc.collect()
    gc.freeze()


def read(setting: Setting, number: int) -> Reading:
    """Plans and builds."""
    choice = Choice(ParallelSizes(dp=setting.ranks), bucket_size=BUCKET_SIZE)
    wall, start = time.perf_counter(), time.process_time()
    plan = plan_choice(setting.gpt, choice).fullest
    times_of(plan, Assumed(12.5e9, backward_seconds=1.0))
    footprint = plan.footprint
    planned = time.process_time()
    built = build(plan, 0, time.process_time)
    wall = time.perf_counter() - wall
    if (built.main_nbytes, built.num_flat_params) != (footprint.main_nbytes, footprint.num_flat_params):
        raise RuntimeError(f"{setting} was built with {built.main_nbytes} bytes, planned were {footprint.main_nbytes}")
    seconds = built.seconds
    return Reading(
        *(setting, number, plan.numel, len(plan.params), planned - start, seconds.groups),
        *(seconds.layout, seconds.optimizer, seconds.update, built.process_nbytes, built.lasting_nbytes),
        wall,
    )


def of_sweep(readings: Sequence[Reading], sweep: str) -> list[list[Reading]]:
    """By setting, in order."""
    settings = dict.fromkeys(reading.setting for reading in readings if reading.setting.sweep == sweep)
    return [[reading for reading in readings if reading.setting == setting] for setting in settings]


def ratios(readings: Sequence[Reading]) -> dict[str, Spread | None]:
    """Of readings of the same round, the largest setting over the smallest."""
    found = {}
    few, *_, many = of_sweep(readings, "ranks")
    for what in ("plan", "build"):
        found[f"{what}, 8192 ranks / 2 ranks"] = over(seconds(many, what), seconds(few, what))
    for sweep, text in (("params", "1e12 elements / 1e6 elements"), ("tensors", "most tensors / fewest")):
        small, *_, large = of_sweep(readings, sweep)
        for what in ("plan", "build"):
            found[f"{what} per tensor, {text}"] = over(per_tensor(large, what), per_tensor(small, what))
    return found


def seconds(readings: Sequence[Reading], what: str) -> ByRound:
    """Of "plan" or "build"."""
    return by_round((each.round, getattr(each, f"{what}_seconds")) for each in readings)


def per_tensor(readings: Sequence[Reading], what: str) -> ByRound:
    """Seconds of "plan" or "build" over the tensors of the model."""
    return by_round((each.round, getattr(each, f"{what}_seconds") / each.tensors) for each in readings)


def lines(readings: Sequence[Reading]) -> Iterator[str]:
    header = (
        "sweep",
        "ranks",
        "elements",
        "tensors",
        "plan ms",
        "layout ms",
        "optimizer ms",
        "update ms",
        "MiB",
        "wall s",
    )
    settings = [each for sweep in ("ranks", "params", "tensors") for each in of_sweep(readings, sweep)]
    yield from table(header, [row(each) for each in settings])


def row(repeats: Sequence[Reading]) -> list[str]:
    first = repeats[0]
    columns = [
        [reading.plan_seconds for reading in repeats],
        [reading.layout_seconds for reading in repeats],
        [reading.optimizer_seconds for reading in repeats],
        [reading.update_seconds for reading in repeats],
    ]
    cells = [f"{median(column) * 1e3:.2f}" for column in columns]
    nbytes = median([reading.process_nbytes for reading in repeats])
    head = [first.setting.sweep, f"{first.setting.ranks:,}", f"{first.numel:.3g}", f"{first.tensors:,}"]
    wall = median([reading.wall_seconds for reading in repeats])
    return [*head, *cells, f"{nbytes / 2**20:.1f}", f"{wall:>6.3f}"]


def median(values: Sequence[float]) -> float:
    found = spread(values)
    return found.median if found else 0.0


def last_line(readings: Sequence[Reading]) -> str:
    told = ratios(readings)
    largest = of_sweep(readings, "params")[-1]
    wall = median([reading.wall_seconds for reading in largest])
    nbytes = median([reading.process_nbytes for reading in largest]) / 2**20
    text = "; ".join(f"{name}: {value.median:.2f}" for name, value in told.items() if value)
    first = largest[0]
    size = f"{first.numel:.3g} elements on {first.setting.ranks:,} ranks"
    return f"{text}; {size}: planned and built in {wall:.2f} s and {nbytes:.0f} MiB"


def parse_args() -> tuple[argparse.Namespace, Drawing]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="over all settings")
    parser.add_argument("--quick", action="store_true", help="the ends of each sweep and one between, 3 rounds")
    parser.add_argument("--json", type=Path, help="where to write the result")
    Drawing.add_arguments(parser)
    args = parser.parse_args()
    args.load_before = os.getloadavg()
    if args.quick:
        args.rounds = 3
    return args, Drawing.taken_from(args, parser)


if __name__ == "__main__":
    main()
