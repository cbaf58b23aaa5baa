"""A small form of benchmarks/step.py and benchmarks/train.py: that this package is not overtaken by
what it replaces.

Both sides run in the same processes, turn by turn, and only the ratio of their medians is looked
at; no time is.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.spawn import run_ranks

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from peers.adam import torch_adam
from peers.steppers import ForkStepper, Ours, Stepper, StepSetting, set_grads
from peers.trainers import ForkTrainer
from peers.trainers import Ours as OursTrainer
from peers.transformer import TrainSetting, batch

#: 2.4 million elements in 36 tensors.
STEP = StepSetting(3, 256, 0, 1)
#: Of the medians, which is 1.8 to 2 on two cores that other tests use, too; for more elements see
#: benchmarks/README.md.
STEP_RATIO = 1.3

#: 6.4 million elements; 8 tokens, so that the step is mostly communication and update.
TRAIN = {
    "layers": 2,
    "hidden": 512,
    "vocabulary": 64,
    "sequence": 8,
    "sequences": 1,
    "bucket_size": 10**6,
}
#: 1.6 to 1.8; with gloo's own collectives it would be 1.1.
TRAIN_RATIO = 1.2
RANKS = 2

#: Of a measurement; the best of some counts, because whatever else runs meanwhile takes processors
#: from either side.
REPEATS, MEASUREMENTS = 3, 4
#: Steps whose losses are compared.
COMPARED = 4


def ratio_of(turns: Mapping[str, Callable[[], float]], wanted: float) -> float:
    """Collective, fork of 2023 over ours: the best of some measurements, or the first that is
    enough on all ranks."""
    best = 0.0
    for _ in range(MEASUREMENTS):
        best = max(best, _measured(turns))
        least = torch.tensor(best)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        if least >= wanted:
            break
    return best


def _measured(turns: Mapping[str, Callable[[], float]]) -> float:
    """Of medians of seconds, turn by turn."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for repeat in range(REPEATS + 1):
        for name, turn in turns.items():
            found = turn()
            if repeat:  # the first one warms up
                seconds[name].append(found)
    return statistics.median(seconds["ForkStep"]) / statistics.median(seconds["ours"])


def _step(stepper: Stepper) -> float:
    set_grads(stepper, norm=4.0)
    start = time.perf_counter()
    stepper.step()
    return time.perf_counter() - start


def test_step_when_beside_the_fork_then_is_faster_by_a_wide_margin() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        steppers = {"ForkStep": ForkStepper(STEP, torch_adam(foreach=False)), "ours": Ours(STEP)}
        ratio = ratio_of(
            {name: lambda stepper=stepper: _step(stepper) for name, stepper in steppers.items()},
            STEP_RATIO,
        )
        for one, other in zip(steppers["ForkStep"].params, steppers["ours"].params, strict=True):
            # The same work: they differ where a value lay at the edge between two bf16 numbers, by
            # one of those.
            torch.testing.assert_close(one, other, rtol=2**-7, atol=0.0)
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)
    assert ratio >= STEP_RATIO


def train(rank: int, size: int) -> tuple[float, list[list[float]]]:
    setting = TrainSetting(**TRAIN, rank=rank, size=size)
    losses: dict[str, list[float]] = {"ForkStep": [], "ours": []}
    trainers = {
        "ForkStep": ForkTrainer(setting, torch_adam(foreach=False)),
        "ours": OursTrainer(setting),
    }

    def turn(name: str) -> float:
        dist.barrier()
        start = time.perf_counter()
        loss = trainers[name].train(batch(setting, len(losses[name])))
        trainers[name].finish()
        dist.barrier()
        seconds = time.perf_counter() - start
        losses[name].append(loss.item())
        return seconds

    ratio = ratio_of({name: lambda name=name: turn(name) for name in trainers}, TRAIN_RATIO)
    return ratio, [losses["ForkStep"], losses["ours"]]


def test_training_when_beside_the_fork_then_is_faster() -> None:
    for ratio, (theirs, ours) in run_ranks(train, RANKS):
        # The same work. Both compute in bf16; their norms are added up in another order, which by
        # then is up to 2.4e-4 and grows from step to step. Without clipping it is above 3e-3.
        assert ours[:COMPARED] == pytest.approx(theirs[:COMPARED], rel=1e-3)
        assert ratio >= TRAIN_RATIO
