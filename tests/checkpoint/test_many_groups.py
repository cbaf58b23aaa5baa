"""Param groups by the thousands, one a param: what building, saving and loading do grows with their
number and not with its square."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_distopt import distribute
from tests.support.waits import num_calls_of

FEW, MANY = 200, 400
#: Calls for twice as many groups: 2 but for what is done once. One loop over all groups in each of
#: them makes it 2.4 or more.
MOST_RATIO = 2.1


def _counted(number: int, folder: Path) -> dict[str, int]:
    """By what is done with so many groups, the number of calls."""
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(number)]
    rates = (0.1 + 0.001 * index for index in range(number))
    model = torch.nn.ParameterList(params)
    given = torch.optim.AdamW([{"params": [param], "lr": next(rates)} for param in params])
    built: list[Any] = []
    calls = {"distribute": num_calls_of(lambda: built.append(distribute(model, given)))}
    (optimizer,) = built
    torch.cat(params).sum().backward()
    calls["step"] = num_calls_of(optimizer.step)
    calls["save"] = num_calls_of(lambda: optimizer.save(folder))
    calls["load"] = num_calls_of(lambda: optimizer.load(folder))
    state: list[Any] = []
    calls["state_dict"] = num_calls_of(lambda: state.append(optimizer.state_dict()))
    calls["load_state_dict"] = num_calls_of(lambda: optimizer.load_state_dict(state[0]))
    return calls


@pytest.mark.usefixtures("one_rank")
def test_groups_when_they_are_twice_as_many_then_twice_as_much_is_done(tmp_path: Path) -> None:
    _counted(2, tmp_path / "warm")  # what is done once
    few, many = (_counted(number, tmp_path / str(number)) for number in (FEW, MANY))
    ratios = {name: many[name] / few[name] for name in few}
    assert {name: ratio for name, ratio in ratios.items() if ratio > MOST_RATIO} == {}
