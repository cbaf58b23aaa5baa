"""A state as JSON and tensors, and filled in where other objects refer to it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from megatron_distopt.errors import CheckpointError
from megatron_distopt.optimizer.owners.owned_state import join_state, split_state
from tests.support.whole_classes import Factor

CPU = torch.device("cpu")


def _state(value: float) -> dict[str, Any]:
    factor = Factor(2, CPU)
    factor.left.fill_(value)
    return {"factor": factor, "list": [torch.full((3,), value)], "pair": (value, "text"), 0: torch.tensor(value)}


def test_join_state_when_a_state_is_there_then_the_same_objects_hold_the_values() -> None:
    description, tensors = split_state(_state(2.0))
    into = _state(0.0)
    before = (into["factor"], into["factor"].left, into["list"], into["list"][0], into[0])
    joined = join_state(json.loads(json.dumps(description)), tensors, CPU, into)
    after = (joined["factor"], joined["factor"].left, joined["list"], joined["list"][0], joined[0])
    assert joined is into
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert [float(each.max()) for each in (joined["factor"].left, joined["list"][0], joined[0])] == [2.0, 2.0, 2.0]
    assert joined["pair"] == (2.0, "text")


def test_join_state_when_no_state_is_there_then_made_without_objects() -> None:
    description, tensors = split_state({"list": [torch.ones(3)]})
    assert join_state(description, tensors, CPU)["list"][0].tolist() == [1, 1, 1]
    description, tensors = split_state(_state(2.0))
    with pytest.raises(ValueError, match="no part of a state"):
        join_state(description, tensors, CPU)


def test_join_state_when_a_tensor_has_another_shape_then_an_error() -> None:
    description, tensors = split_state({"a": torch.ones(3)})
    with pytest.raises(ValueError, match="is not"):
        join_state(description, tensors, CPU, {"a": torch.ones(1)})


def test_split_state_when_something_has_no_form_then_named_by_its_place() -> None:
    with pytest.raises(CheckpointError, match=r"'a\.0'.*a object"):
        split_state({"a": [object()]})
