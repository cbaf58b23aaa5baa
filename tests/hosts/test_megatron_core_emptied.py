"""What some frameworks do to state and buffers while they generate, and what a step must not pass over in silence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch

from megatron_distopt.errors import DistOptError
from tests.support.cases import Case
from tests.support.spawn import run_ranks


def _empty_a_moment(part: Any) -> None:
    """AReaL's megatron_adapter.py leaves empty tensors in the state until it loads them again."""
    next(iter(part.optimizer.state.values()))["exp_avg"] = torch.empty(0)


def _replace_grads(part: Any) -> None:
    """ROLL's offload_states_patch.py assigns to `data` of the host's buffers."""
    part.buffers[0].grad_data.data = torch.zeros_like(part.buffers[0].grad_data)


CHANGES: dict[str, Callable[[Any], None]] = {"exp_avg": _empty_a_moment, "grad buffer": _replace_grads}


def collect(rank: int, size: int) -> dict[str, str]:
    from tests.support.gpt import Training, parts_of

    found = {}
    for name, change in CHANGES.items():
        with closing(Training(Case("distopt", dp=2, precision="bf16"))) as training:
            training.step()
            training.forward_backward()
            if rank == 1:
                change(parts_of(training.optimizer)[0])
            try:
                training.optimizer.step()
            except DistOptError as error:
                found[name] = str(error)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, str]]:
    return run_ranks(collect, 2)


@pytest.mark.parametrize("what", CHANGES)
def test_step_when_one_rank_emptied_or_replaced_memory_then_refused_on_all(
    found: list[dict[str, str]], what: str
) -> None:
    assert all(what in each for each in found)
    assert what in found[1][what]
