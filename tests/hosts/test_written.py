"""Writes to a param between two steps are noticed through every alias that torch can give, and reads are not writes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_distopt.hosts.written import _Writes, data_watch
from tests.support.spawn import run_ranks


class _User:
    """Who watches, until it is freed."""


@pytest.fixture
def watched() -> Iterator[_Writes]:
    user, writes = _User(), _Writes("weight", Parameter(torch.ones(4)))
    data_watch.add(user, [writes])
    yield writes
    data_watch.remove(user, [writes])


def _read_often(param: Parameter) -> None:
    for _ in range(50):
        param.data.sum()


def _write_and_read_often(param: Parameter) -> None:
    param.data.add_(1)
    _read_often(param)


READS: dict[str, Callable[[Parameter], object]] = {
    "data": lambda param: param.data.float().norm(),
    "data, often": _read_often,
    "detached": lambda param: param.detach() * 2,
    "nothing": lambda param: None,
}
WRITES: dict[str, Callable[[Parameter], object]] = {
    "param": lambda param: torch.no_grad()(param.mul_)(2),
    "detached": lambda param: param.detach().mul_(2),
    "data": lambda param: param.data.mul_(2),
    "a view of data": lambda param: param.data.view(2, 2)[0].zero_(),
    "data, and reads afterwards": _write_and_read_often,
    "state dict": lambda param: param.data.copy_(torch.zeros(4)),
}


@pytest.mark.parametrize("name", READS)
def test_param_when_it_is_read_then_it_is_not_written(watched: _Writes, name: str) -> None:
    READS[name](watched.param)
    assert not watched.is_written


@pytest.mark.parametrize("name", WRITES)
def test_param_when_it_is_written_to_then_that_is_known_until_it_is_forgotten(watched: _Writes, name: str) -> None:
    WRITES[name](watched.param)
    assert watched.is_written
    watched.forget()
    assert not watched.is_written


def test_alias_when_it_is_held_over_several_steps_then_later_writes_are_seen(watched: _Writes) -> None:
    alias: Tensor = watched.param.data
    for _ in range(3):
        watched.forget()
        assert not watched.is_written
        alias[1:].zero_()
        assert watched.is_written


def _is_replaced(rank: int, size: int) -> list[bool]:
    """Whether `data` is ours while somebody watches, and afterwards."""
    user, writes = _User(), _Writes("weight", Parameter(torch.ones(4)))
    data_watch.add(user, [writes])
    found = ["data" in vars(Parameter)]
    del user
    gc.collect()
    return [*found, "data" in vars(Parameter)]


def test_data_when_nobody_watches_any_more_then_it_is_torchs_own() -> None:
    """In a process in which no other test has left somebody who watches."""
    assert run_ranks(_is_replaced, 1) == [[True, False]]
