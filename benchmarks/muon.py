"""How long the update of Muon takes on several ranks, and what each rank keeps for it.

    python benchmarks/muon.py [--layers N] [--hidden N] [--ranks N ...] [--rounds N] [--quick]
    [--json FILE]

The same bf16 model and gradients for all: this package, megatron-core's layer-wise optimizer with
torch's Muon in its Muon's place, and torch's Muon alone on every rank, which is what n ranks share
here. benchmarks/README.md says how every figure is read.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers.environment  # noqa: F401 - before torch
import torch
from peers.memory_reading import covered, storages
from peers.muon_contestants import entries
from peers.ranks import exchange, failure_of_any, log, run_on_ranks
from peers.report import Rounds, over, spread, table
from peers.script import conclude, parser_of
from peers.state import fill
from peers.step_readings import FIRST_NORMS, deviation
from peers.steppers import StepEntry, StepSetting
from torch import Tensor


@dataclass(frozen=True)
class MuonReading:
    """One contestant in one round."""

    contestant: str  # its name
    ranks: int  # data-parallel ranks
    numel: int  # elements of the model
    round: int  # repeats are rounds over all contestants
    # CPU seconds of the rank that needed most: its optimizers' own steps, and all from gradients to
    # new params.
    update: float = 0.0
    step: float = 0.0
    # bytes of main params, moments and buffers besides params and gradients, of each rank
    state: tuple[int, ...] = ()
    # from the params of ours after the first steps, as a part of their change
    apart: float | None = None
    why_not: str = ""  # the reason, where it was not run


def main() -> None:
    args = parse_args()
    readings, failures = list[MuonReading](), list[str]()
    for size in args.ranks:
        logged, why = run_on_ranks(read_all, size, args)
        readings += [MuonReading(**each) for each in logged]
        failures += [why] if why else []
    result = {"rows": [summary(readings, size) for size in args.ranks], "failures": failures}
    conclude(args, result, [*failures, *lines(result)])


def read_all(rank: int, size: int, path: Path, args: argparse.Namespace) -> None:
    """Contestants take turns in every round; the first is not counted."""
    reference = list[Tensor]()
    for number in range(-1, args.rounds):
        for entry in entries():
            setting = StepSetting(args.layers, args.hidden, rank, size, None, "cpu")
            reading = read(entry, setting, number, args.repeats, reference)
            if number >= 0 or reading.why_not:
                log(reading, path)


def read(
    entry: StepEntry, setting: StepSetting, number: int, repeats: int, reference: list[Tensor]
) -> MuonReading:
    """Collective: builds a contestant, checks and times it, and drops it."""
    measured: list[MuonReading] = []
    why_not = failure_of_any(
        lambda: measured.append(_read(entry, setting, number, repeats, reference))
    )
    gc.collect()
    return (
        MuonReading(entry.name, setting.size, setting.numel, number, why_not=why_not)
        if why_not
        else measured[0]
    )


def _read(
    entry: StepEntry, setting: StepSetting, number: int, repeats: int, reference: list[Tensor]
) -> MuonReading:
    fill(torch.empty(1))  # whose values are kept
    known = {address for address, _ in storages().items()}
    stepper = entry.build(setting)
    try:
        for norm in FIRST_NORMS:
            stepper.set_grads(norm)
            stepper.step()
        apart = deviation(stepper, entry.name, reference) if number <= 0 else None
        held = covered(
            (address, nbytes) for address, nbytes in storages().items() if address not in known
        )
        times = exchange(_times(stepper, repeats))
        given = setting.numel * (2 + 4)
        state = tuple(nbytes - given for nbytes in exchange(held))
        update, step = (max(each[kind] for each in times) for kind in range(2))
        return MuonReading(
            entry.name, setting.size, setting.numel, number, update, step, state, apart
        )
    finally:
        stepper.close()


def _times(stepper: Any, repeats: int) -> tuple[float, float]:
    """CPU seconds of the update and of the step, on average."""
    before, whole = stepper.update_seconds, 0.0
    for _ in range(repeats):
        stepper.set_grads(FIRST_NORMS[-1])
        start = time.process_time()
        stepper.step()
        whole += time.process_time() - start
    return (stepper.update_seconds - before) / repeats, whole / repeats


_KINDS = ("update", "step")


def summary(readings: Sequence[MuonReading], size: int) -> dict[str, Any]:
    """Of so many ranks, a row a contestant: times, and n times its time over torch's of one
    rank."""
    rounds = Rounds([each for each in readings if each.ranks == size])
    last = list(rounds.of)[-1] if rounds.of else ""
    state, apart = (
        rounds.first(lambda each: each.state or None),
        rounds.first(lambda each: each.apart),
    )
    rows = []
    for name, found in rounds.of.items():
        times = {
            kind: rounds.values(name, lambda each, kind=kind: getattr(each, kind) or None)
            for kind in _KINDS
        }
        alone = {
            kind: rounds.values(last, lambda each, kind=kind: getattr(each, kind) or None)
            for kind in _KINDS
        }
        held, numel = state[name], found[0].numel
        rows.append(
            {
                "name": name,
                "seconds": {kind: spread([*times[kind].values()]) for kind in _KINDS},
                "share": {
                    kind: over(
                        {number: size * value for number, value in times[kind].items()}, alone[kind]
                    )
                    for kind in _KINDS
                },
                "state": {"most": max(held) / numel, "average": sum(held) / len(held) / numel}
                if held
                else None,
                "apart": apart[name],
                "why_not": rounds.failures()["why_not"].get(name, ""),
            }
        )
    return {"ranks": size, "contestants": rows}


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    header = ("", "update, ms", "n x / alone", "step, ms", "n x / alone", "state", "most", "")
    for row in result["rows"]:
        yield (
            f"\n{row['ranks']} ranks: CPU time of the rank with most; bytes of state an element, "
            "average and most"
        )
        yield from table(header, [_cells(each) for each in row["contestants"]])


def _cells(row: Mapping[str, Any]) -> list[str]:
    times = [
        text
        for kind in _KINDS
        for text in (
            f"{row['seconds'][kind].median * 1e3:.1f}" if row["seconds"][kind] else "-",
            str(row["share"][kind]) if row["share"][kind] else "-",
        )
    ]
    state = (
        [f"{row['state'][which]:.2f}" for which in ("average", "most")]
        if row["state"]
        else ["-", "-"]
    )
    apart = "" if row["apart"] is None else f"{row['apart']:.0e} of a change apart"
    return [row["name"], *times, *state, row["why_not"] or apart]


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__, "2 layers of 256, 2 ranks, two rounds", has_contestants=False)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="data-parallel ranks")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2, help="timed steps in a round")
    args = parser.parse_args()
    if args.quick:
        args.layers, args.hidden, args.ranks, args.rounds = 2, 256, [2], 2
    return args


if __name__ == "__main__":
    main()
