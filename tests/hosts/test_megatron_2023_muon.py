"""Muon in a fork of 2023: `--distopt-optimizer muon` against torch's Muon on whole matrices.

The reference is the fork's own optimizer without sharding, whose base optimizer is torch's Muon for the matrices of
numbered layers, cut by head where they are fused, and torch's Adam for all else. Tensor-parallel ranks gather a whole
matrix by themselves there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.fork_worlds import ForkInWorlds, distance, mains, raised
from tests.support.mini_fork import TrainingRun
from tests.support.spawn import run_ranks
from tests.support.whole_muon import Fused, Reference, WholeMuon, name_params

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")

RANKS = 4
OURS = ("--use-distributed-optimizer", "--distopt-optimizer", "muon", "--distopt-adam", "torch_foreach")
#: Gradients whose sums over ranks are exact, and no clipping, whose norm has another order of sums.
EXACT = ("--grid-grads", "--clip-grad", "1e9", "--lr", "0.02", "--train-iters", "5")
LEARNS = ("--bf16", "--lr", "0.005", "--train-iters", "20", "--micro-batch-size", "8")


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        ranks: of its world.
        words: flags of both trainings.
        own: flags of ours.
        split, mode: what the reference does with fused weights, and with those that tensor-parallel ranks share.
        repaired: see test_megatron_2023_numerics.py.
    """

    ranks: int
    words: str
    own: str = ""
    split: bool = True
    mode: str = "duplicated"
    repaired: bool = False


TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
CASES = {
    "alone": Case(1, ""),
    "fp32": Case(2, ""),
    "bf16, overlapped": Case(
        2, "--bf16", "--distopt-overlap-grad-reduce yes --distopt-overlap-param-gather --distopt-bucket-size 1500"
    ),
    "bf16, fp32 norms": Case(2, "--bf16 --fp32-norms"),
    "fp16": Case(2, "--fp16 --initial-loss-scale 4096"),
    "not split": Case(2, "--bf16", "--distopt-muon-split none", split=False),
    "options": Case(
        2,
        "",
        "--distopt-muon-momentum 0.9 --distopt-muon-nesterov no --distopt-muon-ns-steps 3 "
        "--distopt-muon-adjust-lr original",
    ),
    "pp2": Case(2, f"--bf16 {PP2} --global-batch-size 4"),
    "tp2": Case(2, f"--bf16 {TP2}"),
    "multi-query tp2": Case(2, f"{TP2} --multi-query"),
    "tp2, blockwise": Case(2, f"--bf16 {TP2}", "--distopt-muon-tp-mode blockwise", mode="blockwise"),
    "tp2, dp2": Case(4, f"--bf16 {TP2} --sequence-parallel"),
    "tp2, dp2, not split": Case(4, f"{TP2}", "--distopt-muon-split none", split=False),
    "experts": Case(4, "--bf16 --experts --expert-model-parallel-size 2", repaired=True),
}
#: With their products added up in another order the trainings part.
DISTRIBUTED = Case(4, f"{TP2} --train-iters 1", "--distopt-muon-tp-mode distributed")


def _reference(case: Case) -> Reference:
    options: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.95}
    if "--distopt-muon-ns-steps" in case.own.split():
        options = {"adjust_lr_fn": "original", "momentum": 0.9, "nesterov": False, "ns_steps": 3}
    return Reference(options=options, joins=case.mode == "duplicated")


def _fused_of_fork(case: Case) -> Fused:
    """Queries, keys and values of a head one after the other; keys and values alone where heads share them."""
    from megatron import get_args

    width = get_args().hidden_size // get_args().num_attention_heads
    sizes = {"query_key_value.weight": (width,) * 3, "key_value.weight": (width,) * 2}
    return Fused(sizes if case.split else {})


@contextlib.contextmanager
def _whole(fork: ForkInWorlds, case: Case) -> Iterator[None]:
    """In the block the fork's own trainings use the reference."""
    import megatron.model.distributed as fork_ddp
    from megatron import optimizer

    def provide(*args: Any, **kwargs: Any) -> Any:
        model = original(*args, **kwargs)
        WholeMuon.fused = _fused_of_fork(case)
        name_params(model)
        return model

    original = fork.fork.script.model_provider
    WholeMuon.reference = _reference(case)
    with (
        mock.patch.object(optimizer, "Adam", WholeMuon),
        mock.patch.object(fork.fork.script, "model_provider", provide),
        mock.patch.object(fork_ddp, "REPAIRED", case.repaired),
    ):
        yield


def collect(rank: int, size: int, folder: str) -> dict[str, Any]:
    """In a rank: every case with the reference and with ours; the cases of a world one after the other."""
    fork, found = ForkInWorlds("gathered", rank, folder, ranks=size), dict[str, Any]()
    for ranks in range(1, RANKS + 1):
        here = {name: case for name, case in CASES.items() if case.ranks == ranks}
        if not here or not fork.enters(ranks):
            continue
        of_fork = {}
        for name, case in here.items():
            with _whole(fork, case):
                of_fork[name] = fork.train(*EXACT, *case.words.split(), ours=False)
        for name, case in here.items():
            ours = fork.train(*EXACT, *case.words.split(), *OURS, *case.own.split())
            found[name] = distance(ours, of_fork[name]), [each.loss for each in ours.iterations]
    fork.leaves()
    found["learns"] = [each.loss for each in fork.train(*LEARNS, *OURS).iterations]
    found["distributed"] = _distributed(fork)
    found["resumed"] = fork.resumed(folder, *EXACT, "--bf16", *OURS)
    found["crossed"] = _crossed(fork, folder)
    found["refused"] = _refused(fork)
    return found


def _distributed(fork: ForkInWorlds) -> tuple[float, float]:
    """How far a step with products that are added up is from one with whole matrices, and how far from no step."""
    words = (*EXACT, *DISTRIBUTED.words.split(), *OURS)
    start = fork.train(*words, "--lr", "0")
    whole, summed = fork.train(*words), fork.train(*words, *DISTRIBUTED.own.split())
    return distance(whole, summed), distance(whole, start)


@dataclass(frozen=True)
class Crossed:
    """What a run holds that went on from the state of another optimizer.

    Args:
        are_mains_equal: whether its main params are those that were saved.
        moments: by kind of param, "matrix" or "other", and by kind of moment: whether there is one.
        learns: whether it trains on.
    """

    are_mains_equal: bool
    moments: dict[str, set[str]]
    learns: bool


def _crossed(fork: ForkInWorlds, folder: str) -> dict[str, Crossed]:
    """From Adam to Muon and back, on two ranks."""
    adam = (OURS[0], *OURS[3:])
    found = {}
    if fork.enters(2):
        for name, saves, loads in (("to Muon", adam, OURS), ("to Adam", OURS, adam)):
            words, saved = (*EXACT, "--bf16", "--lr-decay-iters", "8"), f"{folder}/{name}"
            before = fork.train(*words, *saves, "--save", saved)
            loaded = fork.train(*words, *loads, "--load", saved)  # all iterations are done
            after = fork.train(*words, *loads, "--load", saved, "--train-iters", "8")
            held = [mains(run) for run in (before, loaded)]
            equal = all(torch.equal(held[0][key], held[1][key]) for key in held[0])
            learns = not after.iterations or all(each.loss < 6 for each in after.iterations)
            found[name] = Crossed(equal and held[0].keys() == held[1].keys(), _moments(loaded), learns)
    fork.leaves()
    return found


def _moments(run: TrainingRun) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {"matrix": set(), "other": set()}
    named, inner = run.optimizer.start.named, run.optimizer.sharded.inner
    for flat in run.optimizer.sharded.flat_params:
        name = flat.plan.shards[0].name
        kind = "matrix" if ".layers." in name and named[name].dim() == 2 else "other"
        found[kind] |= {key for key, each in inner.state.get(flat.main, {}).items() if each.numel() > 1}
    return found


def collect_per_rank(rank: int, size: int, folder: str) -> dict[str, Any]:
    """In a rank: a training that is interrupted, with a fork whose files are those of each rank."""
    fork, words = ForkInWorlds("per_rank", rank, folder, ranks=size), (*EXACT, "--bf16", *OURS)
    whole = fork.train(*words)
    saves = ("--train-iters", "3", "--lr-decay-iters", "5", "--save", f"{folder}/saved")
    fork.train(*words, *saves)
    resumed = fork.train(*words, "--load", f"{folder}/saved")
    adams = (*EXACT, "--bf16", *OURS[:1], *OURS[3:])
    fork.train(*adams, "--save", f"{folder}/adam")
    return {
        "distance": distance(whole, resumed),
        "logged": len(resumed.iterations),
        "from Adam": raised(lambda: fork.train(*words, "--load", f"{folder}/adam")),
    }


REFUSED = {
    "state in low precision": "--bf16 --distopt-exp-avg-dtype int8",
    "state on the host": "--bf16 --distopt-offload-fraction 0.5",
    "a file of the fork": "--distopt-checkpoint-format gathered",
    "digests": "--distopt-log-digests 1",
    "the fork's SGD": "--optimizer sgd",
}


def _refused(fork: ForkInWorlds) -> dict[str, tuple[str, str]]:
    return {name: raised(lambda w=words: fork.train(*EXACT, *OURS, *w.split())) for name, words in REFUSED.items()}  # type: ignore[misc]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(collect, RANKS, str(tmp_path_factory.mktemp("worlds")), seconds=300)


@pytest.mark.parametrize("name", CASES)
def test_muon_in_a_fork_when_trained_then_params_are_those_of_torchs_muon_on_whole_matrices(
    found: list[dict[str, Any]], name: str
) -> None:
    of_ranks = [found[rank][name] for rank in range(CASES[name].ranks)]
    assert [distance for distance, _ in of_ranks] == [0.0] * CASES[name].ranks
    losses = next(losses for _, losses in of_ranks if losses)
    assert len(set(losses)) == len(losses)  # it has trained


def test_muon_in_a_fork_when_trained_for_longer_then_the_loss_falls(found: list[dict[str, Any]]) -> None:
    losses = next(of_rank["learns"] for of_rank in found if of_rank["learns"])
    assert losses[-1] < losses[0] - 0.2


def test_muon_in_a_fork_when_products_are_added_up_then_near_to_that_of_whole_matrices(
    found: list[dict[str, Any]],
) -> None:
    # The iteration is in bfloat16, with 8 bits: its five steps leave some thousandths of the update.
    for of_rank in found:
        apart, moved = of_rank["distributed"]
        assert 0 < apart < 0.05 * moved


def test_muon_in_a_fork_when_resumed_at_another_size_then_equal_to_the_uninterrupted_training(
    found: list[dict[str, Any]],
) -> None:
    wanted, _ = found[0]["resumed"]["whole"]
    for ranks in ("1", "2", "3"):
        of_ranks = [of_rank["resumed"][ranks] for of_rank in found[: int(ranks)]]
        assert max(num_logged for _, num_logged in of_ranks) == 2  # of five
        for params, _ in of_ranks:
            assert all(torch.equal(params[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("way", "moments"),
    [
        ("to Muon", {"matrix": set(), "other": {"exp_avg", "exp_avg_sq"}}),
        ("to Adam", {"matrix": set(), "other": {"exp_avg", "exp_avg_sq"}}),
    ],
)
def test_checkpoint_when_it_is_taken_by_the_other_optimizer_then_main_params_stay_and_matrices_begin_anew(
    found: list[dict[str, Any]], way: str, moments: dict[str, set[str]]
) -> None:
    for of_rank in found[:2]:
        assert of_rank["crossed"][way] == Crossed(are_mains_equal=True, moments=moments, learns=True)


def test_muon_in_a_fork_when_files_are_those_of_each_rank_then_resumed_alike_and_not_from_adam(tmp_path: Path) -> None:
    found = run_ranks(collect_per_rank, 2, str(tmp_path), seconds=200)
    assert [of_rank["distance"] for of_rank in found] == [0.0, 0.0]
    assert max(of_rank["logged"] for of_rank in found) == 2
    assert {of_rank["from Adam"][0] for of_rank in found} == {"CheckpointError", "RanksDisagreeError"}


@pytest.mark.parametrize("name", REFUSED)
def test_muon_in_a_fork_when_something_is_not_served_then_an_error_on_all_ranks(
    found: list[dict[str, Any]], name: str
) -> None:
    assert [of_rank["refused"][name][0] for of_rank in found] == ["ConfigError"] * RANKS
