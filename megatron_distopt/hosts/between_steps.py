"""What a user may do to params and param groups between two steps, found out before the next one.

[Note: params that have left] `param.data = tensor`, or `.bfloat16().float()` on a module, gives a param memory that the
optimizer does not write to: it would never change again, without a word. Here it is found. What becomes of it differs,
as it does in the hosts' own optimizers, so the adapters decide that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_distopt.buffers import dtype_name
from megatron_distopt.comm import Group, raise_together
from megatron_distopt.errors import AccessError, LayoutError, refusal
from megatron_distopt.hosts.watch import addresses_of, in_one_memory, sharing_memory
from megatron_distopt.optimizer import Notice

__all__ = [
    "GroupMembers",
    "PlacedParam",
    "check_own_memory",
    "not_copied",
    "notice_for",
    "params_that_left",
    "raising",
    "torch_data",
]

#: torch's own `param.data`, which hosts/torch/params.py replaces by one that notes who asked for it.
torch_data: Any = torch._C.TensorBase.data


def check_own_memory(named: Mapping[str, Parameter]) -> None:
    """Refuses two Parameters over the same memory: torch would update it twice, and here the tie would be cut.

    Args:
        named: all that are updated, by name.

    Raises:
        LayoutError
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
        #: What `param.data` is, unless somebody changed that.
        self.view: Tensor = torch_data.__get__(param)
        #: `param.data_ptr()` as long as `param.data` is the view.
        self.address = self.view.data_ptr()

    @torch.no_grad()
    def bring_back(self, *, with_values: bool) -> None:
        """Makes `param.data` the view again.

        Args:
            with_values: takes over the values that it has elsewhere; otherwise they are dropped.
        """
        if with_values:
            self.view.copy_(torch_data.__get__(self.param))
        torch_data.__set__(self.param, self.view)


def params_that_left(params: Sequence[PlacedParam]) -> Sequence[PlacedParam]:
    """See [Note: params that have left]; to be brought back.

    Args:
        params: all that an optimizer updates.

    Raises:
        LayoutError: one of them cannot be, because it has another dtype, shape or device, or the memory of another one.
    """
    left = [each for each in params if each.param.data_ptr() != each.address]
    if left:
        for each in left:
            _check_alike(each)
        _check_apart(params, left)
    return left


def _check_alike(each: PlacedParam) -> None:
    before, after = (f"{dtype_name(one.dtype)}{list(one.shape)} on {one.device}" for one in (each.view, each.param))
    if before != after:
        got, rule = f"{after} where it was {before}", "keep its dtype, shape and device"
        remedy = "Convert the model before distribute(...) or get_megatron_optimizer(...) builds its optimizer"
        raise LayoutError(refusal(f"param {each.name!r}", got, rule, remedy))


def _check_apart(params: Iterable[PlacedParam], left: Iterable[PlacedParam]) -> None:
    extents = [(*addresses_of(each.view), each.name) for each in params if each.view.numel()]
    extents += [(*addresses_of(each.param), each.name) for each in left]
    if tied := sharing_memory(extents):
        first, second = tied
        raise _tied(second, f"given the memory of {first!r}")


def _tied(name: str, got: str) -> LayoutError:
    remedy = "Tie params as one Parameter, b.weight = a.weight, before the distributed optimizer is built"
    return LayoutError(refusal(f"param {name!r}", got, "have memory of its own", remedy))


class GroupMembers:
    """The params of the inner optimizer's groups, which are not the user's to change.

    Args:
        inner: the inner optimizer; its params are flat main params.
    """

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        self._members = _members_of(inner)

    def check(self) -> None:
        """Whether the groups have the params that they had.

        Raises:
            LayoutError
        """
        if _members_of(self._inner) != self._members:
            got, rule = "other params than the optimizer was built with", "keep their params"
            remedy = "Build the optimizer again with get_megatron_optimizer(...) after the model has changed"
            raise LayoutError(refusal("param_groups", got, rule, remedy))


def _members_of(inner: Optimizer) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in inner.param_groups]


def notice_for(check: Callable[[], None], flag: Tensor, group: Group) -> Notice:
    """Has all ranks raise in a step what `check` raises on one of them.

    Args:
        check: asked when one of them has something to raise.
        flag: 1-D [1], of the dtype and device of statistics; above 0 where that is this rank.
        group: all ranks that hold a part of the model.
    """

    def act(sums: Sequence[float]) -> None:
        if sums[0] > 0:
            raise_together(check, group, "step")

    return Notice(flag, flag, act)


def raising(error: Exception | None) -> Callable[[], None]:
    """A check that has this result."""

    def check() -> None:
        if error is not None:
            raise error

    return check


def not_copied(how: str) -> AccessError:
    """What copying and pickling an optimizer raise."""
    rule = "stay where its model is, whose params lie in its buffers"
    remedy = (
        "Keep optimizer.state_dict(), or build the model again and call distribute(...) or get_megatron_optimizer(...)"
    )
    return AccessError(refusal("optimizer", how, rule, remedy))
