"""Muon as the inner optimizer for matrices of which ranks have pieces, alone or with an Adam for
all other params.

Muon and Adam are one inner optimizer, so that a step has one gradient norm and one decision, and a
checkpoint holds all state. The options of a param group say which of the two updates it. A rank
computes the two element-wise parts of Muon on its shards, and between them orthogonalizes the
matrices that it owns: see [Note: three parts of Muon] in muon.py and [Note: rounds of travel] in
update_on_owners.py.

[Note: matrices over tensor-parallel ranks] If a matrix is cut over tensor-parallel ranks, each has
a part, and the part has an owner in that rank's data-parallel group. megatron-core has three ways
to orthogonalize it. With "duplicated" every rank gathers the whole matrix, orthogonalizes it and
keeps its part. The result is bit-identical to that of one rank with the whole matrix. With
"distributed" every rank multiplies its part, and the products along the cut dimension are summed
over the ranks in fp32. No rank repeats work, but the order of sums differs. "blockwise" treats the
part of a rank as a matrix of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.comm import Group, sum_over
from megatron_distopt.comm.collectives import all_gather
from megatron_distopt.compatibility import Feature, check_compatible
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import ConfigError, LayoutError
from megatron_distopt.layout import MatrixCut, MatrixOwner, MatrixSpec, OwnerPlan, ParamSpec
from megatron_distopt.optimizer.choice import WITH_MUON, adopt_instance, fused_instance
from megatron_distopt.optimizer.inner import Build, Groups, InnerChoice, InParts
from megatron_distopt.optimizer.main_params import FlatParam, ParamGroup
from megatron_distopt.optimizer.owners.muon import (
    Muon,
    apply_update,
    direction_of,
    newton_schulz,
    orthogonalize,
    orthogonalize_block,
)
from megatron_distopt.optimizer.owners.muon_options import (
    MuonOptions,
    TorchMuonOptions,
    formula_of,
    is_muons_group,
    options_of,
)
from megatron_distopt.optimizer.owners.update_on_owners import (
    Exchange,
    OwnedBuffer,
    ShardValues,
    choose_owners,
)


@dataclass(frozen=True)
class Matrices:
    """The matrices of a model, and the ranks that have pieces of them."""

    specs: Mapping[str, MatrixSpec]  # of all params that Muon may update, by name
    # takes that name and returns the data-parallel ranks over which the param is sharded
    group_of: Callable[[str], Group]
    # takes that name and returns the tensor-parallel ranks over which the param is cut
    cut_over: Callable[[str], Group | None] = lambda name: None


def is_muon(optimizer: object) -> bool:
    """Whether its class is exactly `torch.optim.Muon`, which older releases of torch do not have,
    or our own `Muon`."""
    return type(optimizer) in (Muon, getattr(torch.optim, "Muon", Muon))


def matrices_in(muon: Optimizer, named: Mapping[str, Tensor]) -> dict[str, MatrixSpec]:
    """The matrices of the params of a Muon, by name, without params that have no elements."""
    members = {param for group in muon.param_groups for param in group["params"] if param.numel()}
    return {
        name: muon.matrices_of(param) if isinstance(muon, Muon) else matrix_of(name, param)
        for name, param in named.items()
        if param in members
    }


def matrix_of(name: str, param: Tensor) -> MatrixSpec:
    """A param as one matrix. Refuses a param that does not have two dimensions."""
    if param.dim() != 2:
        raise LayoutError(
            f"Muon updates params with two dimensions, but {name!r} has shape "
            f"{list(param.shape)}. Give it to an AdamW instead: {WITH_MUON}."
        )
    return MatrixSpec.of(ParamSpec(name, param.numel(), tuple(param.shape)))


def adopt_muon(
    given: Sequence[Optimizer], matrices: Matrices, config: DistOptConfig, device_type: str
) -> InnerChoice:
    """The inner optimizer for a `torch.optim.Muon` or our own `Muon`, alone or with an Adam of
    torch's. It does not use the given objects themselves.

    Raises:
        ConfigError: for other optimizers, or options of the config that Muon does not support.
    """
    muons = [each for each in given if is_muon(each)]
    others = [each for each in given if not is_muon(each)]
    is_other_adam = all(type(each) in (torch.optim.AdamW, torch.optim.Adam) for each in others)
    if len(muons) != 1 or len(others) > 1 or not is_other_adam:
        raise ConfigError(
            f"{' and '.join(type(each).__name__ for each in given) or 'No optimizers'} were given "
            "together, but only Muon and an AdamW or Adam of torch's can be, for params that are "
            f"not matrices: {WITH_MUON}. Otherwise give one optimizer with several param groups, "
            "or call distribute(model, ...) once for each optimizer."
        )
    if config.updates is not None:
        raise ConfigError(
            f"updates is {config.updates!r}, but Muon updates matrices. Leave updates out."
        )
    for group in muons[0].param_groups:
        options_of(group)
    rest = [fused_instance(each, config, device_type) or adopt_instance(each) for each in others]
    defaults = tuple(
        f"Muon's {name}={value!r}" for name, value in sorted(muons[0].defaults.items())
    )
    return choose_muon(rest[0] if rest else None, matrices, config, ("Muon was given",), defaults)


def choose_muon(
    rest: InnerChoice | None,
    matrices: Matrices,
    config: DistOptConfig,
    why: tuple[str, ...],
    defaults: tuple[str, ...] = (),
    source: str = TorchMuonOptions.source,
) -> InnerChoice:
    """Muon for param groups with its options, and the inner optimizer `rest` for other groups."""
    check_compatible(config, {Feature.WHOLE_PARAMS: "Muon"})
    build = partial(ShardedMuon, matrices=matrices, rest=None if rest is None else rest.build)
    if rest is None:
        return InnerChoice(source, build, why, defaults)
    return InnerChoice(
        f"{source} and {rest.name}", build, (*why, *rest.why), (*defaults, *rest.defaults)
    )


class ShardedMuon(InParts):
    """Muon for its param groups, whose params are pieces of matrices. `rest` builds the optimizer
    of the other groups.

    `step` is collective over the groups of the buffers, even on a rank without params. Every rank
    has the same number of param groups. Options that a group of Muon does not set have the defaults
    of its formula.
    """

    def __init__(self, groups: Groups, *, matrices: Matrices, rest: Build | None = None) -> None:
        super().__init__([{"params": []}], {})
        self._matrices, self.owners = matrices, list[OwnerPlan]()
        self._buffers: Sequence[OwnedBuffer] = ()
        self._group_of: Mapping[str, int] = {}
        self._cut_over: Mapping[str, Group | None] = {}
        # A rank may have no params for the rest, and torch refuses an empty list of groups.
        others = [group for group in groups if not is_muons_group(group)] or [{"params": []}]
        self._rest = None if rest is None else rest(others)
        of_rest = iter(() if self._rest is None else self._rest.param_groups)
        self.param_groups = []
        for group in groups:
            if is_muons_group(group):
                self.add_param_group({**vars(formula_of(group)()), **group})
            else:
                self.param_groups.append(next(of_rest))

    def part_for(self, group: Mapping[str, Any]) -> Optimizer:
        """This optimizer for groups of Muon, and `rest` for the others."""
        return self if is_muons_group(group) or self._rest is None else self._rest

    def hold(
        self,
        buffers: Sequence[ShardedBuffer],
        flat_params: Sequence[FlatParam],
        groups: Sequence[ParamGroup],
    ) -> None:
        """Chooses the owners of matrices in new buffers, and stores of which params the flat params
        are pieces."""
        self._group_of = {
            name: number
            for number, group in enumerate(groups)
            for name in group.names
            if is_muons_group(group.options)
        }
        every, group_of = self._matrices.specs, self._matrices.group_of
        specs = {name: spec for name, spec in every.items() if name in self._group_of}
        self._buffers = choose_owners(self.owners, buffers, specs, group_of, flat_params)
        cut = [name for name, spec in specs.items() if spec.cut is not None]
        self._cut_over = {name: self._matrices.cut_over(name) for name in cut}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Collective: updates every main param that has a gradient."""
        options = {
            name: options_of(self.param_groups[number]) for name, number in self._group_of.items()
        }
        for buffer in self._buffers:
            self._step(buffer, options)
        self.left_out = frozenset()
        if self._rest is not None:
            self._rest.state = self.state  # other code may have assigned another one
            self._rest.step()

    def _step(self, buffer: OwnedBuffer, options: Mapping[str, MuonOptions]) -> None:
        specs = self._matrices.specs
        updated, directions = list[FlatParam](), list[Tensor]()
        for flat in buffer.flat_params:
            if flat.main.grad is not None:
                state = self.state[flat.main]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(flat.main)
                momentum, of_flat = state["momentum_buffer"], options[flat.plan.shards[0].name]
                updated.append(flat)
                directions.append(direction_of(flat.main.grad, momentum, of_flat))
        updates = ShardValues(updated, directions, lambda name: options[name].travel_dtype)

        def orthogonalize_on_owner(owner: MatrixOwner, blocks: Sequence[Tensor]) -> None:
            spec, of_param = specs[owner.name], options[owner.name]
            # The ranks with the other parts own them in their own groups, and call this in the same
            # order.
            group = self._cut_over.get(owner.name)
            one = partial(orthogonalize, options=of_param)
            if spec.cut is not None and group is not None:
                one = partial(orthogonalize_cut, cut=spec.cut, options=of_param, group=group)
            orthogonalize_block(blocks[0], spec, owner.block, one)

        Exchange(buffer, [updates], orthogonalize_on_owner, self.left_out).run()
        for flat in updated:
            for shard in flat.plan.shards:
                apply_update(
                    flat.cut(flat.main, shard),
                    updates.of(shard.in_buffer),
                    specs[shard.name],
                    shard.in_param,
                    options[shard.name],
                )


def orthogonalize_cut(part: Tensor, cut: MatrixCut, options: MuonOptions, group: Group) -> Tensor:
    """Collective over tensor-parallel ranks: `orthogonalize` for a matrix of which each rank has an
    equal part.

    Returns this rank's part of the result; see [Note: matrices over tensor-parallel ranks].
    """
    if not cut.is_gathered:
        return _distributed(part, cut, options, group)
    bucket = part.new_empty((cut.size, *part.shape))
    bucket[group.rank] = part
    all_gather(bucket.view(-1), bucket[group.rank].view(-1), group)
    parts = [_in_pieces(each, cut, 1) for each in bucket]
    joined = torch.cat(parts, dim=cut.dim + 1)
    rows, cols = cut.whole((part.shape[0], part.shape[1]))
    whole = orthogonalize(joined.reshape(rows, cols).contiguous(), options)
    own = _in_pieces(whole, cut, cut.size).select(cut.dim + 1, group.rank)
    return own.reshape(part.shape)


def _in_pieces(matrix: Tensor, cut: MatrixCut, num_ranks: int) -> Tensor:
    """A view with the cut dimension split into three: pieces of the stride, ranks, and the rest."""
    sizes = list(matrix.shape)
    sizes[cut.dim : cut.dim + 1] = [cut.stride, num_ranks, -1]
    return matrix.reshape(sizes)  # splits one dimension, which needs no copy


def _distributed(part: Tensor, cut: MatrixCut, options: MuonOptions, group: Group) -> Tensor:
    """`orthogonalize` with products that contract the cut dimension, even if that is the shorter
    side, and are summed over the ranks."""
    own = part.T if cut.dim == 0 else part
    square = own.float().square().sum()
    sum_over(square, group)
    own = options.normalized(own, square.sqrt())

    def gram_of(matrix: Tensor) -> Tensor:
        gram = (matrix @ matrix.T).float()
        sum_over(gram, group)
        return gram.to(matrix.dtype)

    own = newton_schulz(own, options, gram_of)
    return own.T if cut.dim == 0 else own
