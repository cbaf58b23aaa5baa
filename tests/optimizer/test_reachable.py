"""Following every reference from the attributes of an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megatron_distopt.optimizer.owners.reachable import foreign_kinds, other_attribute, refers_to


class Helper:
    """An object of the class, with what it is given in an attribute."""

    def __init__(self, value: object) -> None:
        self.value = value


class Slotted:
    """The same without a dict."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


class Bare:
    """Has no attributes."""


class Plain(Optimizer):
    """Has an attribute of any kind."""

    def __init__(self, held: object = None) -> None:
        super().__init__([nn.Parameter(torch.zeros(2))], {"lr": 0.1})
        self.held = held

    def method(self) -> None:
        """Is bound to it."""


PARAM = nn.Parameter(torch.ones(3))
LEADING: dict[str, Any] = {
    "itself": PARAM,
    "list": [1, (PARAM,)],
    "key": {PARAM: 1},
    "value": {"a": {"b": PARAM}},
    "attribute": Helper([PARAM]),
    "slot": Slotted(PARAM),
    "partial": partial(print, PARAM),
    "closure": lambda param=PARAM: param,
    "method": Helper(PARAM).__init__,  # type: ignore[misc]
}


@pytest.mark.parametrize("name", LEADING)
def test_refers_to_when_a_value_leads_to_a_param_then_found(name: str) -> None:
    assert refers_to(LEADING[name], [PARAM])
    assert not refers_to(LEADING[name], [nn.Parameter(torch.ones(3))]), "an equal one is another"


def test_foreign_kinds_when_a_value_leads_back_to_the_optimizer_then_what_that_has_is_not_meant() -> None:
    optimizer = Plain(Slotted(1))
    assert foreign_kinds([Helper(optimizer.method), PARAM, {"a": 1}], optimizer) == {Helper}


def _loop(number: int) -> list[Any]:
    loop: list[Any] = [number]
    loop.append(loop)
    return loop


def _adder(number: int) -> Callable[[int], int]:
    return lambda other: other + number


def _lent() -> Tensor:
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(0)
    return tensor


#: Pairs of values, and whether they are the same.
PAIRS: dict[str, tuple[Any, Any, bool]] = {
    "numbers": (1, 1, True),
    "other numbers": (1, 2, False),
    "kinds": (1, 1.0, False),
    "tensors": (torch.ones(2), torch.ones(2), True),
    "other tensors": (torch.ones(2), torch.zeros(2), False),
    "dtypes": (torch.ones(2), torch.ones(2).double(), False),
    "objects": (Helper({"a": [1, 2]}), Helper({"a": [1, 2]}), True),
    "other objects": (Helper({"a": [1, 2]}), Helper({"a": [1, 3]}), False),
    "slots": (Slotted(1), Slotted(2), False),
    "lengths": ([1], [1, 2], False),
    "keys": ({"a": 1}, {"b": 1}, False),
    "sets": ({1, 2}, {2, 1}, True),
    "functions": (lambda: 1, lambda: 2, False),
    "closures": (_adder(1), _adder(1), True),
    "other closures": (_adder(1), _adder(2), False),
    "without a form": (iter([]), iter([]), False),
    "of no attributes": (Bare(), Bare(), True),
    "by tensors": ({PARAM: 1}, {nn.Parameter(torch.ones(3)): 1}, True),
    "by other tensors": ({PARAM: 1}, {nn.Parameter(torch.zeros(3)): 1}, False),
    "arrays": (np.ones(2), np.ones(2), False),
    "loops": (_loop(1), _loop(1), True),
    "other loops": (_loop(1), _loop(2), False),
    "lent memory": (_lent(), _lent(), True),
}


@pytest.mark.parametrize("name", PAIRS)
def test_other_attribute_when_two_optimizers_hold_values_then_named_where_they_differ(name: str) -> None:
    one, other, is_same = PAIRS[name]
    assert other_attribute(Plain(one), Plain(other)) == (None if is_same else "held")


def test_other_attribute_when_methods_are_bound_to_each_then_the_same() -> None:
    one, other = Plain(), Plain()
    one.held, other.held = one.method, other.method
    assert other_attribute(one, other) is None
