"""The fork goes on from converted files on the very curve: from its distributed optimizer to none, to ours, and back.

The ranks train, rank 0 converts what they saved, and the ranks resume from that; one spawn a file layout of the fork.
Gradients are not clipped, because a norm that is summed in another order moves the last bit: every curve is the same
bit for bit.
"""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_distopt.formats import convert
from tests.support.fork_files import same
from tests.support.mini_fork import Iteration, MiniFork, core_folder
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.long

RANKS, ITERATIONS = 2, 4
#: Of all trainings.
FLAGS = ("--clip-grad", "0", "--train-iters", str(ITERATIONS))
DISTRIBUTED = "--use-distributed-optimizer"
BF16, FP32_NORMS, SGD = ("--bf16",), ("--bf16", "--fp32-norms"), ("--bf16", "--optimizer", "sgd")
#: Overflows at the first two iterations.
FP16 = ("--fp16", "--initial-loss-scale", str(2.0**18), "--loss-scale-window", "2", "--hysteresis", "1")
#: An odd number of elements, which two ranks pad.
ODD = ("--bf16", "--hidden-size", "5", "--num-attention-heads", "1", "--vocab-size", "63", "--micro-batch-size", "1")
TP2, PP2 = ("--bf16", "--tensor-model-parallel-size", "2"), ("--bf16", "--pipeline-model-parallel-size", "2")
UNTIED, FROZEN = ("--bf16", "--untie-embeddings-and-output-weights"), ("--bf16", "--frozen-param")


@dataclass(frozen=True)
class Optimizer:
    """Flags, and whether it is ours."""

    words: tuple[str, ...]
    ours: bool = False


PLAIN, NATIVE = Optimizer(()), Optimizer((DISTRIBUTED,))
#: The fork's own class as our inner optimizer.
OURS = Optimizer((DISTRIBUTED, "--distopt-optimizer", "megatron.optimizer.fused_adam:FusedAdam"), ours=True)
#: Where the fork takes nothing but Adam.
OUR_SGD = Optimizer((DISTRIBUTED,), ours=True)


@dataclass(frozen=True)
class Case:
    """A training that is saved, converted and resumed.

    Args:
        words: flags of the model.
        saves: the optimizer that saves.
        via: formats to convert to, one after the other; the last one is resumed from.
        resumes: the optimizer that resumes.
        at: iteration of the save.
    """

    words: tuple[str, ...]
    saves: Optimizer
    via: tuple[str, ...]
    resumes: Optimizer
    at: int = 2


OF_GATHERED: dict[str, Case] = {
    "fp32, gathered to plain": Case((), NATIVE, ("plain",), PLAIN),
    "bf16, gathered to plain": Case(ODD, NATIVE, ("plain",), PLAIN),
    "bf16, plain over all to gathered": Case(ODD, PLAIN, ("distopt", "per-rank", "plain", "gathered"), NATIVE),
    "fp16, plain to gathered": Case(FP16, PLAIN, ("gathered",), NATIVE, at=3),
    "untied, gathered to plain": Case(UNTIED, NATIVE, ("plain",), PLAIN),
    "ours to gathered": Case(BF16, OURS, ("gathered",), NATIVE),
    "gathered to ours": Case(BF16, NATIVE, ("distopt",), OURS),
    "fp32 norms, ours to plain": Case(FP32_NORMS, OURS, ("plain",), PLAIN),
    "fp32 norms, plain to ours": Case(FP32_NORMS, PLAIN, ("distopt",), OURS),
    "fp32 norms, plain to ours in a gathered file": Case(FP32_NORMS, PLAIN, ("gathered",), OURS),
    "sgd, ours to plain": Case(SGD, OUR_SGD, ("plain",), PLAIN),
    "frozen, ours to plain": Case(FROZEN, OURS, ("plain",), PLAIN),
    "tp2, gathered over ours to plain": Case(TP2, NATIVE, ("distopt", "plain"), PLAIN),
    "pp2, plain to gathered": Case(PP2, PLAIN, ("gathered",), NATIVE),
    "pp2, plain to ours": Case(PP2, PLAIN, ("distopt",), OURS),
}
OF_PER_RANK: dict[str, Case] = {
    "bf16, own files to plain": Case(ODD, NATIVE, ("plain",), PLAIN),
    "bf16, plain to own files": Case(ODD, PLAIN, ("per-rank",), NATIVE),
    "fp16, plain to own files": Case(FP16, PLAIN, ("per-rank",), NATIVE, at=3),
    "fp16, nothing updated yet": Case(FP16, NATIVE, ("plain",), PLAIN, at=1),
    "fp32 norms, plain to ours": Case(FP32_NORMS, PLAIN, ("per-rank",), OURS),
    "fp32 norms, ours to plain": Case(FP32_NORMS, OURS, ("plain",), PLAIN),
    "sgd, own files to plain": Case(SGD, NATIVE, ("plain",), PLAIN),
    "tp2, own files over gathered": Case(TP2, NATIVE, ("gathered", "per-rank"), NATIVE),
    "pp2, plain to own files": Case(PP2, PLAIN, ("per-rank",), NATIVE),
}


# In the ranks.


@dataclass(frozen=True)
class Continued:
    """The iterations after the save, of the run without one and of the one that resumed; whether they end alike."""

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
        resumed = fork.train(*FLAGS, *case.words, *case.resumes.words, *loads, ours=case.resumes.ours)
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
    os.fsync = lambda descriptor: None  # nothing here loses its power, and a busy disk takes seconds to be sure of that
    fork, cases = (
        MiniFork.imported(file_layout=file_layout, adam="fused"),
        OF_GATHERED if file_layout == "gathered" else OF_PER_RANK,
    )
    return {name: _continue(fork, case, Path(folder) / name) for name, case in cases.items()}


# In the test process.


@dataclass(frozen=True)
class Collected:
    """What the ranks left, and what they returned, by rank."""

    folder: Path
    ranks: list[dict[str, Continued]]


def _collected(file_layout: str, folder: Path) -> Collected:
    core_folder()
    return Collected(folder, run_ranks(_collect, RANKS, file_layout, str(folder), seconds=200))


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> Collected:
    return _collected("gathered", tmp_path_factory.mktemp("gathered"))


@pytest.fixture(scope="module")
def per_rank(tmp_path_factory: pytest.TempPathFactory) -> Collected:
    return _collected("per_rank", tmp_path_factory.mktemp("per_rank"))


def _check(name: str, case: Case, collected: Collected) -> None:
    of_ranks = [found[name] for found in collected.ranks]
    assert len(of_ranks[0].resumed) == ITERATIONS - case.at
    assert of_ranks[0].resumed == of_ranks[0].uninterrupted
    assert [each.same_end for each in of_ranks] == [True] * RANKS


@pytest.mark.parametrize("name", OF_GATHERED)
def test_resume_in_gathered_when_converted_then_the_curve_is_the_uninterrupted_one(
    name: str, gathered: Collected
) -> None:
    _check(name, OF_GATHERED[name], gathered)


@pytest.mark.parametrize("name", OF_PER_RANK)
def test_resume_in_per_rank_when_converted_then_the_curve_is_the_uninterrupted_one(
    name: str, per_rank: Collected
) -> None:
    _check(name, OF_PER_RANK[name], per_rank)


def test_files_of_one_fork_when_converted_then_they_are_those_of_the_other(
    per_rank: Collected, gathered: Collected, tmp_path: Path
) -> None:
    """Both trained the same model on the same data with the same kernel."""
    gathered, own = (
        each.folder / name / "saved/iter_0000002"
        for each, name in ((gathered, "bf16, gathered to plain"), (per_rank, "bf16, own files to plain"))
    )
    convert(own, tmp_path / "gathered", "gathered")
    convert(gathered, tmp_path / "own", "per-rank")
    made, theirs = (_loaded(each / "mp_rank_00/distrib_optim.pt")[0] for each in (tmp_path / "gathered", gathered))
    assert [*made] == [*theirs] == [torch.float32]
    for kind, tensor in theirs[torch.float32].items():
        numel = tensor.numel() - 1  # the last one is padding, which the fork leaves as it was in memory
        assert made[torch.float32][kind].shape == tensor.shape
        assert torch.equal(made[torch.float32][kind][:numel], tensor[:numel]), kind
    for rank in range(RANKS):
        made, theirs = (_loaded(each / f"mp_rank_00_{rank:03d}/optim.pt") for each in (tmp_path / "own", own))
        assert made["opt_param_scheduler"] == theirs["opt_param_scheduler"]
        assert same(
            made["optimizer"]["shard_fp32_from_float16_groups"], theirs["optimizer"]["shard_fp32_from_float16_groups"]
        )
        inner, wanted = made["optimizer"]["optimizer"], theirs["optimizer"]["optimizer"]
        assert inner["param_groups"] == wanted["param_groups"]
        # torch's and DeepSpeed's classes look for the count there; the fork's own does not.
        assert {each.pop("step") for each in inner["state"].values()} == {2}
        assert same(inner["state"], wanted["state"])


def _loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)
