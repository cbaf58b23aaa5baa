"""What does a record of digests cost beside a training step, in CPU time for each element that the rank owns?

    python benchmarks/digests.py [--rounds N] [--quick] [--json FILE] [--plot FILE]

The same training runs without digests and with a record in every step, turn by turn, on one rank with one thread. Time
is that of the process, because others may use the machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import peers.environment  # noqa: F401 - before torch
import torch
import torch.distributed as dist
from peers.machine import about
from peers.plot import Bar, Drawing, Panel, Row, draw_panels
from peers.script import parser_of, table, write
from peers.trainers import Ours
from peers.transformer import TrainSetting, batch

#: Layers, hidden size and sequences of a step; a sequence has 256 tokens.
MODELS = ((4, 256, 8), (4, 256, 4), (8, 256, 4))
QUICK = ((1, 64, 1),)
#: Steps from one record to the next.
EVERY = (1, 10, 100)


@dataclass(frozen=True)
class Reading:
    """Of one model: nanoseconds of CPU time an element, medians.

    Args:
        numel: elements of the model.
        tokens: of a step.
        step_ns: of a step without digests.
        record_ns: what a record adds to it.
    """

    numel: int
    tokens: int
    step_ns: float
    record_ns: float

    def share(self, every: int) -> float:
        """Of a step, where every so many steps have a record."""
        return self.record_ns / self.step_ns / every


def read(layers: int, hidden: int, sequences: int, rounds: int) -> Reading:
    """Needs a process group of one rank."""
    setting = TrainSetting(layers, hidden, 256, 256, sequences, 10**9, 0, 1)
    with tempfile.TemporaryDirectory() as folder:
        trainers = Ours(setting), Ours(setting, log_digests=1, digest_file=f"{folder}/digests")
        seconds = [tuple(_seconds_of(each, setting, number) for each in trainers) for number in range(rounds + 1)][1:]
    step = statistics.median(pair[0] for pair in seconds)
    record = statistics.median(pair[1] - pair[0] for pair in seconds)
    return Reading(
        setting.numel, setting.sequence * sequences, step * 1e9 / setting.numel, record * 1e9 / setting.numel
    )


def _seconds_of(trainer: Ours, setting: TrainSetting, number: int) -> float:
    """CPU time of a training step."""
    tokens, start = batch(setting, number), time.process_time()
    trainer.train(tokens)
    return time.process_time() - start


def lines(readings: Sequence[Reading]) -> Iterator[str]:
    shares = [f"1 record in {every}" for every in EVERY]
    rows = [
        [f"{each.numel:,}", f"{each.tokens:,}", f"{each.step_ns:.0f} ns", f"{each.record_ns:.1f} ns"]
        + [f"{each.share(every):.2%}" for every in EVERY]
        for each in readings
    ]
    yield from table(("elements", "tokens", "step", "record", *shares), rows)


def draw(result: dict[str, object], path: object) -> None:
    """A step, and a record, of each model."""
    rows = []
    for each in (Reading(**row) for row in result["rows"]):  # type: ignore[attr-defined]
        model = f"{each.numel / 1e6:.2f} M elements, {each.tokens:,} tokens"
        rows += [Row(f"{model}: step", (_bar(each.step_ns),)), Row(f"{model}: record", (_bar(each.record_ns),))]
    panel = Panel("", "ns of CPU time an element", rows)
    draw_panels("a record of digests beside a training step", [[panel]], path)  # type: ignore[arg-type]


def _bar(value: float) -> Bar:
    return Bar((value, value, value), f"{value:.1f}")


def main() -> None:
    args, drawing = parse_args()
    if drawing.of_kept(draw):
        return
    start = time.monotonic()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    readings = [read(*model, args.rounds) for model in (QUICK if args.quick else MODELS)]
    dist.destroy_process_group()
    result: dict[str, Any] = {**about(args.load_before, time.monotonic() - start), "rounds": args.rounds}
    result["rows"] = [*map(asdict, readings)]
    write(result, args.json)
    drawing.of_result(draw, result)
    print("\n".join(lines(readings)))


def parse_args() -> tuple[argparse.Namespace, Drawing]:
    parser = parser_of(__doc__, "a small model, three rounds")
    parser.add_argument("--rounds", type=int, default=15)
    Drawing.add_arguments(parser)
    args = parser.parse_args()
    if args.quick:
        args.rounds = 3
    return args, Drawing.taken_from(args, parser)


if __name__ == "__main__":
    main()
