"""Optimizers that update whole params in a fork of 2023, against the fork's own optimizer without sharding.

Both have the same class: named by `--distopt-optimizer`, or in place of the fork's Adam. Tensor-parallel ranks have
parts of weights, which the class takes for params of their own there as here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_distopt.checkpoint import load_checkpoint
from tests.support.fork_worlds import ForkInWorlds, distance, mains, raised
from tests.support.spawn import run_ranks
from tests.support.whole_classes import Adafactor, Soap, tried_once

RANKS = 4
OURS = "--use-distributed-optimizer"
NAMED = (OURS, "--distopt-optimizer", "torch.optim:Adafactor")
#: Gradients whose sums over ranks are exact, and no clipping, whose norm has another order of sums.
EXACT = ("--grid-grads", "--clip-grad", "1e9", "--lr", "0.02", "--train-iters", "5")
LEARNS = ("--bf16", "--lr", "0.1", "--train-iters", "20", "--micro-batch-size", "8")
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        ranks: of its world.
        words: flags of both trainings.
        own: flags of ours; with a class in them the fork's Adam is replaced in the reference alone.
        repaired: see test_megatron_2023_numerics.py.
        optimizer: in place of the fork's Adam.
    """

    ranks: int
    words: str = ""
    own: str = ""
    repaired: bool = False
    optimizer: type[torch.optim.Optimizer] = Soap


NAME = " ".join(NAMED[1:])
CASES = {
    "alone": Case(1),
    "fp32": Case(2),
    "named": Case(2, "--bf16 --adam-beta2 0.99", NAME, optimizer=Adafactor),
    "bf16, overlapped": Case(
        2, "--bf16", "--distopt-overlap-grad-reduce yes --distopt-overlap-param-gather --distopt-bucket-size 1500"
    ),
    "bf16, fp32 norms": Case(2, "--bf16 --fp32-norms", NAME, optimizer=Adafactor),
    "fp16": Case(2, "--fp16 --initial-loss-scale 4096"),
    "pp2": Case(2, f"--bf16 {PP2} --global-batch-size 4"),
    "tp2": Case(2, f"--bf16 {TP2}"),
    "tp2, dp2": Case(4, f"--bf16 {TP2} --sequence-parallel"),
    "tp2, dp2, named": Case(4, TP2, NAME, optimizer=Adafactor),
    "experts": Case(4, "--bf16 --experts --expert-model-parallel-size 2", repaired=True),
}


@contextlib.contextmanager
def _with(optimizer: type[torch.optim.Optimizer], *, repaired: bool = False) -> Iterator[None]:
    """In the block the fork builds another optimizer where it builds its Adam."""
    import megatron.model.distributed as fork_ddp
    from megatron import optimizer as fork_optimizer

    with mock.patch.object(fork_optimizer, "Adam", optimizer), mock.patch.object(fork_ddp, "REPAIRED", repaired):
        yield


@tried_once()
def collect(rank: int, size: int, folder: str) -> dict[str, Any]:
    """In a rank: every case with the reference and with ours; the cases of a world one after the other."""
    fork, found = ForkInWorlds("gathered", rank, folder, ranks=size), dict[str, Any]()
    for ranks in (1, 2, 4):
        here = {name: case for name, case in CASES.items() if case.ranks == ranks}
        if fork.enters(ranks):
            found |= {name: _compared(fork, case) for name, case in here.items()}
    fork.leaves()
    found["learns"] = [each.loss for each in fork.train(*LEARNS, *NAMED).iterations]
    with _with(Soap):
        found["resumed"] = fork.resumed(f"{folder}/resumed", *EXACT, "--bf16", OURS)
    found["crossed"] = _crossed(fork, folder)
    found["tensor-parallel"] = _tensor_parallel(fork, folder)
    found["refused"] = {name: raised(lambda w=w: fork.train(*EXACT, *NAMED, *w.split())) for name, w in REFUSED.items()}
    return found


def _compared(fork: ForkInWorlds, case: Case) -> tuple[float, list[float]]:
    words, is_named = (*EXACT, *case.words.split()), case.own.startswith(NAME)
    with _with(case.optimizer, repaired=case.repaired):
        whole = fork.train(*words, ours=False)
    with contextlib.nullcontext() if is_named else _with(case.optimizer):
        ours = fork.train(*words, OURS, *case.own.split())
    return distance(ours, whole), [each.loss for each in ours.iterations]


def _crossed(fork: ForkInWorlds, folder: str) -> dict[str, tuple[bool, bool, bool]]:
    """From Adam to Adafactor and back, on two ranks: whether main params are taken, the state is new, and it learns."""
    found = {}
    if fork.enters(2):
        for name, saves, loads in (("named", (OURS,), NAMED), ("adam", NAMED, (OURS,))):
            words, saved = (*EXACT, "--bf16", "--lr-decay-iters", "8"), f"{folder}/to {name}"
            before = fork.train(*words, *saves, "--save", saved)
            loaded = fork.train(*words, *loads, "--load", saved)  # all iterations are done
            after = fork.train(*words, *loads, "--load", saved, "--train-iters", "8")
            equal = _are_same(mains(before), mains(loaded))
            found[name] = (equal, not _has_state(loaded), all(each.loss < 6 for each in after.iterations))
    fork.leaves()
    return found


def _are_same(one: Mapping[Any, torch.Tensor], other: Mapping[Any, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def _has_state(run: Any) -> bool:
    inner = run.optimizer.sharded.inner
    return any(inner.state.values()) or any(each.has_state for each in getattr(inner, "owned", {}).values())


def _tensor_parallel(fork: ForkInWorlds, folder: str) -> dict[str, Any]:
    """A training with TP 2 and DP 2: resumed, and loaded with TP 1."""
    from megatron_distopt.hosts.megatron_2023.checkpoint import whole_model_of

    words, saved = (*EXACT, "--bf16", OURS, "--lr-decay-iters", "5"), f"{folder}/tensor-parallel"
    with _with(Soap):
        whole = fork.train(*words, *TP2.split())
        fork.train(*words, *TP2.split(), "--train-iters", "3", "--save", saved)
        again = fork.train(*words, *TP2.split(), "--load", saved)
        other = fork.train(*words)  # whose state is replaced: the fork itself loads nothing of another size
    optimizer = other.optimizer
    load_checkpoint(next(Path(saved).rglob("*.distopt")), whole_model_of(optimizer), optimizer.everyone)
    new = {name: not owned.has_state for name, owned in optimizer.sharded.inner.owned.items()}
    return {"resumed": distance(whole, again), "new": new}


def collect_per_rank(rank: int, size: int, folder: str) -> dict[str, Any]:
    """In a rank: a training that is interrupted, with a fork whose files are those of each rank."""
    fork, words = ForkInWorlds("per_rank", rank, folder, ranks=size), (*EXACT, "--bf16")
    with _with(Soap):
        whole = fork.train(*words, OURS)
        fork.train(*words, OURS, "--train-iters", "3", "--lr-decay-iters", "5", "--save", f"{folder}/saved")
        resumed = fork.train(*words, OURS, "--load", f"{folder}/saved")
        plain = fork.train(*words, ours=False).optimizer.state_dict()
    fork.train(*words, OURS, "--save", f"{folder}/adam")
    loads = {
        "from Adam": (*NAMED, "--load", f"{folder}/adam"),
        "to Adam": (OURS, "--load", f"{folder}/saved"),
        "another class": (*NAMED, "--load", f"{folder}/saved"),
    }
    refused = {name: raised(lambda each=each: fork.train(*words, *each)) for name, each in loads.items()}
    refused["without sharding"] = raised(lambda: resumed.optimizer.load_state_dict(plain))
    return {"distance": distance(whole, resumed), "logged": len(resumed.iterations), **refused}


REFUSED = {
    "state in low precision": "--bf16 --distopt-exp-avg-dtype int8",
    "state on the host": "--bf16 --distopt-offload-fraction 0.5",
    "a file of the fork": "--distopt-checkpoint-format gathered",
    "digests": "--distopt-log-digests 1",
    "deterministic": "--distopt-deterministic",
    "number for a pair": "--adam-eps 1e-6",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(collect, RANKS, str(tmp_path_factory.mktemp("worlds")), seconds=300)


@pytest.mark.parametrize("name", CASES)
def test_whole_params_in_a_fork_when_trained_then_params_are_those_of_the_class_without_sharding(
    found: list[dict[str, Any]], name: str
) -> None:
    of_ranks = [found[rank][name] for rank in range(CASES[name].ranks)]
    assert [apart for apart, _ in of_ranks] == [0.0] * CASES[name].ranks
    losses = next(losses for _, losses in of_ranks if losses)
    assert len(set(losses)) == len(losses), "it has not trained"


def test_whole_params_in_a_fork_when_trained_for_longer_then_the_loss_falls(found: list[dict[str, Any]]) -> None:
    losses = next(of_rank["learns"] for of_rank in found if of_rank["learns"])
    assert losses[-1] < losses[0] - 0.2


def test_whole_params_in_a_fork_when_resumed_at_another_size_then_equal_to_the_uninterrupted_training(
    found: list[dict[str, Any]],
) -> None:
    wanted, _ = found[0]["resumed"]["whole"]
    for ranks in ("1", "2", "3"):
        of_ranks = [of_rank["resumed"][ranks] for of_rank in found[: int(ranks)]]
        assert max(num_logged for _, num_logged in of_ranks) == 2  # of five
        for params, _ in of_ranks:
            assert all(torch.equal(params[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("way", ["named", "adam"])
def test_checkpoint_when_it_is_of_another_class_then_main_params_stay_and_the_state_begins_anew(
    found: list[dict[str, Any]], way: str
) -> None:
    for of_rank in found[:2]:
        assert of_rank["crossed"][way] == (True, True, True)


def test_whole_params_when_tensor_parallel_then_resumed_at_that_size_and_begun_anew_where_parts_are_others(
    found: list[dict[str, Any]],
) -> None:
    new: dict[str, bool] = {}
    for of_rank in found:
        assert of_rank["tensor-parallel"]["resumed"] == 0.0
        new |= of_rank["tensor-parallel"]["new"]
    assert {each for name, each in new.items() if "query_key_value.weight" in name} == {True}
    assert {each for name, each in new.items() if "layernorm" in name} == {False}


def test_whole_params_in_a_fork_when_files_are_those_of_each_rank_then_resumed_alike_and_not_by_others(
    tmp_path: Path,
) -> None:
    found = run_ranks(collect_per_rank, 2, str(tmp_path), seconds=200)
    assert [of_rank["distance"] for of_rank in found] == [0.0, 0.0]
    assert max(of_rank["logged"] for of_rank in found) == 2
    for name in ("from Adam", "to Adam", "another class", "without sharding"):
        assert [of_rank[name][0] for of_rank in found] == ["CheckpointError"] * 2, found[0][name]


@pytest.mark.parametrize("name", REFUSED)
def test_whole_params_in_a_fork_when_something_is_not_served_then_an_error_on_all_ranks(
    found: list[dict[str, Any]], name: str
) -> None:
    assert [of_rank["refused"][name][0] for of_rank in found] == ["ConfigError"] * RANKS, found[0]["refused"][name]
