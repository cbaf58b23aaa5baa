"""Optimizers of any class that updates each param as a whole, as the inner optimizer: every param has one owner.

Such a class needs all elements of a param at a time, and keeps for it what it likes: Adafactor rows and columns, SOAP
and Shampoo preconditioners. Nobody but the class knows how to cut that. So the owner of a param (layout/owners.py)
keeps its state, whole. In a step it receives main param and gradient, each fp32, and sends the main param back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm import Group
from megatron_distopt.compatibility import Feature, check_compatible
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.layout import MatrixOwner, MatrixSpec, OwnerPlan, plan_owners
from megatron_distopt.optimizer.inner import Build, Groups, InnerChoice, InParts
from megatron_distopt.optimizer.main_params import FlatParam, ParamGroup
from megatron_distopt.optimizer.owners.exchange import Lane, Place, exchange
from megatron_distopt.optimizer.owners.owned_param import OwnedParam
from megatron_distopt.optimizer.owners.whole_trial import check_each_param


@dataclass(frozen=True)
class TrainedParams:
    """The params of a model that are updated.

    Args:
        shapes: by name; of those that may train later as well.
        group_of: from the name of a param to the data-parallel ranks over which it is sharded.
    """

    shapes: Mapping[str, Sequence[int]]
    group_of: Callable[[str], Group]


def choose_whole(
    build: Build,
    name: str,
    params: TrainedParams,
    config: DistOptConfig,
    groups: Sequence[Mapping[str, Any]] = ({},),
    device: torch.device | None = None,
) -> InnerChoice:
    """The inner optimizer for a class that updates whole params.

    Args:
        build: makes a new one from param groups.
        name: of the class.
        params: see `TrainedParams`.
        config: merged.
        groups: options of its param groups.
        device: of the main params; None for the CPU.

    Raises:
        ConfigError: the class does not update each param by itself, or options of the config are not served with it.
    """
    check_compatible(config, {Feature.WHOLE_PARAMS: name})
    dims = {len(shape) for shape in params.shapes.values()} or {1, 2}
    needs_all = not check_each_param(build, name, groups, dims, device)
    chosen = partial(WholeParams, build=build, params=params, needs_all_grads=needs_all)
    why = ("it updates whole params, each on one rank",)
    return InnerChoice(name, chosen, why, updates_whole_params=True, needs_all_grads=needs_all)


@dataclass(frozen=True, eq=False)
class _Held:
    """The params of one buffer: where they are updated, and what this rank has of them."""

    place: Place
    flat_params: Sequence[FlatParam]


class WholeParams(InParts):
    """See the file.

    `step` is collective over the groups of the buffers, also on a rank without params.

    Args:
        groups: of main params.
        build: makes an optimizer of the class.
        params: see `TrainedParams`.
        needs_all_grads: see `InnerChoice`.

    Attributes:
        owned: what this rank updates, by the name of the param.
    """

    def __init__(self, groups: Groups, *, build: Build, params: TrainedParams, needs_all_grads: bool = False) -> None:
        usual = build([{"params": [torch.zeros(_shape_to_try(params))]}]).defaults
        super().__init__(groups, usual)
        self.owned: dict[str, OwnedParam] = {}
        self._build, self._params, self._needs_all_grads = build, params, needs_all_grads
        self.owners: list[OwnerPlan] = []
        self._held: tuple[_Held, ...] = ()
        self._group_of: Mapping[str, int] = {}
        self._left_out: frozenset[str] = frozenset()

    def part_for(self, group: Mapping[str, Any]) -> Optimizer:
        """See `InParts`."""
        return self

    def leave_out(self, names: Collection[str]) -> None:
        """See `InParts`.

        Raises:
            ConfigError: a class that counts once for a group would count differently for these.
        """
        if self._needs_all_grads:
            for number in sorted({self._group_of[name] for name in names}):
                _check_all_left_out(number, {name for name, group in self._group_of.items() if group == number}, names)
        self._left_out = frozenset(names)

    @property
    def travel_width(self) -> int:
        """See `InParts`."""
        return (2 + 1) * torch.float32.itemsize // 2  # main param and gradient, and the main param back

    def options_of(self, name: str) -> dict[str, Any]:
        """The param group of a param, whether this rank has a piece of it or not."""
        return self.param_groups[self._group_of[name]]

    def state_elsewhere(self) -> tuple[int, int]:
        """See `InParts`."""
        owned = self.owned.values()
        return sum(each.state_nbytes for each in owned), sum(each.numel for each in owned)

    def hold(
        self, buffers: Sequence[ShardedBuffer], flat_params: Sequence[FlatParam], groups: Sequence[ParamGroup]
    ) -> None:
        """See `InParts`."""
        self._group_of = {name: number for number, group in enumerate(groups) for name in group.names}
        for buffer in buffers[len(self.owners) :]:
            self.owners.append(_plan_of(buffer, self._group_of))
        pairs = [(buffer, plan) for buffer, plan in zip(buffers, self.owners, strict=True) if plan.owners]
        self._held = tuple(self._held_of(buffer, plan, flat_params) for buffer, plan in pairs)
        for held in self._held:
            for owner in held.place.plan.owned_by(held.place.group.rank):
                if owner.name not in self.owned:
                    self.owned[owner.name] = self._begin(owner.name, held.place.device)

    def _held_of(self, buffer: ShardedBuffer, plan: OwnerPlan, flat_params: Sequence[FlatParam]) -> _Held:
        names = plan.owners_of
        place = Place(plan, self._params.group_of(next(iter(names))), buffer.param.device)
        return _Held(place, [flat for flat in flat_params if flat.plan.shards[0].name in names])

    def _begin(self, name: str, device: torch.device) -> OwnedParam:
        return OwnedParam(self._params.shapes[name], device, self._build, self.options_of(name))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective: updates every main param that has a gradient.

        Args:
            closure: computes the loss; its value is returned.
        """
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for held in self._held:
            mains = Lane((flat.plan.in_buffer, flat.main.detach()) for flat in held.flat_params)
            grads = Lane((flat.plan.in_buffer, _grad_of(flat.main)) for flat in held.flat_params)
            exchange(held.place, [mains, grads], self._update)
        self._left_out = frozenset()
        return loss

    def _update(self, owner: MatrixOwner, blocks: Sequence[Tensor]) -> None:
        main, grad = blocks
        # A gradient that lies whole in a shard is the grad buffer itself, which a class may not change.
        own_grad = None if owner.name in self._left_out else grad.clone() if owner.round is None else grad
        self.owned[owner.name].step(main, own_grad, self.options_of(owner.name))


def _grad_of(main: Tensor) -> Tensor:
    """Zeros where it has none: a param without a gradient comes to its owner as well, who is told so by its name."""
    return torch.zeros_like(main) if main.grad is None else main.grad


def _check_all_left_out(number: int, members: Collection[str], names: Collection[str]) -> None:
    """Refuses a step in which some params of a group have a gradient and some have none."""
    absent = sorted(name for name in members if name in names)
    if len(absent) < len(members):
        got = f"no gradient for {absent[0]!r} and gradients for others"
        rule = "have a gradient for all params or for none, because the class counts updates once for a group"
        remedy = "Put params that lack gradients in some steps into a group of their own, one for each"
        raise ConfigError(refusal(f"param group {number}", got, rule, remedy))


def _plan_of(buffer: ShardedBuffer, names: Collection[str]) -> OwnerPlan:
    held = [slot for slot in buffer.layout.slots if slot.name in names and buffer.holds(slot.name)]
    # Whatever its shape, a param is one block. What a class needs for it is not known; its elements are a measure.
    blocks = {slot.name: MatrixSpec(1, slot.in_buffer.numel) for slot in held}
    return plan_owners(buffer.layout, blocks, cost_of=lambda shape: shape[1])


def _shape_to_try(params: TrainedParams) -> tuple[int, ...]:
    """A small one of as many dimensions as the params have."""
    return (2,) * max((len(shape) for shape in params.shapes.values()), default=1)


def owned_params(inner: Optimizer) -> Iterator[tuple[str, OwnedParam, dict[str, Any]]]:
    """What this rank updates as whole params: name, param and its param group; nothing with other inner optimizers."""
    if isinstance(inner, WholeParams):
        yield from ((name, owned, inner.options_of(name)) for name, owned in inner.owned.items())
