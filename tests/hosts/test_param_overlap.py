"""Params gathered while forward runs: no code ever computes with, saves or reads old values.

One spawn of two ranks runs every training twice, with `overlap_param_gather` and without. Every
gather of the first is made slow, so that whoever does not wait for one has old values and ends up
with other bits.

Exercises hosts/torch/gather.py, hosts/torch/params.py, comm/pending.py.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import Embedding, LayerNorm, Linear, Module, ModuleList, Parameter, functional

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.comm import pairwise
from tests.support.facts import Facts, facts_of

RANKS, STEPS, WIDTH, LAYERS, WORDS = 2, 3, 16, 3, 20
#: Seconds: longer than forward and backward of this model.
SLOW = 0.01
#: A bucket a layer and more.
BUCKET = WIDTH * WIDTH + WIDTH


class Net(Module):
    """Layers and an embedding; the embedding may be used by others without being called."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding(WORDS, WIDTH)
        self.layers = ModuleList(Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norm = LayerNorm(WIDTH)

    def forward(self, words: Tensor, order: list[int], head: str) -> Tensor:
        hidden = (
            self.embedding(words)
            if head != "weight alone"
            else words.float().unsqueeze(-1).to(self.norm.weight)
        )
        hidden = hidden.expand(*hidden.shape[:-1], WIDTH)
        for number in order:
            hidden = hidden + self.layers[number](hidden).tanh()
        if head == "foreign":  # a layer's weight, read before anybody calls that layer or after
            hidden = hidden + functional.linear(hidden, self.layers[LAYERS - 1].weight)
        hidden = self.norm(hidden)
        logits = functional.linear(hidden, self.embedding.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), words.flatten())


@dataclasses.dataclass(frozen=True)
class Case:
    """A training."""

    # by step and rank, which layers are called, one after the other
    order: Callable[[int, int], list[int]]
    head: str = ""  # which params are read by code that does not call their module, see `Net`
    dtype: torch.dtype = torch.float32  # of the params but the norm's
    norm: torch.dtype = torch.float32  # of the norm's
    between: tuple[str, ...] = ()  # what happens after each step
    microbatches: int = 1  # of each step
    grads: bool = False  # grads are overlapped with backward as well
    # `head` is read in the second microbatch alone, and in the first one of the last step
    is_late: bool = False

    def head_of(self, step: int, number: int) -> str:
        """Of a microbatch."""
        return self.head if not self.is_late or (number == 1) == (step < STEPS - 1) else ""


def _usual(step: int, rank: int) -> list[int]:
    return list(range(LAYERS))


def _backwards(step: int, rank: int) -> list[int]:
    return list(reversed(range(LAYERS)))


def _changing(step: int, rank: int) -> list[int]:
    """Another order and another set in every step, and on every rank."""
    return [[0, 1, 2], [2, 0], [1], [2, 1, 0, 1]][(step + rank) % 4]


def _idle(step: int, rank: int) -> list[int]:
    return [] if rank == 1 and step == 0 else [0, 1, 2]


BF16 = torch.bfloat16
CASES = {
    "order is not that of registration": Case(_backwards),
    "order changes": Case(_changing),
    "rank without layers": Case(_idle),
    "embedding that is never called": Case(_usual, head="weight alone"),
    "weight of a layer that nobody calls": Case(lambda step, rank: [0, 1], head="foreign"),
    "weight of a layer read behind it": Case(_usual, head="foreign"),
    # Its neighbours in the bucket, those of the norm, are read in every microbatch.
    "weight that is read later": Case(
        lambda step, rank: [0, 1], head="foreign", microbatches=2, is_late=True
    ),
    "two dtypes": Case(_usual, dtype=BF16, norm=torch.float32),
    "several microbatches": Case(_usual, microbatches=2),
    "grads as well": Case(_changing, grads=True, microbatches=2),
    "evaluation of another path": Case(lambda step, rank: [0], between=("eval",) * STEPS),
    "state_dict, accessor, average of params": Case(
        _usual, between=("state_dict", "accessor", "average")
    ),
    "rolled back": Case(_usual, between=("rolled back",) * STEPS, dtype=BF16, norm=BF16),
    "optimizer state, copies": Case(_usual, between=("optimizer", "deepcopy", "pickled")),
}


@dataclasses.dataclass(frozen=True)
class Result:
    """What a training left."""

    params: list[Tensor]  # at the end
    seen: list[Tensor]  # between the steps
    pending: list[int]  # by step, how many gathers were under way behind it
    in_forward: list[int]  # by forward pass, the same when the embedding was read


def _evaluated(model: Net, optimizer: Any) -> list[Tensor]:
    model.eval()
    with torch.no_grad():
        seen = model(WORDS_SEEN, [2, 1, 0], "foreign")
    model.train()
    return [seen]


def _averaged(model: Net, optimizer: Any) -> list[Tensor]:
    kept = [torch.zeros_like(param) for param in model.parameters()]
    with torch.no_grad():
        torch._foreach_lerp_(kept, list(model.parameters()), 0.5)
    return kept


def _rolled_back(model: Net, optimizer: Any) -> list[Tensor]:
    kept = {name: value * 0.5 for name, value in model.state_dict().items()}
    optimizer.zero_grad()
    model(WORDS_SEEN, [0, 1, 2], "").backward()
    optimizer.step()
    model.load_state_dict(kept)
    return list(model.state_dict().values())


def _after(call: Callable[[Any], object]) -> Callable[[Net, Any], list[Tensor]]:
    """All params after something was done with the optimizer."""

    def between(model: Net, optimizer: Any) -> list[Tensor]:
        call(optimizer)
        return list(model.parameters())

    return between


WORDS_SEEN = torch.arange(6).view(2, 3)
#: What happens after a step, and what it has seen.
BETWEEN: dict[str, Callable[[Net, Any], list[Tensor]]] = {
    "eval": _evaluated,
    "state_dict": lambda model, _: list(model.state_dict().values()),
    "accessor": _after(lambda optimizer: optimizer.finish_param_gather()),
    "optimizer": _after(lambda optimizer: optimizer.load_state_dict(optimizer.state_dict())),
    "average": _averaged,
    "deepcopy": lambda model, _: [copy.deepcopy(model)(WORDS_SEEN, [0, 1, 2], "")],
    "rolled back": _rolled_back,
    "pickled": lambda model, _: [pickle.loads(pickle.dumps(model.layers[1]))(torch.ones(1, WIDTH))],
}


def _train(case: Case, rank: int, *, overlap: bool) -> Result:
    torch.manual_seed(0)
    model = Net().to(case.dtype)
    model.norm.to(case.norm)
    if case.norm != case.dtype:
        model.norm.register_forward_pre_hook(lambda _, args: (args[0].to(case.norm),))
        model.norm.register_forward_hook(lambda _, args, result: result.to(case.dtype))
    # Not torch's fused kernel, which rounds the last elements of a run otherwise: buckets end where
    # they end.
    config = DistOptConfig(
        accelerator="torch",
        adam="torch_foreach",
        lr=0.05,
        clip_grad=1.0,
        bucket_size=BUCKET,
        overlap_grad_reduce=case.grads and overlap,
        overlap_param_gather=overlap,
    )
    optimizer = distribute(model, config)
    seen, pending, in_forward = [], [], []
    model.embedding.register_forward_hook(lambda *_: in_forward.append(_num_pending(optimizer)))
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(case.microbatches):
            generator = torch.Generator().manual_seed(100 * step + 10 * number + rank)
            words = torch.randint(WORDS, (4, 5), generator=generator)
            with _not_last(optimizer, number == case.microbatches - 1):
                model(words, case.order(step, rank), case.head_of(step, number)).backward()
        optimizer.step()
        pending.append(_num_pending(optimizer))
        for between in case.between[step : step + 1]:
            seen += [value.detach().clone() for value in BETWEEN[between](model, optimizer)]
    return Result(
        [param.detach().clone() for param in model.parameters()], seen, pending, in_forward
    )


def _not_last(optimizer: Any, is_last: bool) -> Any:
    return torch.enable_grad() if is_last else optimizer.no_sync()


def _num_pending(optimizer: Any) -> int:
    return len(optimizer._model.communicator._params.under_way)


_gather = pairwise.all_gather


def _slowly(*args: Any) -> None:
    time.sleep(SLOW * args[1].rank)  # the first rank has sent what it has before another one begins
    _gather(*args)


def _resumed(rank: int, folder: Path) -> bool:
    """Saved while gathers are under way, loaded before the first step, trained on."""
    torch.manual_seed(0)
    words = torch.arange(6).view(2, 3) + rank
    config = DistOptConfig(
        accelerator="torch", lr=0.05, bucket_size=BUCKET, overlap_param_gather=True
    )
    model = Net()
    optimizer = distribute(model, config)

    def step(model: Net, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(words, [0, 1, 2], "").backward()
        optimizer.step()

    step(model, optimizer)
    optimizer.save(folder)
    step(model, optimizer)
    resumed = Net()
    other = distribute(resumed, config)
    other.load(folder)
    step(resumed, other)
    same = [
        torch.equal(*pair)
        for pair in zip(model.state_dict().values(), resumed.state_dict().values(), strict=True)
    ]
    return all(same) and bool(same)


def _gathered_twice(rank: int) -> bool:
    """A fork of 2023 may ask for the params again while they are being gathered."""
    torch.manual_seed(0)
    model = Net()
    optimizer = distribute(
        model, DistOptConfig(accelerator="torch", bucket_size=BUCKET, overlap_param_gather=True)
    )
    model(torch.arange(6).view(2, 3) + rank, [0, 1, 2], "").backward()
    optimizer.step()
    optimizer._model.gather.gather()
    optimizer.finish_param_gather()
    return all(type(param) is Parameter for param in model.parameters())


def collect_facts(rank: int, size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        without = _train(case, rank, overlap=False)
        with mock.patch.object(pairwise, "all_gather", _slowly):
            with_it = _train(case, rank, overlap=True)
        pairs = [
            *zip(with_it.params, without.params, strict=True),
            *zip(with_it.seen, without.seen, strict=True),
        ]
        found[name] = (
            all(torch.equal(*pair) for pair in pairs),
            with_it.pending,
            len(with_it.seen),
            with_it.in_forward,
        )
    with mock.patch.object(pairwise, "all_gather", _slowly):
        return {**found, "resumed": _resumed(rank, folder), "gathered twice": _gathered_twice(rank)}


facts = facts_of(collect_facts, RANKS)


@pytest.mark.parametrize("name", CASES)
def test_params_when_overlapped_with_forward_then_no_read_sees_old_values(
    name: str, facts: Facts
) -> None:
    assert [each[0] for each in facts[name]] == [True] * RANKS
    assert all(min(each[1]) >= 4 for each in facts[name]), (
        "gathers are under way when a step has ended"
    )
    assert all(each[2] >= STEPS for each in facts[name]) or not CASES[name].between, (
        "nothing was compared"
    )


@pytest.mark.parametrize("name", ["several microbatches", "order changes"])
def test_module_when_it_is_called_then_it_waits_for_its_own_params_alone(
    name: str, facts: Facts
) -> None:
    later = [
        each[3][CASES[name].microbatches * 2 :: CASES[name].microbatches] for each in facts[name]
    ]
    assert all(min(each) >= 1 for each in later), "nothing was under way any more"


def test_save_when_gathers_are_under_way_then_training_goes_on_from_it_bit_for_bit(
    facts: Facts,
) -> None:
    assert facts["resumed"] == [True] * RANKS


def test_params_when_they_are_gathered_again_meanwhile_then_are_plain_params_afterwards(
    facts: Facts,
) -> None:
    assert facts["gathered twice"] == [True] * RANKS
