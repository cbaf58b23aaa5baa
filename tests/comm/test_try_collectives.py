"""A backend that lacks a collective is found before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.comm import Group, collectives, pairwise, try_collectives
from megatron_distopt.errors import DistOptError
from tests.support.refusals import assert_says
from tests.support.spawn import run_ranks

RULE = (
    "Must carry a reduce-scatter and an all-gather of the model's tensors. Write --distributed-backend nccl on GPUs, "
    "gloo on CPUs, or give init_process_group another backend."
)


def _lacking(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("Backend tin does not support it\nand more")


def _wrong(bucket: torch.Tensor, shard: torch.Tensor, group: object) -> None:
    shard.fill_(5)


def _distributed() -> str:
    model = torch.nn.Linear(4, 4)
    before = [param.data_ptr() for param in model.parameters()]
    try:
        distribute(model, DistOptConfig())
    except DistOptError as error:
        assert [param.data_ptr() for param in model.parameters()] == before, "params were moved"
        return f"{type(error).__name__}: {error}"
    return "trains"


def _collect(rank: int, size: int) -> dict[str, str]:
    found = {"usual": _distributed()}
    broken: dict[str, tuple[str, Callable[..., None]]] = {
        "no sum": ("reduce_scatter", _lacking),
        "wrong sum": ("reduce_scatter", _wrong),
        "no gather": ("all_gather", _lacking),
    }
    for name, (what, instead) in broken.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pairwise, what, instead)
            found[name] = _distributed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_PAIRWISE_OVER", "nobody")
        patch.setattr(collectives, "_reduce_scatter", _lacking)
        found["backend's own"] = _distributed()
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, str]]:
    return run_ranks(_collect, 2)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no sum", "Backend tin does not support it"),
        ("no gather", "Backend tin does not support it"),
        ("backend's own", "Backend tin does not support it"),
        ("wrong sum", "ones of 2 ranks add up to [5.0, 5.0]"),
    ],
)
def test_backend_when_a_collective_fails_then_refused_before_anything_is_moved(
    found: list[dict[str, str]], name: str, reason: str
) -> None:
    for each in found:
        assert_says(each[name], f"ConfigError: Invalid backend: gloo on cpu ({reason}). {RULE}")


def test_backend_when_it_has_both_then_it_trains(found: list[dict[str, str]]) -> None:
    assert [each["usual"] for each in found] == ["trains", "trains"]


def test_backend_when_its_ranks_do_not_exist_then_nothing_is_tried() -> None:
    """In torch's fake process group every collective returns at once, as if there were other ranks."""
    dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
    try:
        try_collectives(torch.device("cpu"), Group.of())
    finally:
        dist.destroy_process_group()
