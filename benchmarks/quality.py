"""What state in low precision, or Muon, does to a training: the quickstart's model, from several seeds.

    python benchmarks/quality.py precision|muon [--iterations N] [--seeds 1 2 3] [--quick] [--json FILE]

Every training is in processes of its own with one thread each and bf16 params; trainings of one seed differ in nothing
but what is named. The learning rate and the decay are those of the quickstart, which suit AdamW; Muon's rate is
adjusted so that it fits (`muon_adjust_lr`, match_rms_adamw). benchmarks/README.md says how each figure is read.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import peers.environment  # noqa: F401 - before torch
from peers.machine import about
from peers.quickstart import train
from peers.report import table
from peers.script import write


def _forms(main: str, moments: str) -> dict[str, str]:
    return {"MAIN_PARAMS_DTYPE": main, "EXP_AVG_DTYPE": moments, "EXP_AVG_SQ_DTYPE": moments}


@dataclass(frozen=True)
class Subject:
    """What is compared: MEGATRON_DISTOPT_* variables by name of a training; the first one is the reference."""

    variables: Mapping[str, Mapping[str, str]]
    ranks: int
    iterations: int
    seeds: Sequence[int]


SUBJECTS = {
    "precision": Subject(
        {
            "fp32": {},
            "remainder": _forms("remainder", "float32"),
            "remainder, bf16": _forms("remainder", "bfloat16"),
            "remainder, fp16": _forms("remainder", "float16"),
            "remainder, fp8 E4M3": _forms("remainder", "float8_e4m3fn"),
            "remainder, fp8 E5M2": _forms("remainder", "float8_e5m2"),
            "remainder, int8": _forms("remainder", "int8"),
            "bf16, int8": _forms("bfloat16", "int8"),
        },
        ranks=1,
        iterations=150,
        seeds=(1, 2, 3),
    ),
    "muon": Subject({"AdamW": {}, "Muon and AdamW": {"OPTIMIZER": "muon"}}, ranks=2, iterations=300, seeds=(1, 2)),
}


@dataclass(frozen=True)
class Training:
    """One training."""

    name: str
    seed: int  # of params and batches
    validation: float  # bits a byte of text that was not trained on
    state_nbytes: int  # main params and moments of a rank
    losses: Sequence[float]  # of every iteration, in nats a byte


def main() -> None:
    args = parse_args()
    start, trainings = time.monotonic(), list[Training]()
    subject = SUBJECTS[args.subject]
    for seed in args.seeds:
        for name in args.names:
            summary, losses = train(subject.variables[name], seed, args.iterations, subject.ranks)
            nbytes, validation = summary["memory_per_rank"]["state_nbytes"], summary["validation_bits_per_byte"]
            trainings.append(Training(name, seed, validation, nbytes, losses))
            print(f"{name}, seed {seed}: {validation:.4f} bits a byte", flush=True)
    machine = about(args.load_before, time.monotonic() - start)
    write({**machine, "iterations": args.iterations, "runs": [asdict(each) for each in trainings]}, args.json)
    print("\n".join(lines(trainings)))


def lines(trainings: Sequence[Training]) -> Iterator[str]:
    """A row a name, with what it differs from the first one, seed by seed."""
    names = list(dict.fromkeys(each.name for each in trainings))
    by_name = {name: [each for each in trainings if each.name == name] for name in names}
    reference = by_name[names[0]]
    rows = []
    for name, own in by_name.items():
        pairs = list(zip(own, reference, strict=True))
        more = "  ".join(f"{each.validation - plain.validation:+.4f}" for each, plain in pairs)
        is_equal = all(each.losses == plain.losses for each, plain in pairs)
        mean = statistics.mean(each.validation for each in own)
        rows.append(
            [name, f"{own[0].state_nbytes:,}", f"{mean:.4f}", more, "equal to the bit" if is_equal else "differ"]
        )
    yield from table(("", "bytes of state a rank", "bits a byte", f"more than {names[0]}, by seed", "losses"), rows)
    found = [each.validation for each in reference]
    yield f"seeds of {names[0]} are {max(found) - min(found):.4f} apart"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=tuple(SUBJECTS))
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--names", nargs="+", help="of trainings; all where left out, the first one always runs")
    parser.add_argument("--quick", action="store_true", help="8 iterations of one seed; three trainings at most")
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args()
    args.load_before, subject = os.getloadavg(), SUBJECTS[args.subject]
    known = list(subject.variables)
    if unknown := [name for name in args.names or () if name not in known]:
        parser.error(f"--names has {unknown[0]!r}. Write some of {known}.")
    args.names = [name for name in known if name in (args.names or known) or name == known[0]]
    args.iterations, args.seeds = args.iterations or subject.iterations, args.seeds or subject.seeds
    if args.quick:
        args.iterations, args.seeds, args.names = 8, [1], [*args.names[:2], args.names[-1]][: len(args.names)]
    return args


if __name__ == "__main__":
    main()
