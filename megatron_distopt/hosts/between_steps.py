"""What a user of a Megatron may do to params and param groups between two steps, found out before the next one.

[Note: params that have left] `param.data = tensor`, or `.bfloat16().float()` on a module, gives a param memory that the
optimizer does not write to: it would never change again, without a word. What a host's own optimizer does then differs,
so the adapters decide what becomes of it; here it is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_distopt.buffers import dtype_name
from megatron_distopt.errors import AccessError, LayoutError, refusal
from megatron_distopt.hosts.watch import addresses_of, in_one_memory, sharing_memory

__all__ = ["GroupMembers", "PlacedParam", "PlacedParams", "check_own_memory", "not_copied"]


def check_own_memory(named: Mapping[str, Parameter]) -> None:
    """Refuses two Parameters over the same memory: each would get a place of its own, and the tie would be cut.

    Args:
        named: all that are updated, by name.

    Raises:
        LayoutError
    """
    if tied := in_one_memory(named):
        first, second = tied
        raise _tied(second, f"in the same memory as {first!r}")


@dataclass(frozen=True, eq=False)
class PlacedParam:
    """A param and the memory that the optimizer writes its new values to.

    Args:
        name: of the param.
        param: of the model.
        view: what `param.data` is, unless somebody changed that.
    """

    name: str
    param: Parameter
    view: Tensor

    @property
    def has_left(self) -> bool:
        """Whether `param.data` is something else by now."""
        return self.param.data_ptr() != self.view.data_ptr()

    @torch.no_grad()
    def bring_back(self, *, with_values: bool) -> None:
        """Makes `param.data` the view again.

        Args:
            with_values: takes over the values that it has elsewhere; otherwise they are dropped.
        """
        if with_values:
            self.view.copy_(self.param)
        self.param.data = self.view


class PlacedParams:
    """All params that an optimizer of ours updates in a host.

    Args:
        named: by name; `param.data` of each is where the optimizer writes to.
    """

    def __init__(self, named: Mapping[str, Parameter]) -> None:
        self._params = [PlacedParam(name, param, param.data) for name, param in named.items()]

    def that_left(self) -> Sequence[PlacedParam]:
        """See [Note: params that have left]; to be brought back.

        Raises:
            LayoutError: one of them cannot be, because it has another dtype, shape or device, or other params' memory.
        """
        left = [each for each in self._params if each.has_left]
        if left:
            for each in left:
                _check_alike(each)
            extents = [(*addresses_of(each.view), each.name) for each in self._params if each.view.numel()]
            extents += [(*addresses_of(each.param), each.name) for each in left]
            if tied := sharing_memory(extents):
                first, second = tied
                raise _tied(second, f"given the memory of {first!r}")
        return left


def _check_alike(each: PlacedParam) -> None:
    before, after = (f"{dtype_name(one.dtype)}{list(one.shape)} on {one.device}" for one in (each.view, each.param))
    if before != after:
        got, rule = f"{after} where it was {before}", "keep its dtype, shape and device"
        remedy = "Convert the model before the optimizer is built"
        raise LayoutError(refusal(f"param {each.name!r}", got, rule, remedy))


def _tied(name: str, got: str) -> LayoutError:
    remedy = "Tie params as one Parameter before the model is wrapped: b.weight = a.weight"
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


def not_copied(how: str) -> AccessError:
    """What copying and pickling an optimizer raise."""
    rule = "stay where its model is, whose params lie in its buffers"
    remedy = "Keep optimizer.state_dict(), or build the model again and call get_megatron_optimizer(...) for it"
    return AccessError(refusal("optimizer", how, rule, remedy))
