"""Muon and optimizers of whole params in a fork of 2023, against the host's own optimizer without
sharding.

The reference has `WholeMuon`, or the very class, in place of the host's Adam. Gradients are on a
grid, so that their sums over ranks are exact, and nothing is clipped, because a norm has another
order of sums. Tensor-parallel ranks put the parts of a matrix together for Muon; a class of whole
params takes its part for a param of its own, there as here.

Exercises hosts/megatron/muon_groups.py, hosts/megatron/own_shards.py,
hosts/megatron_2023/fork_muon.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.facts import Facts, facts_of
from tests.support.fork_worlds import ForkInWorlds, distance
from tests.support.mini_fork import TrainingRun, point_to
from tests.support.refusals import assert_mentions, raised
from tests.support.spawn import run_ranks
from tests.support.whole_classes import Adafactor, Soap, in_place_of_forks_adam
from tests.support.whole_muon import Reference, in_the_fork

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Compared:
    """One training with the reference and with ours."""

    ranks: int
    case: str  # words of both trainings
    whole: Callable[
        [Any], contextlib.AbstractContextManager[Any]
    ]  # called with the script: the reference is in place of the fork's Adam
    options: str  # words of ours
    ours: Context = nullcontext  # in which ours is built, where its optimizer is not named


TORCHS = {"momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
OTHER = {"momentum": 0.9, "nesterov": False, "ns_steps": 3, "adjust_lr_fn": "original"}
OURS = "--use-distributed-optimizer"
PARAMS = f"{OURS} --distopt-updates params"
ADAM = f"{OURS} --distopt-adam torch_foreach"
MUON = f"{ADAM} --distopt-optimizer muon"
NAMED = f"{OURS} --distopt-optimizer torch.optim:Adafactor"
GRID = "--grid-grads --clip-grad 1e9 --lr 0.02 --train-iters 3"
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
OVERLAPS = (
    "--distopt-overlap-grad-reduce yes --distopt-overlap-param-gather --distopt-bucket-size 1500"
)
EXPERTS = "--bf16 --experts --expert-model-parallel-size 2"
OPTIONS = (
    "--distopt-muon-momentum 0.9 --distopt-muon-nesterov no --distopt-muon-ns-steps 3 "
    "--distopt-muon-adjust-lr original"
)


def _muon(
    ranks: int,
    words: str,
    own: str = "",
    options: Mapping[str, Any] = TORCHS,
    repaired: bool = False,
    **of: Any,
) -> Compared:
    whole = Reference(options=options, **of)
    return Compared(
        ranks, words, lambda script: in_the_fork(script, whole, repaired=repaired), f"{MUON} {own}"
    )


def _whole(
    ranks: int, words: str = "", own: str = "", *, is_named: bool = False, repaired: bool = False
) -> Compared:
    if is_named:
        return Compared(
            ranks, words, lambda script: in_place_of_forks_adam(Adafactor), f"{NAMED} {own}"
        )

    def whole(script: Any) -> contextlib.AbstractContextManager[Any]:
        return in_place_of_forks_adam(Soap, repaired=repaired)

    return Compared(ranks, words, whole, f"{PARAMS} {own}", lambda: in_place_of_forks_adam(Soap))


CASES: dict[tuple[str, str], Compared] = {
    ("muon", "bf16, overlapped"): _muon(2, "--bf16", OVERLAPS),
    ("muon", "tp2, options, not split"): _muon(
        2, TP, f"{OPTIONS} --distopt-muon-split none", OTHER, split=False
    ),
    ("muon", "pp2, fp16"): _muon(2, f"--fp16 --initial-loss-scale 4096 {PP} --global-batch-size 4"),
    ("muon", "multi-query tp2"): _muon(2, f"{TP} --multi-query"),
    ("muon", "tp2, blockwise"): _muon(
        2, f"--bf16 {TP}", "--distopt-muon-tp-mode blockwise", joins=False
    ),
    ("muon", "tp2, dp2"): _muon(4, f"--bf16 {TP} --sequence-parallel"),
    ("muon", "experts"): _muon(2, EXPERTS, repaired=True),  # see test_megatron_2023_numerics.py
    ("whole", "named"): _whole(2, "--bf16 --fp32-norms --adam-beta2 0.99", is_named=True),
    ("whole", "bf16, overlapped"): _whole(2, "--bf16", OVERLAPS),
    ("whole", "tp2"): _whole(2, f"--bf16 {TP} --sequence-parallel"),
    ("whole", "experts"): _whole(2, EXPERTS, repaired=True),
}
#: How ours goes on in each kind of checkpoint, what stands in place of the fork's Adam then, and on
#: how many ranks.
ON: dict[str, tuple[str, Context, int]] = {
    "muon": (MUON, nullcontext, 3),
    "whole": (PARAMS, lambda: in_place_of_forks_adam(Soap), 1),
}
#: What other hosts refuse as well is in their suites of owners.
REFUSED = {
    "muon, a file of the fork": f"{MUON} --distopt-checkpoint-format gathered",
    "whole, a file of the fork": f"{NAMED} --distopt-checkpoint-format gathered",
    "muon, the fork's SGD": f"{MUON} --optimizer sgd",
    "whole, a number for a pair": f"{NAMED} --adam-eps 1e-6",
}


def collect_facts(rank: int, size: int, folder: Path) -> dict[Any, Any]:
    """In a rank: every case with the reference and with ours; the cases of a world one after the
    other."""
    fork, found = ForkInWorlds("gathered", rank, folder, ranks=size), dict[Any, Any]()
    train = partial(_train, fork)
    for ranks in (4, 2):
        if not fork.enters(ranks):
            continue
        cases, whole = (
            {key: compared for key, compared in CASES.items() if compared.ranks == ranks},
            {},
        )
        for key, compared in cases.items():
            with compared.whole(fork.fork.script):
                whole[key] = train(compared.case, ours=False)
        for key, compared in cases.items():
            with compared.ours():
                run = train(compared.case, compared.options)
            found[key] = distance(run, whole[key]), run.losses, whole[key].losses
    if rank < 2:
        found["distributed"] = _distributed(train)
        with in_place_of_forks_adam(Soap):
            plain = train("--train-iters 1", ours=False).optimizer.state_dict()
            sharded = train(f"{PARAMS} --train-iters 1").optimizer
        found["plain"] = raised(lambda: sharded.load_state_dict(plain))[0]
        found["refused"] = {
            name: raised(lambda w=words: train(w))[0] for name, words in REFUSED.items()
        }
    for inner, (words, place, ranks) in ON.items():
        with place():
            found["resumed", inner] = _resumed(
                fork, folder / inner, ranks, *f"{GRID} --bf16 {words}".split()
            )
    fork.leaves()
    return found


def _train(fork: ForkInWorlds, *words: str, ours: bool = True) -> TrainingRun:
    return fork.train(*" ".join((GRID, *words)).split(), ours=ours)


def _resumed(
    fork: ForkInWorlds, folder: Path, ranks: int, *words: str
) -> dict[str, tuple[dict[str, Tensor], int]]:
    """Collective: three iterations of two ranks, and the last one of them on `ranks` that load a
    save.

    Returns:
        By "whole" or "resumed": this rank's params, and the iterations that it logged.
    """
    words = (*words, "--global-batch-size", "6", "--micro-batch-size", "1")
    runs = dict[str, TrainingRun]()
    # See [Note: same arithmetic] in test_megatron_2023_reshard.py.
    if fork.enters(2):
        runs["whole"] = fork.train(
            *words, "--loss-scale", "3", "--save", str(folder), "--save-interval", "2"
        )
        point_to(folder, 2)
    if fork.enters(ranks):
        runs["resumed"] = fork.train(*words, "--loss-scale", str(6 // ranks), "--load", str(folder))
    return {name: (dict(run.params), len(run.iterations)) for name, run in runs.items()}


def _distributed(train: Callable[..., TrainingRun]) -> tuple[float, float]:
    """How far a step with products that are added up is from one with whole matrices, and how far
    from no step."""
    words = f"{TP} --train-iters 1 {MUON}"  # with sums in another order longer trainings part
    start, whole = train(words, "--lr 0"), train(words)
    return distance(whole, train(words, "--distopt-muon-tp-mode distributed")), distance(
        whole, start
    )


def collect_per_rank(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """In a rank: trainings that are interrupted, with a fork whose files are those of each rank."""
    fork, found = ForkInWorlds("per_rank", rank, folder, ranks=size), dict[str, Any]()

    train = partial(_train, fork, "--bf16")

    train(ADAM, f"--train-iters 1 --save {folder}/adam")
    whole = train(MUON, f"--save-interval 2 --save {folder}/muon")
    point_to(folder / "muon", 2)
    resumed = train(MUON, f"--load {folder}/muon")
    found["resumed"] = distance(whole, resumed), len(resumed.iterations)
    found["from Adam"] = raised(lambda: train(f"{MUON} --load {folder}/adam"))[0]
    found["whole"] = raised(lambda: train(NAMED))
    return found


facts = facts_of(collect_facts, 4, seconds=300)


@pytest.mark.parametrize("key", CASES, ids=" ".join)
def test_training_when_updates_are_sharded_then_it_is_that_of_the_reference_without_sharding(
    key: tuple[str, str], facts: Facts
) -> None:
    found = facts.of_some(key)
    assert len(found) == CASES[key].ranks
    for apart, ours, whole in found:
        assert apart == 0.0, f"{apart}, losses {ours}, and {whole}"
        assert ours == whole
    losses = next(ours for _, ours, _ in found if ours)
    assert len(set(losses)) == len(losses), "it has not trained"


def test_muon_when_products_are_added_up_then_near_to_that_of_whole_matrices(facts: Facts) -> None:
    # The iteration is in bfloat16, with 8 bits: its five steps leave some thousandths of the
    # update.
    for apart, moved in facts.of_some("distributed"):
        assert 0 < apart < 0.05 * moved


@pytest.mark.parametrize("inner", ON)
def test_load_when_resumed_at_another_size_then_equal_to_the_uninterrupted_training(
    inner: str, facts: Facts
) -> None:
    found = facts["resumed", inner]
    wanted, _ = found[0]["whole"]
    of_ranks = [of_rank["resumed"] for of_rank in found if "resumed" in of_rank]
    assert len(of_ranks) == ON[inner][2]
    assert max(num_logged for _, num_logged in of_ranks) == 1  # of three
    for params, _ in of_ranks:
        assert all(torch.equal(params[name], wanted[name]) for name in wanted)


def test_load_when_per_rank_files_then_muon_is_resumed_and_whole_params_refused(
    tmp_path: Path,
) -> None:
    found = run_ranks(collect_per_rank, 2, tmp_path, seconds=300)
    assert [of_rank["resumed"][0] for of_rank in found] == [0.0, 0.0]
    assert max(of_rank["resumed"][1] for of_rank in found) == 1
    assert {of_rank["from Adam"] for of_rank in found} <= {"CheckpointError", "RanksDisagreeError"}
    for kind, text in (of_rank["whole"] for of_rank in found):
        assert kind == "ConfigError"
        assert_mentions(
            text, "Adafactor", "per-rank files", "Write --optimizer adam or sgd", "muon"
        )


def test_load_when_the_state_is_of_a_run_without_sharding_then_a_class_of_whole_params_refuses_it(
    facts: Facts,
) -> None:
    assert facts.of_some("plain") == ["CheckpointError"] * 2


@pytest.mark.parametrize("name", REFUSED)
def test_start_when_something_is_not_served_then_an_error_on_all_ranks(
    name: str, facts: Facts
) -> None:
    assert [errors[name] for errors in facts.of_some("refused")] == ["ConfigError"] * 2
