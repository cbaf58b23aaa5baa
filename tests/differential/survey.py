"""Runs programs without stopping at the first failure, and writes down a small program for each kind of failure.

python -m tests.differential.survey 300 --seed 7 --into /tmp/found
python -m tests.differential.survey --program /tmp/found/failure_7_1.txt
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.differential import programs as programs_module
from tests.differential.compare import Outcome
from tests.differential.drawing import programs
from tests.differential.pool import Pool, pool
from tests.differential.programs import Program
from tests.differential.scripts import written
from tests.differential.tally import Tally

#: A program that gets stuck costs a minute a try.
SECONDS_TO_REDUCE = 90.0
#: Draws of one hypothesis test resemble each other, so many tests draw a few each.
_DRAWN_TOGETHER = 10


def draw(number: int, start: int, is_calm: bool) -> list[Program]:
    """Programs at random, the same for the same start."""
    drawn: list[Program] = []

    @settings(
        max_examples=_DRAWN_TOGETHER,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(is_calm=is_calm))
    def collect(program: Program) -> None:
        drawn.append(program)

    while len(drawn) < number:
        seed(start + len(drawn))(collect)()
    return drawn[:number]


def signature(outcome: Outcome) -> str:
    """What two failures of one cause have in common."""
    last = [line for line in outcome.text.splitlines() if line.strip()]
    text = " | ".join([last[0], last[-1]] if len(last) > 1 else last)
    text = re.sub(r"rank \d+|[-+\d.e]{2,}|'[^']*'|\d+", "#", text)
    return text[:160]


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less."""
    if len(program.phases) > 1:
        for phase in program.phases:
            yield dataclasses.replace(program, phases=(phase,))
    for place, phase in enumerate(program.phases):
        for simpler in _smaller_phases(phase):
            phases = (*program.phases[:place], simpler, *program.phases[place + 1 :])
            yield dataclasses.replace(program, phases=phases)
    for each in dataclasses.fields(program):
        value = getattr(program, each.name)
        if each.name != "phases" and value != each.default:
            yield dataclasses.replace(program, **{each.name: each.default})
            if isinstance(value, tuple) and len(value) > 1:
                for i in range(len(value)):
                    yield dataclasses.replace(program, **{each.name: (*value[:i], *value[i + 1 :])})


def _smaller_phases(phase: Phase) -> Iterator[Phase]:
    for ranks in range(1, phase.ranks):
        yield dataclasses.replace(phase, ranks=ranks)
    its = phase.iterations
    for i in range(len(its) if len(its) > 1 else 0):
        yield dataclasses.replace(phase, iterations=(*its[:i], *its[i + 1 :]))
    for i, iteration in enumerate(its):
        for simpler in _smaller_iterations(iteration):
            yield dataclasses.replace(phase, iterations=(*its[:i], simpler, *its[i + 1 :]))


def _smaller_iterations(iteration: object) -> Iterator[object]:
    for each in dataclasses.fields(iteration):  # type: ignore[arg-type]
        value = getattr(iteration, each.name)
        if value != each.default:
            yield dataclasses.replace(iteration, **{each.name: each.default})  # type: ignore[type-var]
        if isinstance(value, tuple) and len(value) > 1:
            for i in range(len(value)):
                yield dataclasses.replace(iteration, **{each.name: (*value[:i], *value[i + 1 :])})  # type: ignore[type-var]


def reduce(running: Pool, program: Program, found: Outcome, tries: int = 60) -> tuple[Program, Outcome]:
    """The smallest program found that fails in the same way."""
    wanted = signature(found)
    progress, deadline = True, time.monotonic() + SECONDS_TO_REDUCE
    while progress and tries > 0 and time.monotonic() < deadline:
        progress = False
        for simpler in smaller(program):
            tries -= 1
            outcome = running.run(simpler)
            if outcome.kind == "failed" and signature(outcome) == wanted:
                program, found, progress = simpler, outcome, True
                break
            if tries <= 0 or time.monotonic() > deadline:
                break
    return program, found


def read(file: Path) -> Program:
    """The program in the first line of a failure that was written down."""
    program: Program = eval(file.read_text().partition("\n")[0], vars(programs_module))
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int, nargs="?", default=100)
    parser.add_argument("--program", type=Path, help="a failure that was written down: this program alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calm", action="store_true", help="only programs that no error of ours may answer")
    parser.add_argument("--tries", type=int, default=60)
    parser.add_argument("--into", type=Path, default=Path("differential_failures"))
    args = parser.parse_args()
    args.into.mkdir(parents=True, exist_ok=True)
    tally, seen = Tally(), dict[str, int]()
    with pool() as running:
        for program in [read(args.program)] if args.program else draw(args.number, args.seed, args.calm):
            outcome = running.run(program)
            tally.add(program, outcome)
            if outcome.kind != "failed":
                continue
            seen[signature(outcome)] = seen.get(signature(outcome), 0) + 1
            if seen[signature(outcome)] > 1:
                continue
            sys.stdout.write(f"--- number {tally.outcomes.total()}\n{program!r}\n{outcome.text[-1200:]}\n")
            sys.stdout.flush()
            small, outcome = reduce(running, program, outcome, args.tries)
            file = args.into / f"failure_{args.seed}_{len(seen)}.txt"
            file.write_text(written(small, outcome.text))
            sys.stdout.write(f"--- {file}\n{small!r}\n{outcome.text[-1200:]}\n")
            sys.stdout.flush()
    sys.stdout.write("\n".join([*tally.lines(), *(f"{number} x {text}" for text, number in seen.items())]) + "\n")


if __name__ == "__main__":
    main()
