"""Muon as the inner optimizer: for matrices, with an Adam for all other params, or alone.

Both are one inner optimizer, so that a step has one gradient norm and one decision, and a checkpoint holds all state.
Which of the two updates a param group is seen from its options.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
from megatron_distopt.errors import ConfigError, LayoutError, refusal
from megatron_distopt.layout import MatrixSpec, OwnerPlan, ParamSpec, plan_owners
from megatron_distopt.optimizer.choice import WITH_MUON, adopt_instance, fused_instance
from megatron_distopt.optimizer.inner import Build, Groups, InnerChoice, InParts
from megatron_distopt.optimizer.main_params import FlatParam, ParamGroup
from megatron_distopt.optimizer.owners.flat_muon import FlatMuon, MatrixBuffer
from megatron_distopt.optimizer.owners.muon import Muon
from megatron_distopt.optimizer.owners.muon_options import TorchMuonOptions, formula_of, is_muons_group, options_of

_WITH_MUON = (torch.optim.AdamW, torch.optim.Adam)


def is_muon(optimizer: object) -> bool:
    """Whether it is `torch.optim.Muon` itself, which older releases of torch do not have, or our own class."""
    return type(optimizer) in (Muon, getattr(torch.optim, "Muon", Muon))


def matrices_in(muon: Optimizer, named: Mapping[str, Tensor]) -> dict[str, MatrixSpec]:
    """The matrices of the params of a Muon, by name; those without an element are none.

    Args:
        muon: see `is_muon`.
        named: params of the model.

    Raises:
        LayoutError: a param has not two dimensions, and nobody says of what matrices it consists.
    """
    members = {param for group in muon.param_groups for param in group["params"] if param.numel()}
    spec_of = muon.matrices_of if isinstance(muon, Muon) else None
    return {
        name: shape_of_matrix(name, param) if spec_of is None else spec_of(param)
        for name, param in named.items()
        if param in members
    }


def shape_of_matrix(name: str, param: Tensor) -> MatrixSpec:
    """The matrix that a param of Muon is.

    Raises:
        LayoutError: it has not two dimensions.
    """
    if param.dim() != 2:
        rule, remedy = "have two dimensions where Muon updates it", f"Give it to an AdamW beside Muon: {WITH_MUON}"
        raise LayoutError(refusal(f"param {name!r}", f"shape {list(param.shape)}", rule, remedy))
    return MatrixSpec.of(ParamSpec(name, param.numel(), tuple(param.shape)))


@dataclass(frozen=True)
class Matrices:
    """The matrices of a model, and the ranks that have pieces of them.

    Args:
        specs: of all params that Muon may update, by name.
        group_of: from the name of a param to the data-parallel ranks over which it is sharded.
        cut_over: from that name to the tensor-parallel ranks that share it, where its spec has a cut.
    """

    specs: Mapping[str, MatrixSpec]
    group_of: Callable[[str], Group]
    cut_over: Callable[[str], Group | None] = lambda name: None


def adopt_muon(given: Sequence[Optimizer], matrices: Matrices, config: DistOptConfig, device_type: str) -> InnerChoice:
    """The inner optimizer for `torch.optim.Muon` or our own class, and for an Adam of torch's with it.

    Args:
        given: Muon and at most one Adam, in either order; new.
        matrices: see `Matrices`.
        config: merged.
        device_type: of the main params.

    Raises:
        ConfigError: other optimizers, or options of the config that Muon does not serve.
    """
    muon, others = _sorted(given)
    for group in muon.param_groups:
        options_of(group)
    rest = [fused_instance(each, config, device_type) or adopt_instance(each) for each in others]
    defaults = tuple(f"Muon's {name}={value!r}" for name, value in sorted(muon.defaults.items()))
    return choose_muon(rest[0] if rest else None, matrices, config, ("Muon was given",), defaults)


def choose_muon(
    rest: InnerChoice | None,
    matrices: Matrices,
    config: DistOptConfig,
    why: tuple[str, ...],
    defaults: tuple[str, ...] = (),
    source: str = TorchMuonOptions.source,
) -> InnerChoice:
    """Muon for param groups with its options, and another inner optimizer for the others.

    Args:
        rest: None where there are no others.
        matrices: see `Matrices`.
        config: merged.
        why, defaults: see `InnerChoice`.
        source: of Muon's formula.

    Raises:
        ConfigError: options of the config that Muon does not serve.
    """
    check_compatible(config, {Feature.WHOLE_PARAMS: "Muon"})
    others = [] if rest is None else [rest]
    build = partial(MuonAndAdam, rest=None if rest is None else rest.build, matrices=matrices)
    return InnerChoice(
        " and ".join((source, *(each.name for each in others))),
        build,
        (*why, *(each for other in others for each in other.why)),
        (*defaults, *(each for other in others for each in other.defaults)),
    )


def _sorted(given: Sequence[Optimizer]) -> tuple[Optimizer, list[Optimizer]]:
    muons = [each for each in given if is_muon(each)]
    others = [each for each in given if not is_muon(each)]
    if len(muons) != 1 or len(others) > 1 or any(type(each) not in _WITH_MUON for each in others):
        got = " and ".join(type(each).__name__ for each in given) or "none"
        rule = "be one optimizer, or torch.optim.Muon with an AdamW or Adam of torch's for params that are no matrices"
        raise ConfigError(refusal("optimizers", got, rule, f"Write {WITH_MUON}, or param groups in one optimizer"))
    return muons[0], others


class MuonAndAdam(InParts):
    """See the file.

    Args:
        groups: of main params.
        rest: builds what updates the groups that are not Muon's; None where there are none.
        matrices: see `Matrices`.
    """

    def __init__(self, groups: Groups, *, rest: Build | None, matrices: Matrices) -> None:
        super().__init__([{"params": []}], {})
        self._matrices, self.owners = matrices, list[OwnerPlan]()
        others = [group for group in groups if not is_muons_group(group)]
        # A rank may have no params for one of them, and torch refuses an empty list of groups.
        self._muon = FlatMuon([group for group in groups if is_muons_group(group)] or [{"params": []}])
        self._rest = rest(others or [{"params": []}]) if rest is not None else None
        self._parts = [self._muon] if self._rest is None else [self._muon, self._rest]
        of_part = {part: iter(part.param_groups) for part in self._parts}
        self.param_groups = [next(of_part[self.part_for(group)]) for group in groups]
        for part in self._parts:
            part.state = self.state

    def part_for(self, group: Mapping[str, Any]) -> Optimizer:
        """See `InParts`."""
        return self._muon if is_muons_group(group) or self._rest is None else self._rest

    def hold(
        self, buffers: Sequence[ShardedBuffer], flat_params: Sequence[FlatParam], groups: Sequence[ParamGroup]
    ) -> None:
        """See `InParts`."""
        members = [group.names for group in groups if is_muons_group(group.options)]
        group_of = {name: number for number, names in enumerate(members) for name in names}
        for buffer in buffers[len(self.owners) :]:
            self.owners.append(plan_owners(buffer.layout, self._specs_in(buffer, group_of)))
        of_muon = [flat for flat in flat_params if flat.plan.shards[0].name in group_of]
        pairs = [(buffer, plan) for buffer, plan in zip(buffers, self.owners, strict=True) if plan.owners]
        self._muon.bind([self._matrices_of(buffer, plan, of_muon) for buffer, plan in pairs], group_of)

    @property
    def travel_width(self) -> int:
        """See `InParts`."""
        groups = filter(is_muons_group, self._muon.param_groups)
        return max((formula_of(group).travel_dtype.itemsize for group in groups), default=0)

    def _specs_in(self, buffer: ShardedBuffer, names: Collection[str]) -> dict[str, MatrixSpec]:
        held = (slot.name for slot in buffer.layout.slots if slot.name in names and buffer.holds(slot.name))
        return {name: self._matrices.specs[name] for name in held}

    def _matrices_of(self, buffer: ShardedBuffer, plan: OwnerPlan, flat_params: Sequence[FlatParam]) -> MatrixBuffer:
        specs = self._specs_in(buffer, plan.owners_of)
        pairs = [(flat.main, flat.plan) for flat in flat_params if flat.plan.shards[0].name in specs]
        group = self._matrices.group_of(next(iter(specs)))
        return MatrixBuffer(plan, specs, group, buffer.param.device, pairs, self._cut_over(specs))

    def _cut_over(self, specs: Mapping[str, MatrixSpec]) -> Group | None:
        cut = (name for name, spec in specs.items() if spec.cut is not None)
        return next((self._matrices.cut_over(name) for name in cut), None)

    def leave_out(self, names: Collection[str]) -> None:
        """See `InParts`."""
        self._muon.left_out = frozenset(names)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective: updates every main param that has a gradient.

        Args:
            closure: computes the loss; its value is returned.
        """
        loss = self._muon.step(closure)
        if self._rest is not None:
            self._rest.step()
        return loss
