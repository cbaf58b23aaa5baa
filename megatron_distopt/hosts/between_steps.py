"""Finds what a user did to params and param groups between two steps, before the next step is made.

[Note: params that have left] `param.data = tensor`, or `.bfloat16().float()` on a module, moves a param to memory that
the optimizer does not write to: without an error, it would never be updated again. This file finds such params. Whether
their new values are kept differs between the hosts' own optimizers, so the adapters decide that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_distopt.buffers import dtype_name
from megatron_distopt.comm import Group, raise_together
from megatron_distopt.errors import AccessError, LayoutError, refusal
from megatron_distopt.hosts.watch import addresses_of, in_one_memory, sharing_memory
from megatron_distopt.optimizer.deferred import Notice

#: torch's own `param.data`: written.py replaces it with a property that notes every tensor it returns.
torch_data: Any = torch._C.TensorBase.data


def check_own_memory(named: Mapping[str, Parameter]) -> None:
    """Refuses two Parameters in the same memory: torch would update it twice, and here each would get its own memory.

    Raises:
        LayoutError: two of them share memory.
    """
    if tied := in_one_memory(named):
        first, second = tied
        raise _tied(second, f"in the same memory as {first!r}")


class PlacedParam:
    """A param and the memory that the optimizer writes its new values to.

    Args:
        name: of the param.
        param: of the model; `param.data` is in that memory.
    """

    __slots__ = ("address", "name", "param", "view")

    def __init__(self, name: str, param: Parameter) -> None:
        self.name, self.param = name, param
        #: What `param.data` is, unless other code assigned to it.
        self.view: Tensor = torch_data.__get__(param)
        #: `param.data_ptr()` as long as `param.data` is the view.
        self.address = self.view.data_ptr()

    @torch.no_grad()
    def bring_back(self, *, with_values: bool) -> None:
        """Makes `param.data` the view again."""
        if with_values:
            self.view.copy_(torch_data.__get__(self.param))
        torch_data.__set__(self.param, self.view)


def params_that_left(params: Sequence[PlacedParam]) -> Sequence[PlacedParam]:
    """Finds the params to bring back, see [Note: params that have left].

    Raises:
        LayoutError: one cannot be brought back: its dtype, shape or device changed, or it shares another's memory.
    """
    left = [placed for placed in params if placed.param.data_ptr() != placed.address]
    if left:
        check_that_left(params, left)
    return left


def check_that_left(params: Sequence[PlacedParam], left: Sequence[PlacedParam]) -> None:
    """The checks of `params_that_left`, for code that has found those that left."""
    for each in left:
        before, after = (f"{dtype_name(one.dtype)}{list(one.shape)} on {one.device}" for one in (each.view, each.param))
        if before != after:
            raise LayoutError(
                f"Param {each.name!r} is {after} where it was {before}. Convert the model before distribute(...) or "
                "get_megatron_optimizer(...) builds its optimizer."
            )
    extents = [(*addresses_of(each.view), each.name) for each in params if each.view.numel()]
    extents += [(*addresses_of(each.param), each.name) for each in left]
    if tied := sharing_memory(extents):
        first, second = tied
        raise _tied(second, f"given the memory of {first!r}")


def _tied(name: str, got: str) -> LayoutError:
    remedy = "Tie params as one Parameter, b.weight = a.weight, before the distributed optimizer is built"
    return LayoutError(refusal(f"param {name!r}", got, "have memory of its own", remedy))


class GroupMembers:
    """Notes which params the inner optimizer's groups have; users must not change that."""

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        self._members = _members_of(inner)

    def check(self) -> None:
        """Checks that the groups have the same params as when this object was made.

        Raises:
            LayoutError: they have others.
        """
        if _members_of(self._inner) != self._members:
            got, rule = "other params than the optimizer was built with", "keep their params"
            remedy = "Build the optimizer again with get_megatron_optimizer(...) after the model has changed"
            raise LayoutError(refusal("param_groups", got, rule, remedy))


def _members_of(inner: Optimizer) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in inner.param_groups]


def notice_for(check: Callable[[], None], flag: Tensor, group: Group) -> Notice:
    """Makes all ranks raise, in the step, what `check` raises on one of them.

    Args:
        check: called on all ranks if the flag of any rank is above 0.
        flag: 1-D [1], of the dtype and device of statistics; above 0 if `check` will raise on this rank.
        group: all ranks that hold a part of the model.
    """

    def act(sums: Sequence[float]) -> None:
        if sums[0] > 0:
            raise_together(check, group, "step")

    return Notice(flag, flag, act)


def raising(error: Exception | None) -> Callable[[], None]:
    """Returns a check that raises `error`, or passes if that is None."""

    def check() -> None:
        if error is not None:
            raise error

    return check


def not_copied(how: str) -> AccessError:
    """Returns the error of copying or pickling an optimizer."""
    rule = "stay where its model is, whose params lie in its buffers"
    remedy = (
        "Keep optimizer.state_dict(), or build the model again and call distribute(...) or get_megatron_optimizer(...)"
    )
    return AccessError(refusal("optimizer", how, rule, remedy))
