"""Gradients in 8 bits between nodes in plain torch: equal runs, resumed runs, NaN on one rank, one node, refusals.

One spawn of two ranks, which count as two nodes by the number of a network namespace where a case says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Embedding, LayerNorm, Linear, Module, Sequential

from megatron_distopt import distribute
from megatron_distopt.comm import pairwise, shared_memory
from megatron_distopt.errors import DistOptError
from tests.support.refusals import assert_mentions
from tests.support.spawn import run_ranks

RANKS, STEPS = 2, 4
INT8 = {"reduce_dtype": "int8"}
#: By name: further options; all with the same result, to the bit.
ALIKE: Mapping[str, dict[str, Any]] = {
    "repeated": {},
    "overlapped": {"overlap_grad_reduce": True},
    "in buckets": {"bucket_size": 3000},
    "overlapped in buckets": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 3000},
}
#: By name: options, and what the refusal mentions.
REFUSED: Mapping[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown word": ({**INT8, "reduce_exact": "router,embedd"}, ("reduce_exact", "'embedd'")),
    "no use": ({"reduce_exact": "embed"}, ("reduce_exact", "reduce_dtype='int8'")),
    "16-bit grads": ({**INT8, "grads_in_fp32": False}, ("reduce_dtype='int8'", "bfloat16", "grads_in_fp32=True")),
}


class Model(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = Embedding(50, 40)
        self.body = Sequential(Linear(40, 64), LayerNorm(64), Linear(64, 64))
        self.router = Linear(64, 8, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.body(self.embed(tokens)).relu()
        return (hidden.square().mean() + self.router(hidden).float().sigmoid().square().mean()).float()


def _two_nodes(patch: pytest.MonkeyPatch) -> Any:
    """A new group, whose ranks have found out that they are on two nodes."""
    handle = dist.new_group()
    patch.setattr(shared_memory, "_network", dist.get_rank)
    return handle


def _train(
    folder: Path, handle: Any, *, stop: int = STEPS, load: bool = False, nan: bool = False, **options: Any
) -> Any:
    """Losses and params after some steps; saved at the end where it is not loaded."""
    model = Model().bfloat16()
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = distribute(model, adam, process_group=handle, **{**INT8, **options})
    if load:
        optimizer.load(folder)
    losses = []
    for step in range(2 if load else 0, STEPS if load else stop):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randint(0, 50, (4, 6), generator=generator))
        (loss * torch.nan if nan and dist.get_rank() == 1 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.finish_param_gather()
    if stop < STEPS and not load:
        optimizer.save(folder)
    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer.release()
    return losses, params


def _is_equal(one: Any, other: Any) -> bool:
    return one[0][-2:] == other[0][-2:] and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


def _refusal(handle: Any, **options: Any) -> str:
    model = Model().bfloat16()
    try:
        distribute(model, torch.optim.AdamW(model.parameters()), process_group=handle, **options)
    except DistOptError as error:
        return f"{type(error).__name__}: {error}"
    return "trains"


def _all(rank: int, size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        wanted = _train(folder, _two_nodes(patch))
        for name, options in ALIKE.items():
            found[name] = _is_equal(_train(folder, _two_nodes(patch), **options), wanted)
        _train(folder, _two_nodes(patch), stop=2)
        found["resumed"] = _is_equal(_train(folder, _two_nodes(patch), load=True), wanted)
        exact = _train(folder, _two_nodes(patch), reduce_dtype=None)
        found["fp32 sums"] = _is_equal(_train(folder, _two_nodes(patch), reduce_dtype="float32"), exact)
        found["rounds"] = not _is_equal(wanted, exact)
        found["losses"] = max(abs(a - b) / b for a, b in zip(wanted[0], exact[0], strict=True))
        found["nan"] = _nan(folder, _two_nodes(patch))
        found["bytes"] = _bytes(_two_nodes(patch), folder)
    on_one = _train(folder, dist.new_group(), reduce_dtype=None)
    found["one node"] = _is_equal(_train(folder, dist.new_group()), on_one)
    found["refused"] = {name: _refusal(dist.new_group(), **options) for name, (options, _) in REFUSED.items()}
    return found


def _nan(folder: Path, handle: Any) -> str:
    try:
        _train(folder, handle, nan=True)
    except DistOptError as error:
        return type(error).__name__
    return "trains"


def _gathered(bucket: Tensor, shard: Tensor, group: Any) -> None:
    dist.all_gather_into_tensor(bucket, shard.clone(), group=group.handle)


def _bytes(handle: Any, folder: Path) -> tuple[int, int]:
    """What a rank sends to the other node in each step for gradients, and the elements that it owns not."""
    sent, original = [0], pairwise.send

    def counted(tensor: Tensor, *args: Any) -> Any:
        sent[0] += tensor.numel() * tensor.element_size()
        return original(tensor, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairwise, "send", counted)
        # The params are gathered by the same calls.
        patch.setattr(pairwise, "gather_by_messages", _gathered)
        _train(folder, handle)
    return sent[0] // STEPS, sum(param.numel() for param in Model().parameters())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_all, RANKS, tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("name", [*ALIKE, "resumed"])
def test_int8_when_a_run_is_repeated_with_other_buckets_or_resumed_then_it_is_equal_to_the_bit(
    name: str, found: list[dict[str, Any]]
) -> None:
    assert [each[name] for each in found] == [True] * RANKS


def test_int8_when_there_is_one_node_then_nothing_is_rounded(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["one node"] and each["fp32 sums"] and each["rounds"]
        assert each["losses"] < 0.05  # of a loss that four steps of Adam halve


def test_int8_when_a_gradient_of_one_rank_is_nan_then_the_step_is_refused_on_all(found: list[dict[str, Any]]) -> None:
    assert [each["nan"] for each in found] == ["NonFiniteGradError"] * RANKS


def test_int8_when_bytes_are_counted_then_an_element_takes_one_and_an_exempted_one_four(
    found: list[dict[str, Any]],
) -> None:
    numel, coded = found[0]["bytes"][1], (50 * 40 // 128 + 40 * 64 // 128 + 64 * 64 // 128) * 128
    for each in found:
        # Half of each goes to the other rank; padding of up to a block for each param and for each shard goes along.
        least = (coded * (1 + 1 / 128) + 4 * (numel - coded)) / 2
        assert 0.8 * least < each["bytes"][0] < 1.4 * least


@pytest.mark.parametrize("name", REFUSED)
def test_int8_when_an_option_would_do_nothing_then_refused(name: str, found: list[dict[str, Any]]) -> None:
    for each in found:
        assert_mentions(each["refused"][name], *REFUSED[name][1])
