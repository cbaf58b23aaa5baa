"""The fork goes on from converted files on the very curve: from its distributed optimizer to none,
to ours, and back.

The ranks train, rank 0 converts what they saved, and the ranks resume from that; one spawn a file
layout of the fork. Gradients are not clipped, because a norm that is summed in another order moves
the last bit: every curve is the same bit for bit.
"""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_distopt.formats import convert
from tests.support.mini_fork import Iteration, MiniFork, core_folder
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.long

RANKS, ITERATIONS = 2, 4
#: Of all trainings.
FLAGS = ("--clip-grad", "0", "--train-iters", str(ITERATIONS))
DISTRIBUTED = "--use-distributed-optimizer"
BF16, FP32_NORMS, SGD = ("--bf16",), ("--bf16", "--fp32-norms"), ("--bf16", "--optimizer", "sgd")
#: Overflows at the first two iterations.
FP16 = (
    "--fp16",
    "--initial-loss-scale",
    str(2.0**18),
    "--loss-scale-window",
    "2",
    "--hysteresis",
    "1",
)
#: An odd number of elements, which two ranks pad.
ODD = (
    "--bf16",
    "--hidden-size",
    "5",
    "--num-attention-heads",
    "1",
    "--vocab-size",
    "63",
    "--micro-batch-size",
    "1",
)
TP2, PP2 = (
    ("--bf16", "--tensor-model-parallel-size", "2"),
    ("--bf16", "--pipeline-model-parallel-size", "2"),
)
UNTIED, FROZEN = ("--bf16", "--untie-embeddings-and-output-weights"), ("--bf16", "--frozen-param")


@dataclass(frozen=True)
class Optimizer:
    """Flags, and whether it is ours."""

    words: tuple[str, ...]
    ours: bool = False


PLAIN, NATIVE = Optimizer(()), Optimizer((DISTRIBUTED,))
#: A class with the arithmetic of the fork's own as our inner optimizer.
OURS = Optimizer(
    (
        DISTRIBUTED,
        "--distopt-optimizer",
        "megatron.optimizer.counting_adam:FusedAdam",
        "--distopt-updates",
        "elements",
    ),
    ours=True,
)
#: Where the fork takes nothing but Adam.
OUR_SGD = Optimizer((DISTRIBUTED,), ours=True)


@dataclass(frozen=True)
class Case:
    """A training that is saved, converted and resumed."""

    words: tuple[str, ...]  # flags of the model
    saves: Optimizer
    via: tuple[str, ...]  # formats to convert to, one after the other; the last one is resumed from
    resumes: Optimizer
    at: int = 2  # iteration of the save


#: By layout of the fork's files.
CASES: dict[str, dict[str, Case]] = {
    "gathered": {
        "fp32, gathered to plain": Case((), NATIVE, ("plain",), PLAIN),
        "bf16, gathered to plain": Case(ODD, NATIVE, ("plain",), PLAIN),
        "bf16, plain over all to gathered": Case(
            ODD, PLAIN, ("distopt", "per-rank", "plain", "gathered"), NATIVE
        ),
        "fp16, plain to gathered": Case(FP16, PLAIN, ("gathered",), NATIVE, at=3),
        "untied, gathered to plain": Case(UNTIED, NATIVE, ("plain",), PLAIN),
        "ours to gathered": Case(BF16, OURS, ("gathered",), NATIVE),
        "fp32 norms, ours to plain": Case(FP32_NORMS, OURS, ("plain",), PLAIN),
        "sgd, ours to plain": Case(SGD, OUR_SGD, ("plain",), PLAIN),
        "frozen, ours to plain": Case(FROZEN, OURS, ("plain",), PLAIN),
        "tp2, gathered over ours to plain": Case(TP2, NATIVE, ("distopt", "plain"), PLAIN),
        "pp2, plain to gathered": Case(PP2, PLAIN, ("gathered",), NATIVE),
    },
    "per_rank": {
        "bf16, own files to plain": Case(ODD, NATIVE, ("plain",), PLAIN),
        "fp16, plain to own files": Case(FP16, PLAIN, ("per-rank",), NATIVE, at=3),
        "fp16, nothing updated yet": Case(FP16, NATIVE, ("plain",), PLAIN, at=1),
        "sgd, own files to plain": Case(SGD, NATIVE, ("plain",), PLAIN),
        "tp2, own files over gathered": Case(TP2, NATIVE, ("gathered", "per-rank"), NATIVE),
        "pp2, plain to own files": Case(PP2, PLAIN, ("per-rank",), NATIVE),
    },
}


# In the ranks.


@dataclass(frozen=True)
class Continued:
    """The iterations after the save, of the run without one and of the one that resumed; whether
    they end alike."""

    uninterrupted: tuple[Iteration, ...]
    resumed: tuple[Iteration, ...]
    same_end: bool


def _continue(fork: MiniFork, case: Case, folder: Path) -> Continued:
    """Collective."""
    saves = ("--save", str(folder / "saved"), "--save-interval", str(case.at))
    with contextlib.redirect_stdout(io.StringIO()):
        full = fork.train(*FLAGS, *case.words, *case.saves.words, *saves, ours=case.saves.ours)
        if dist.get_rank() == 0:
            _convert(folder, case)
        dist.barrier()
        loads = ("--load", str(folder / case.via[-1]))
        resumed = fork.train(
            *FLAGS, *case.words, *case.resumes.words, *loads, ours=case.resumes.ours
        )
    same = all(torch.equal(param, resumed.params[name]) for name, param in full.params.items())
    return Continued(full.iterations[case.at :], resumed.iterations, same)


def _convert(folder: Path, case: Case) -> None:
    """A resumed run goes on from the folder of the last format."""
    name = f"iter_{case.at:07d}"
    source = folder / "saved" / name
    for to in case.via:
        source = convert(source, folder / to / name, to).path
    (folder / case.via[-1] / "latest_checkpointed_iteration.txt").write_text(str(case.at))


def _collect(rank: int, size: int, file_layout: str, folder: str) -> dict[str, Continued]:
    # nothing here loses its power, and a busy disk takes seconds to be sure of that
    os.fsync = lambda descriptor: None
    fork = MiniFork.imported(file_layout=file_layout, adam="fused")
    return {
        name: _continue(fork, case, Path(folder) / name)
        for name, case in CASES[file_layout].items()
    }


# In the test process.


@pytest.mark.parametrize("file_layout", CASES)
def test_resume_when_converted_then_the_curve_is_the_uninterrupted_one(
    file_layout: str, tmp_path: Path
) -> None:
    core_folder()
    ranks = run_ranks(_collect, RANKS, file_layout, str(tmp_path), seconds=200)
    for name, case in CASES[file_layout].items():
        of_ranks = [found[name] for found in ranks]
        assert len(of_ranks[0].resumed) == ITERATIONS - case.at, name
        assert of_ranks[0].resumed == of_ranks[0].uninterrupted, name
        assert [each.same_end for each in of_ranks] == [True] * RANKS, name
