"""Grads overlapped with backward: the same bits as without overlap, whatever gradients arrive, and
in which order.

One spawn of three ranks runs every training twice, with `overlap_grad_reduce` and without.

Exercises hosts/torch/buffers.py, hosts/torch/grads.py, buffers/grad_buffer.py, comm/pending.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Linear, Module, ModuleList, Parameter
from torch.utils.checkpoint import checkpoint

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.errors import LayoutError
from megatron_distopt.hosts.megatron_2023.watch import tell_of_grads
from tests.support.facts import Facts, facts_of

RANKS, STEPS, WIDTH, LAYERS = 3, 4, 16, 4
#: A bucket a layer: a weight and a bias.
BUCKET = WIDTH * WIDTH + WIDTH
# Not torch's fused kernel, which rounds the last elements of a run otherwise: buckets end where
# they end.
CONFIG = DistOptConfig(accelerator="torch", adam="torch_foreach", bucket_size=BUCKET)


class Net(Module):
    """Layers one after the other; which of them, and how, is said at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = ModuleList(Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, hidden: Tensor, order: list[int], recompute: str) -> Tensor:
        for number in order:
            if recompute:
                run = partial(
                    checkpoint, self.layers[number], use_reentrant=recompute == "reentrant"
                )
                hidden = run(hidden).tanh()
            else:
                hidden = self.layers[number](hidden).tanh()
        return hidden.float().square().mean()


@dataclasses.dataclass(frozen=True)
class Case:
    """A training."""

    # by step and rank, which layers are used, one after the other
    order: Callable[[int, int], list[int]]
    recompute: str = ""  # or "reentrant" or "not reentrant"
    microbatches: int = 1  # of each step
    dtype: torch.dtype = torch.float32  # of the params


def _usual(step: int, rank: int) -> list[int]:
    return list(range(LAYERS))


def _twice(step: int, rank: int) -> list[int]:
    return [0, 1, 2, 1, 3]


CASES = {
    # Backward meets the layers in the order of registration, which is not that of the buffer.
    "order is not that of registration": Case(lambda step, rank: list(reversed(range(LAYERS)))),
    "several microbatches in bf16": Case(_usual, microbatches=2, dtype=torch.bfloat16),
    "recomputed": Case(_usual, recompute="not reentrant"),
    "recomputed in every microbatch": Case(_twice, recompute="reentrant", microbatches=2),
    "param without gradient": Case(lambda step, rank: [0, 1, 3]),
    # Rank 1 leaves a layer out at every other step.
    "branch of one rank": Case(
        lambda step, rank: [0, 1, 3] if rank == 1 and step % 2 else [0, 1, 2, 3]
    ),
    # Nobody uses a layer in the first two steps, and then one rank does.
    "branch that comes later": Case(
        lambda step, rank: [0, 1, 2, 3] if rank == 2 and step >= 2 else [0, 1, 3]
    ),
    # Rank 1 has nothing to compute in the first step.
    "branch to nothing": Case(lambda step, rank: [] if rank == 1 and step == 0 else [0, 1, 2, 3]),
}
#: By step, how many buckets are under way before the step: in the first one nothing is known yet.
ALL, ALL_BUT_ONE = [0, 4, 4, 4], [0, 3, 3, 3]
#: The same on every rank, where it is not `ALL`.
EARLY = {
    "param without gradient": [ALL_BUT_ONE] * RANKS,
    # Layer 2 is the second of four in backward: at odd steps rank 1 has one bucket under way and
    # waits for its turn.
    "branch of one rank": [ALL, [0, 1, 4, 1], ALL],
    # From the step behind the first gradient on.
    "branch that comes later": [ALL_BUT_ONE, ALL_BUT_ONE, [0, 3, 3, 4]],
    # Rank 1 alone begins a step later.
    "branch to nothing": [ALL, [0, 0, 4, 4], ALL],
}


@dataclasses.dataclass(frozen=True)
class Result:
    """Params at the end, and by step how many of the buckets were under way before the step."""

    params: list[Tensor]
    early: list[int]


def _train(case: Case, rank: int, *, overlap: bool) -> Result:
    torch.manual_seed(0)
    model = Net().to(case.dtype)
    config = dataclasses.replace(CONFIG, clip_grad=1.0, overlap_grad_reduce=overlap)
    optimizer = distribute(model, config)
    early = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(case.microbatches):
            is_last = number == case.microbatches - 1
            generator = torch.Generator().manual_seed(100 * step + 10 * number + rank)
            data = torch.randn(4, WIDTH, generator=generator).to(case.dtype).requires_grad_()
            with contextlib.nullcontext() if is_last else optimizer.no_sync():
                model(data, case.order(step, rank), case.recompute).backward()
        early.append(_num_begun(optimizer))
        optimizer.step()
    return Result([param.detach().clone() for param in model.parameters()], early)


def _num_begun(optimizer: Any) -> int:
    num_reducing: int = optimizer._model.communicator.num_reducing
    return num_reducing


def _dropped(rank: int) -> bool:
    """Backward without a step, then a step: the first gradient is gone."""
    found = []
    for is_dropped in (True, False):
        torch.manual_seed(0)
        model = Net()
        optimizer = distribute(model, dataclasses.replace(CONFIG, overlap_grad_reduce=True))
        for step in range(3):
            if is_dropped:
                model(torch.full((4, WIDTH), 9.0 + rank), _usual(0, 0), "").backward()
            optimizer.zero_grad()
            model(torch.full((4, WIDTH), 1.0 + step + rank), _usual(0, 0), "").backward()
            optimizer.step()
        found.append([param.detach().clone() for param in model.parameters()])
    return all(torch.equal(left, right) for left, right in zip(*found, strict=True))


def _two_optimizers(rank: int, *, apart: bool, overlap: bool = True) -> tuple[str, list[Tensor]]:
    """Both have buckets under way at once, and the second rank begins with those of the other
    one."""
    torch.manual_seed(0)
    models = [Net(), Net()]
    config = dataclasses.replace(CONFIG, overlap_grad_reduce=overlap)
    groups = [None, dist.new_group() if apart else None]
    optimizers = [
        distribute(model, config, process_group=group)
        for model, group in zip(models, groups, strict=True)
    ]
    text = "nothing"
    try:
        for step in range(STEPS):
            for model in models[:: -1 if rank == 1 else 1]:
                model(torch.full((4, WIDTH), 1.0 + rank + step), _usual(0, 0), "").backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    except LayoutError as error:
        text = str(error)
    for optimizer in optimizers:
        optimizer.zero_grad()
    return text, [param.detach().clone() for model in models for param in model.parameters()]


def collect_facts(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        with_it, without = (_train(case, rank, overlap=overlap) for overlap in (True, False))
        same = all(torch.equal(*pair) for pair in zip(with_it.params, without.params, strict=True))
        found[name] = same, with_it.early
    found["dropped"] = _dropped(rank)
    found["two in two groups"] = [
        _two_optimizers(rank, apart=True, overlap=overlap) for overlap in (True, False)
    ]
    found["two in one group"], _ = _two_optimizers(0, apart=False)
    return found


facts = facts_of(collect_facts, RANKS)


@pytest.mark.parametrize("name", CASES)
def test_overlap_when_compared_with_none_then_every_bit_is_the_same(
    name: str, facts: Facts
) -> None:
    assert [each[0] for each in facts[name]] == [True] * RANKS


@pytest.mark.parametrize("name", CASES)
def test_overlap_when_gradients_have_come_before_then_their_buckets_go_before_the_step(
    name: str, facts: Facts
) -> None:
    assert [each[1] for each in facts[name]] == EARLY.get(name, [ALL] * RANKS)


def test_overlap_when_no_step_follows_then_the_gradients_are_gone(facts: Facts) -> None:
    assert facts["dropped"] == [True] * RANKS


def test_overlap_when_two_optimizers_have_groups_of_their_own_then_ranks_may_begin_with_either(
    facts: Facts,
) -> None:
    for each in facts["two in two groups"]:
        (text, params), (_, wanted) = each
        assert text == "nothing"
        assert all(torch.equal(*pair) for pair in zip(params, wanted, strict=True))


def test_overlap_when_two_optimizers_share_a_group_then_it_says_what_to_write(facts: Facts) -> None:
    for each in facts["two in one group"]:
        assert "Two optimizers share one data-parallel group" in each
        assert "process_group=torch.distributed.new_group()" in each
        assert "overlap_grad_reduce=False for both" in each


def test_param_when_its_hosts_hook_is_followed_then_it_tells_once_and_can_be_pickled() -> None:
    param, told = Parameter(torch.ones(2)), list[str]()
    with torch.enable_grad():
        kept = param.expand_as(param).grad_fn
    nodes = [tell_of_grads({"a": param}, told.append) for _ in range(2)]
    param.sum().backward()
    assert (len(nodes), told, kept is None) == (2, ["a"], False)
    assert torch.equal(pickle.loads(pickle.dumps(param)), param)
