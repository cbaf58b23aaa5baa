"""Optimizers of any class that updates each param as a whole, as the inner optimizer: every param has one owner.

Such a class needs all elements of a param at a time, and keeps for it what it likes: Adafactor rows and columns, SOAP
and Shampoo preconditioners. Nobody but the class knows how to cut that. So the owner of a param (layout/owners.py)
keeps its state, whole. In a step it receives main param and gradient, each fp32, and sends the main param back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm import Group
from megatron_distopt.layout import MatrixOwner, MatrixSpec, OwnerPlan, plan_owners
from megatron_distopt.optimizer.inner import Build, Groups, InParts
from megatron_distopt.optimizer.main_params import FlatParam, ParamGroup
from megatron_distopt.optimizer.owners.exchange import OwnedBuffer, ShardValues, exchange
from megatron_distopt.optimizer.owners.owned_param import OwnedParam


@dataclass(frozen=True)
class TrainedParams:
    """The params of a model that are updated."""

    shapes: Mapping[str, Sequence[int]]  # by name; of those that may train later as well
    group_of: Callable[[str], Group]  # from a name to the data-parallel ranks over which the param is sharded

    @classmethod
    def of(cls, named: Mapping[str, Tensor], group_of: Callable[[str], Group]) -> TrainedParams:
        """Those of a rank, by name."""
        return cls({name: tuple(param.shape) for name, param in named.items()}, group_of)


class WholeParams(InParts):
    """See the file. `step` is collective over the groups of the buffers, also on a rank without params."""

    def __init__(self, groups: Groups, *, build: Build, params: TrainedParams) -> None:
        num_dims = max((len(shape) for shape in params.shapes.values()), default=1)
        super().__init__(groups, build([{"params": [torch.zeros((2,) * num_dims)]}]).defaults)
        self.owned: dict[str, OwnedParam] = {}  # what this rank updates, by the name of the param
        self.owners: list[OwnerPlan] = []
        self._build, self._params = build, params
        self._buffers: list[OwnedBuffer] = []
        self._group_of: Mapping[str, int] = {}
        self._left_out: frozenset[str] = frozenset()

    def part_for(self, group: Mapping[str, Any]) -> Optimizer:
        """Always this one."""
        return self

    def leave_out(self, names: Collection[str]) -> None:
        """These params have no gradient in the next step."""
        self._left_out = frozenset(names)

    def options_of(self, name: str) -> dict[str, Any]:
        """The param group of a param, whether this rank has a piece of it or not."""
        return self.param_groups[self._group_of[name]]

    def state_elsewhere(self) -> tuple[int, int]:
        """Bytes of all state of this rank, and elements of the params that it owns."""
        owned = self.owned.values()
        return sum(each.state_nbytes for each in owned), sum(each.numel for each in owned)

    def hold(
        self, buffers: Sequence[ShardedBuffer], flat_params: Sequence[FlatParam], groups: Sequence[ParamGroup]
    ) -> None:
        """Chooses the owners of new buffers, and makes an optimizer for each param that this rank owns now."""
        self._group_of = {name: number for number, group in enumerate(groups) for name in group.names}
        for buffer in buffers[len(self.owners) :]:
            # Whatever its shape, a param is one block. What a class needs for it is not known; elements are a measure.
            blocks = {
                slot.name: MatrixSpec(1, slot.in_buffer.numel)
                for slot in buffer.layout.slots
                if slot.name in self._group_of and buffer.holds(slot.name)
            }
            self.owners.append(plan_owners(buffer.layout, blocks))
        self._buffers = [
            OwnedBuffer.of(buffer, plan, self._params.group_of, flat_params)
            for buffer, plan in zip(buffers, self.owners, strict=True)
            if plan.owners
        ]
        for owned in self._buffers:
            for owner in owned.plan.owned_by(owned.group.rank):
                if owner.name not in self.owned:
                    shape, options = self._params.shapes[owner.name], self.options_of(owner.name)
                    self.owned[owner.name] = OwnedParam(shape, owned.device, self._build, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective: updates every main param that has a gradient."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for buffer in self._buffers:
            flat_params = buffer.flat_params
            mains = ShardValues((flat.plan.in_buffer, flat.main.detach()) for flat in flat_params)
            # A param without a gradient comes to its owner as well, who is told so by its name.
            grads = ShardValues(
                (flat.plan.in_buffer, torch.zeros_like(flat.main) if flat.main.grad is None else flat.main.grad)
                for flat in flat_params
            )
            exchange(buffer, [mains, grads], self._update)
        self._left_out = frozenset()
        return loss

    def _update(self, owner: MatrixOwner, blocks: Sequence[Tensor]) -> None:
        main, grad = blocks
        # A gradient that lies whole in a shard is the grad buffer itself, which a class may not change.
        own_grad = None if owner.name in self._left_out else grad.clone() if owner.round is None else grad
        self.owned[owner.name].step(main, own_grad, self.options_of(owner.name))


def owned_params(inner: Optimizer) -> Iterator[tuple[str, OwnedParam, dict[str, Any]]]:
    """What this rank updates as whole params: name, param and its param group; nothing with other inner optimizers."""
    if isinstance(inner, WholeParams):
        yield from ((name, owned, inner.options_of(name)) for name, owned in inner.owned.items())
