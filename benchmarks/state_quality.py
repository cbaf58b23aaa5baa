"""What optimizer state in low precision does to a training: the quickstart's model, from several seeds.

    python benchmarks/state_quality.py [--iterations 150] [--seeds 1 2 3] [--quick] [--json FILE] [--plot FILE]

Every training is a process of its own on one rank with one thread, with bf16 params. What differs between trainings of
one seed is the precision of the state. benchmarks/README.md says how each figure is read.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import peers.environment  # noqa: F401 - before torch
from peers.machine import about
from peers.plot import Drawing
from peers.plot_quality import draw_quality
from peers.quickstart import train
from peers.script import table, write

FP32 = "fp32"
#: By name: forms of main params and of both moments.
PRECISIONS = {
    FP32: ("float32", "float32", "float32"),
    "remainder": ("remainder", "float32", "float32"),
    "remainder, bf16": ("remainder", "bfloat16", "bfloat16"),
    "remainder, fp16": ("remainder", "float16", "float16"),
    "remainder, fp8 E4M3": ("remainder", "float8_e4m3fn", "float8_e4m3fn"),
    "remainder, fp8 E5M2": ("remainder", "float8_e5m2", "float8_e5m2"),
    "remainder, int8": ("remainder", "int8", "int8"),
    "bf16, int8": ("bfloat16", "int8", "int8"),
}
_VARIABLES = ("MAIN_PARAMS_DTYPE", "EXP_AVG_DTYPE", "EXP_AVG_SQ_DTYPE")


@dataclass(frozen=True)
class Reading:
    """One training.

    Args:
        precision: a key of `PRECISIONS`.
        seed: of params and batches.
        validation: bits a byte of text that was not trained on.
        losses: of every iteration, in nats a byte.
        state_nbytes: of main params and moments.
    """

    precision: str
    seed: int
    validation: float
    losses: Sequence[float]
    state_nbytes: int


def main() -> None:
    args, drawing = parse_args()
    if drawing.of_kept(draw_quality):
        return
    start, readings = time.monotonic(), []
    for seed in args.seeds:
        for name in args.precisions:
            readings.append(read(name, seed, args.iterations))
            print(f"{name}, seed {seed}: {readings[-1].validation:.4f} bits a byte", flush=True)
    machine = about(args.load_before, time.monotonic() - start)
    result = {**machine, "iterations": args.iterations, "runs": [asdict(each) for each in readings]}
    write(result, args.json)
    drawing.of_result(draw_quality, result)
    print("\n".join(lines(readings)))
    print(last_line(readings))


def read(name: str, seed: int, iterations: int) -> Reading:
    """Trains once."""
    variables = dict(zip(_VARIABLES, PRECISIONS[name], strict=True))
    summary, losses = train(variables, seed, iterations)
    nbytes = summary["memory_per_rank"]["state_nbytes"]
    return Reading(name, seed, summary["validation_bits_per_byte"], losses, nbytes)


def of(readings: Sequence[Reading], name: str) -> list[Reading]:
    """By seed."""
    return sorted((each for each in readings if each.precision == name), key=lambda each: each.seed)


def differences(readings: Sequence[Reading], name: str) -> list[float]:
    """Of validation, by seed: how much worse than with fp32 state."""
    pairs = zip(of(readings, name), of(readings, FP32), strict=True)
    return [this.validation - plain.validation for this, plain in pairs]


def lines(readings: Sequence[Reading]) -> Iterator[str]:
    header = ("state", "bytes", "bits a byte", "more than fp32, by seed", "losses")
    names = dict.fromkeys(each.precision for each in readings)
    yield from table(header, [row(readings, name) for name in names])


def row(readings: Sequence[Reading], name: str) -> list[str]:
    own = of(readings, name)
    more = "  ".join(f"{each:+.4f}" for each in differences(readings, name))
    pairs = zip(own, of(readings, FP32), strict=True)
    is_equal = all(this.losses == plain.losses for this, plain in pairs)
    mean = statistics.mean(each.validation for each in own)
    return [name, f"{own[0].state_nbytes:,}", f"{mean:.4f}", more, "equal to the bit" if is_equal else "differ"]


def last_line(readings: Sequence[Reading]) -> str:
    plain = [each.validation for each in of(readings, FP32)]
    apart = max(plain) - min(plain)
    worst = {each.precision: statistics.mean(differences(readings, each.precision)) for each in readings}
    name = max(worst, key=worst.__getitem__)
    return f"worst mean: {worst[name]:+.4f} bits a byte ({name}); seeds of fp32 state are {apart:.4f} apart"


def parse_args() -> tuple[argparse.Namespace, Drawing]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--precisions", nargs="+", choices=tuple(PRECISIONS), default=list(PRECISIONS))
    parser.add_argument("--quick", action="store_true", help="8 iterations of one seed, fp32 and int8")
    parser.add_argument("--json", type=Path, help="where to write the result")
    Drawing.add_arguments(parser)
    args = parser.parse_args()
    args.load_before = os.getloadavg()
    if args.quick:
        args.iterations, args.seeds, args.precisions = 8, [1], [FP32, "remainder", "remainder, int8"]
    if FP32 not in args.precisions:
        args.precisions.insert(0, FP32)
    return args, Drawing.taken_from(args, parser)


if __name__ == "__main__":
    main()
