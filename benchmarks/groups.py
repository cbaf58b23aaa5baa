"""How long building, saving and loading take where every param has a param group of its own.

    python benchmarks/groups.py [--groups 2000 4000 8000] [--ranks 2] [--quick] [--json FILE]

Layer-wise learning rates often make a group a param. fp32 params of 4 elements and AdamW, so that
nothing but their number counts. CPU seconds of the first rank, which other programs on the machine
do not change much; new processes for every number of groups. benchmarks/README.md says what came
out.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers.environment  # noqa: F401 - before torch
import torch
from peers.ranks import log, run_on_ranks
from peers.script import conclude, parser_of
from torch import Tensor, nn

NUMEL = 4


@dataclass(frozen=True)
class GroupsReading:
    """CPU seconds of the first rank for one number of groups."""

    groups: int
    torch_build: float  # torch.optim.AdamW itself, which compares each group with all before it
    build: float  # distribute(model, adamw)
    first_step: float
    step: float  # the second one
    save: float
    load: float
    state_dict: float
    load_state_dict: float


def main() -> None:
    args = parse_args()
    readings, failures = list[GroupsReading](), list[str]()
    for number in args.groups:
        with tempfile.TemporaryDirectory(prefix="groups_benchmark_") as folder:
            logged, why = run_on_ranks(run, args.ranks, number, Path(folder), minutes=30)
        readings += [GroupsReading(**entry) for entry in logged]
        failures += [f"{number} groups: {why}"] if why else []
    conclude(args, {"failures": failures, "readings": readings}, [*failures, *lines(readings)])


def run(rank: int, size: int, path: Path, number: int, folder: Path) -> None:
    """On every rank."""
    from megatron_distopt import distribute

    warm, _ = model_of(2)
    distribute(warm, torch.optim.AdamW(warm.parameters()))  # what is imported on the way
    seconds: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = call()
        seconds[name] = time.process_time() - start
        return result

    model, groups = model_of(number)
    adamw = timed("torch_build", lambda: torch.optim.AdamW(groups))
    optimizer = timed("build", lambda: distribute(model, adamw))
    for name in ("first_step", "step"):
        optimizer.zero_grad()
        loss_of(model).backward()
        timed(name, optimizer.step)
    timed("save", lambda: optimizer.save(folder))
    timed("load", lambda: optimizer.load(folder))
    state = timed("state_dict", optimizer.state_dict)
    timed("load_state_dict", lambda: optimizer.load_state_dict(state))
    log(GroupsReading(groups=number, **seconds), path)


def model_of(number: int) -> tuple[nn.ParameterList, list[dict[str, Any]]]:
    """So many params, and a group with a rate of its own for each."""
    model = nn.ParameterList([nn.Parameter(torch.ones(NUMEL)) for _ in range(number)])
    rates = (1e-3 * (1 + index / number) for index in range(number))
    return model, [
        {"params": [param], "lr": rate} for param, rate in zip(model, rates, strict=True)
    ]


def loss_of(model: nn.ParameterList) -> Tensor:
    return torch.cat(list(model)).square().sum()


def lines(readings: list[GroupsReading]) -> list[str]:
    """CPU seconds, a row a number of groups."""
    if not readings:
        return []
    names = list(vars(readings[0]))
    table = [" ".join(f"{name:>15}" for name in names)]
    for reading in readings:
        values = vars(reading)
        row = [f"{values[name]:15.2f}" for name in names[1:]]
        table.append(" ".join([f"{reading.groups:15}", *row]))
    return table


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__, "250 and 500 groups", has_contestants=False)
    parser.add_argument("--groups", type=int, nargs="+", default=[2000, 4000, 8000])
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks")
    args = parser.parse_args()
    if args.quick:
        args.groups = [250, 500]
    return args


if __name__ == "__main__":
    main()
