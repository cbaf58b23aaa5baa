"""What low precision of state or gradients, or Muon, does to a training: the quickstart's model,
from several seeds.

    python benchmarks/quality.py precision|muon|reduction [--iterations N] [--seeds 1 2 3] [--quick]
    [--json FILE]

Every training is in processes of its own with one thread each and bf16 params (`reduction`: those
of one optimizer one after the other, fp32 params, and each rank is a node); trainings of one seed
differ in nothing but what is named. The learning rate and the decay are those of the quickstart,
which suit AdamW; Muon's rate is adjusted so that it fits (match_rms_adamw). benchmarks/README.md
says how each figure is read.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from peers.environment import ROOT
from peers.forms import LOW_PRECISION
from peers.report import table
from peers.script import conclude, parser_of

#: How gradients are summed over nodes, as reduced_training.py knows it.
REDUCTIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Subject:
    """What is compared: MEGATRON_DISTOPT_* variables by name of a training; the first one is the
    reference.

    Where names have the form "optimizer: reduction", the first one of the same optimizer is.
    """

    variables: Mapping[str, Mapping[str, str]]
    ranks: int
    iterations: int
    seeds: Sequence[int]


SUBJECTS = {
    "precision": Subject(
        {
            "fp32": {},
            **{
                name: {option.upper(): value for option, value in form.items()}
                for name, form in LOW_PRECISION.items()
            },
        },
        ranks=1,
        iterations=150,
        seeds=(1, 2, 3),
    ),
    "muon": Subject(
        {"AdamW": {}, "Muon and AdamW": {"OPTIMIZER": "muon"}},
        ranks=2,
        iterations=300,
        seeds=(1, 2),
    ),
    "reduction": Subject(
        {
            f"{optimizer}: {reduction}": {}
            for optimizer in ("Adam", "Muon")
            for reduction in REDUCTIONS
        },
        ranks=2,
        iterations=150,
        seeds=(1, 2, 3),
    ),
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
    subject, trainings = SUBJECTS[args.subject], list[Training]()
    for seed in args.seeds:
        if args.subject == "reduction":
            for optimizer in dict.fromkeys(map(optimizer_of, args.contestants)):
                names = [name for name in args.contestants if optimizer_of(name) == optimizer]
                trainings += train_reduced(names, seed, args.iterations, subject.ranks)
            continue
        for name in args.contestants:
            summary, losses = train(subject.variables[name], seed, args.iterations, subject.ranks)
            nbytes, validation = (
                summary["memory_per_rank"]["state_nbytes"],
                summary["validation_bits_per_byte"],
            )
            trainings.append(Training(name, seed, validation, nbytes, losses))
            print(f"{name}, seed {seed}: {validation:.4f} bits a byte", flush=True)
    conclude(args, {"iterations": args.iterations, "runs": trainings}, lines(trainings))


def train(
    variables: Mapping[str, str], seed: int, iterations: int, ranks: int
) -> tuple[dict[str, Any], list[float]]:
    """The quickstart's summary and the loss of every iteration in nats a byte, from processes of
    its own.

    `variables` are MEGATRON_DISTOPT_* without that beginning.
    """
    environ = {f"MEGATRON_DISTOPT_{name}": value for name, value in variables.items()}
    with TemporaryDirectory() as folder:
        program = [
            str(ROOT / "examples" / "quickstart.py"),
            "--use-distributed-optimizer",
            "--precision",
            "bf16",
        ]
        program += ["--iterations", str(iterations), "--seed", str(seed), "--output", folder]
        _run_on(ranks, program, environ)
        summary = json.loads((Path(folder) / "summary.json").read_text())
        history = [
            json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()
        ]
    return summary, [each["loss"] for each in history]


def train_reduced(
    names: Sequence[str], seed: int, iterations: int, ranks: int
) -> Iterator[Training]:
    """Trainings of one optimizer that differ in the reduction of gradients."""
    with TemporaryDirectory() as folder:
        program = [
            str(ROOT / "benchmarks" / "peers" / "reduced_training.py"),
            "--optimizer",
            optimizer_of(names[0]),
        ]
        program += [
            "--iterations",
            str(iterations),
            "--seed",
            str(seed),
            "--output",
            folder,
            "--reductions",
        ]
        _run_on(ranks, [*program, *(name.partition(": ")[2] for name in names)], {})
        for name, line in zip(
            names, (Path(folder) / "trainings.jsonl").read_text().splitlines(), strict=True
        ):
            found = Training(name, seed, **json.loads(line))
            print(f"{name}, seed {seed}: {found.validation:.4f} bits a byte", flush=True)
            yield found


def _run_on(ranks: int, program: Sequence[str], variables: Mapping[str, str]) -> None:
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "examples"))),
        **variables,
    }
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    done = subprocess.run(
        [*command, *program], env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"Invalid training with {dict(variables)}: it ended with\n{done.stderr[-2000:]}"
        )


def lines(trainings: Sequence[Training]) -> Iterator[str]:
    """A row a name, with what it differs from the first one of its optimizer, seed by seed."""
    names = list(dict.fromkeys(each.name for each in trainings))
    by_name = {name: [each for each in trainings if each.name == name] for name in names}
    firsts = {optimizer_of(name): name for name in reversed(names)}
    rows = []
    for name, own in by_name.items():
        reference = by_name[firsts[optimizer_of(name)]]
        pairs = list(zip(own, reference, strict=True))
        more = "  ".join(f"{each.validation - plain.validation:+.4f}" for each, plain in pairs)
        is_equal = all(each.losses == plain.losses for each, plain in pairs)
        mean = statistics.mean(each.validation for each in own)
        rows.append(
            [
                name,
                f"{own[0].state_nbytes:,}",
                f"{mean:.4f}",
                more,
                "equal to the bit" if is_equal else "differ",
            ]
        )
    yield from table(
        ("", "bytes of state a rank", "bits a byte", "more than the first, by seed", "losses"), rows
    )
    for first in reversed(firsts.values()):
        found = [each.validation for each in by_name[first]]
        yield f"seeds of {first} are {max(found) - min(found):.4f} apart"


def optimizer_of(name: str) -> str:
    """What a name of a training has before its colon."""
    return name.rpartition(": ")[0]


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__, "8 iterations of one seed; three trainings at most")
    parser.add_argument("subject", choices=tuple(SUBJECTS))
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--seeds", type=int, nargs="+")
    args = parser.parse_args()
    subject = SUBJECTS[args.subject]
    known = list(subject.variables)
    if unknown := [name for name in args.contestants or () if name not in known]:
        parser.error(f"--contestants has {unknown[0]!r}. Write some of {known}.")
    args.contestants = [
        name for name in known if name in (args.contestants or known) or name == known[0]
    ]
    args.iterations, args.seeds = args.iterations or subject.iterations, args.seeds or subject.seeds
    if args.quick:
        args.iterations, args.seeds, args.contestants = (
            8,
            [1],
            [*args.contestants[:2], args.contestants[-1]][: len(args.contestants)],
        )
    return args


if __name__ == "__main__":
    main()
