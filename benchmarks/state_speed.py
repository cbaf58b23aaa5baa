"""How long does the update of optimizer state in low precision take on a CPU, per element and per byte of traffic?

    python benchmarks/state_speed.py [--numel N] [--rounds N] [--quick] [--json FILE] [--plot FILE]

Precisions and peers take turns in every round. Ours is updated by compiled C and by torch's operators. A ratio per byte
of 1 means that the update is as fast as that of fp32 state, for what it moves. bitsandbytes and torchao take part where
they are installed; their params are fp32, so they round no bf16 param.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from unittest import mock

import peers.environment  # noqa: F401 - before torch
import torch
from peers.machine import about
from peers.plot import Bar, Drawing, Panel, Row, draw_panels
from peers.script import parser_of, table, write
from torch.optim import Optimizer

from megatron_distopt.optimizer import kept, native, native_adam
from megatron_distopt.optimizer.blocked_adam import AdamW
from megatron_distopt.optimizer.low_precision_adam import LowPrecisionAdam
from megatron_distopt.optimizer.precision import FULL, Precision

PRECISIONS = (
    FULL,
    Precision("remainder"),
    Precision("float32", "bfloat16", "bfloat16"),
    Precision("remainder", "bfloat16", "bfloat16"),
    Precision("remainder", "float16", "float16"),
    Precision("remainder", "float8_e4m3fn", "float8_e4m3fn"),
    Precision("remainder", "int8", "int8"),
    Precision("bfloat16", "int8", "int8"),
)
#: Bytes read and written of a main param and of its model param.
MAINS = {"float32": 10, "remainder": 8, "bfloat16": 4}


def nbytes(precision: Precision) -> int:
    """Bytes an element that an update reads and writes, the fp32 gradient included."""
    return 4 + MAINS[precision.main_params_dtype] + 2 * round(precision.nbytes_of_moments)


def optimizer(precision: Precision, numel: int) -> Optimizer:
    """An optimizer of one flat param."""
    model = torch.randn(numel).bfloat16()
    main = model.float() if precision.main_params_dtype == "float32" else precision.mains([model])[0]
    main.grad = torch.randn(numel) * 1e-3
    params = [{"params": [main]}]
    made = AdamW(params, lr=1e-3, fused=True) if precision.is_full else LowPrecisionAdam(params, precision=precision)
    made.round_into({main: model})
    return made


def peer(module: str, name: str, numel: int) -> Optimizer:
    """An 8-bit optimizer of another package, of one fp32 param.

    Raises: whatever its import or its first update raises.
    """
    param = torch.nn.Parameter(torch.randn(numel))
    param.grad = torch.randn(numel) * 1e-3
    made: Optimizer = getattr(import_module(module), name)([param], lr=1e-3)
    made.step()
    return made


@dataclass(frozen=True)
class Contestant:
    """What is updated.

    Args:
        name: in tables and pictures.
        build: from a number of elements.
        nbytes: that an update moves an element, where it is ours.
    """

    name: str
    build: Callable[[int], Optimizer]
    nbytes: int | None = None


OURS = tuple(
    Contestant(
        f"ours {', '.join(dict.fromkeys(vars(each).values()))}" if not each.is_full else "ours fp32",
        partial(optimizer, each),
        nbytes(each),
    )
    for each in PRECISIONS
)
PEERS = (
    Contestant("torch AdamW, its default", partial(peer, "torch.optim", "AdamW")),
    Contestant("bitsandbytes AdamW8bit", partial(peer, "bitsandbytes.optim", "AdamW8bit")),
    Contestant("torchao AdamW8bit", partial(peer, "torchao.optim", "AdamW8bit")),
    Contestant("torchao AdamWFp8", partial(peer, "torchao.optim", "AdamWFp8")),
)


@dataclass(frozen=True)
class Reading:
    """A contestant: nanoseconds of an element, median, least and most.

    Args:
        name: of it.
        nbytes: see `Contestant`.
        ns: as it is used.
        with_operators: ours with torch's operators in place of compiled C.
        why_not: it did not run.
    """

    name: str
    nbytes: int | None = None
    ns: Sequence[float] = ()
    with_operators: Sequence[float] = ()
    why_not: str = ""


@contextmanager
def update_by(*, compiled: bool) -> Iterator[None]:
    """By compiled C, or by torch's operators."""
    if compiled:
        yield
        return
    with ExitStack() as stack:
        for module in (kept, native, native_adam):
            stack.enter_context(mock.patch.object(module, "library", lambda *_: None))
        yield


def seconds_of(optimizer: Optimizer, *, compiled: bool) -> float:
    """Of one update: of this process's CPU where it has one thread, because others may use the machine."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    with update_by(compiled=compiled):
        start = clock()
        optimizer.step()
        return clock() - start


def main() -> None:
    args, drawing = parse_args()
    if drawing.of_kept(draw):
        return
    start = time.monotonic()
    torch.set_num_threads(args.threads)
    readings = read(args.numel, args.rounds)
    settings = {"numel": args.numel, "rounds": args.rounds, "threads": args.threads}
    result = {**about(args.load_before, time.monotonic() - start), **settings, "rows": [*map(asdict, readings)]}
    write(result, args.json)
    drawing.of_result(draw, result)
    print("\n".join(lines(readings)))


def read(numel: int, rounds: int) -> list[Reading]:
    """Every contestant in turn, once without being counted."""
    built, failed = dict[str, Optimizer](), list[Reading]()
    for each in (*OURS, *PEERS):
        try:
            built[each.name] = each.build(numel)
        except Exception as error:  # noqa: BLE001 - a package that is absent or has no kernel for a CPU
            failed.append(Reading(each.name, why_not=f"{type(error).__name__}: {error}".splitlines()[0]))
    times: dict[tuple[str, bool], list[float]] = {}
    converted = {each.name for each in OURS[1:]}
    for _ in range(rounds + 1):
        for name, each in built.items():
            for compiled in (True, False) if name in converted else (True,):
                times.setdefault((name, compiled), []).append(seconds_of(each, compiled=compiled) * 1e9 / numel)
    spreads = {key: _spread(each[1:]) for key, each in times.items()}
    moved = {each.name: each.nbytes for each in OURS}
    found = [Reading(name, moved.get(name), spreads[name, True], spreads.get((name, False), ())) for name in built]
    return found + failed


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def lines(readings: Sequence[Reading]) -> Iterator[str]:
    plain = next(each for each in readings if each.name == OURS[0].name)
    header = ("contestant", "bytes", "ns", "to fp32", "a byte", "with torch's operators")
    yield from table(header, [row(each, plain) for each in readings])


def row(reading: Reading, plain: Reading) -> list[str]:
    if not reading.ns:
        return [reading.name, "", "", "", "", reading.why_not]
    ratio = reading.ns[0] / plain.ns[0]
    per_byte = "" if reading.nbytes is None else f"{ratio * (plain.nbytes or 1) / reading.nbytes:.2f}"
    operators = f"{reading.with_operators[0]:.2f} ns" if reading.with_operators else ""
    return [reading.name, str(reading.nbytes or ""), f"{reading.ns[0]:.2f}", f"{ratio:.2f}", per_byte, operators]


def draw(result: dict[str, object], path: object) -> None:
    """A bar a contestant, and a second one with torch's operators."""
    rows = [Reading(**each) for each in result["rows"]]  # type: ignore[attr-defined]
    bars = [Row(each.name, (_bar(each.ns), _bar(each.with_operators)), each.why_not) for each in rows]
    title = f"update of {result['numel']:,} elements, {result['threads']} thread(s)"
    draw_panels(title, [[Panel("", "ns an element; pale: with torch's operators", bars)]], path)  # type: ignore[arg-type]


def _bar(values: Sequence[float]) -> Bar | None:
    return Bar(values, f"{values[0]:.2f}") if values else None


def parse_args() -> tuple[argparse.Namespace, Drawing]:
    parser = parser_of(__doc__, "a million elements, three rounds")
    parser.add_argument("--numel", type=int, default=1 << 23)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    Drawing.add_arguments(parser)
    args = parser.parse_args()
    if args.quick:
        args.numel, args.rounds = 1 << 20, 3
    return args, Drawing.taken_from(args, parser)


if __name__ == "__main__":
    main()
