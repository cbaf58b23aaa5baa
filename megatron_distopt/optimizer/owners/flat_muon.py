"""Muon for flat params: the two element-wise parts on the shards of a rank, and between them the matrices that it owns.

See [Note: three parts of Muon] in muon.py and [Note: rounds of travel] in exchange.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_distopt.comm import Group
from megatron_distopt.errors import InvariantError, refusal
from megatron_distopt.layout import FlatParamPlan, MatrixOwner, MatrixSpec, OwnerPlan
from megatron_distopt.optimizer.owners.cut_muon import orthogonalize_cut
from megatron_distopt.optimizer.owners.exchange import Lane, Place, exchange
from megatron_distopt.optimizer.owners.muon import apply_update, direction_of, orthogonalize, orthogonalize_block
from megatron_distopt.optimizer.owners.muon_options import MuonOptions, formula_of, options_of


@dataclass(frozen=True, eq=False)
class MatrixBuffer:
    """The matrices of one buffer.

    Args:
        plan: their owners.
        specs: by name, those of the plan.
        group: that shards the buffer.
        device: of the buffer.
        flat_params: of matrices on this rank: main param and plan of each.
        cut_over: tensor-parallel ranks that have parts of the matrices with a cut; None where there are none.
    """

    plan: OwnerPlan
    specs: Mapping[str, MatrixSpec]
    group: Group
    device: torch.device
    flat_params: Sequence[tuple[Tensor, FlatParamPlan[Any]]]
    cut_over: Group | None = None


def _orthogonalize_on_owner(
    buffer: MatrixBuffer, options_of: Callable[[str], MuonOptions], owner: MatrixOwner, block: Tensor
) -> None:
    """Orthogonalizes the matrices of a block that a rank owns, in place.

    Args:
        buffer: see `MatrixBuffer`.
        options_of: from the name of a param.
        owner: of the block.
        block: 1-D, in the dtype in which it travels.
    """
    spec, options = buffer.specs[owner.name], options_of(owner.name)

    def one(matrix: Tensor) -> Tensor:
        # Ranks with the other parts own them in their own groups and come here in the same order.
        if spec.cut is None or buffer.cut_over is None:
            return orthogonalize(matrix, options)
        return orthogonalize_cut(matrix, spec.cut, options, buffer.cut_over)

    orthogonalize_block(block, spec, owner.block, one)


class FlatMuon(Optimizer):
    """Muon whose params are flat: pieces of matrices that other ranks have the rest of.

    `step` is collective over the groups of the buffers, also on a rank without params.

    Args:
        params: param groups of main params, fp32 1-D; the same number of groups on every rank. Options that a group
            lacks are the defaults of its formula.
    """

    #: Names of params that are not updated in the next step, and are in those after it; the same on all ranks.
    left_out: frozenset[str] = frozenset()

    def __init__(self, params: Iterable[Any]) -> None:
        self._buffers: tuple[MatrixBuffer, ...] = ()
        self._group_of: Mapping[str, int] = {}
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a param group; see the class."""
        super().add_param_group({**vars(formula_of(param_group)()), **param_group})

    def bind(self, buffers: Sequence[MatrixBuffer], group_of: Mapping[str, int]) -> None:
        """Says what the params are pieces of.

        Args:
            buffers: in the same order on all ranks.
            group_of: the number of the param group of every matrix param, whether this rank has a piece or not.
        """
        self._buffers, self._group_of = tuple(buffers), dict(group_of)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collective: updates every main param that has a gradient.

        Args:
            closure: computes the loss; its value is returned.
        """
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        options = [options_of(group) for group in self.param_groups]
        for buffer in self._buffers:
            self._step(buffer, lambda name: options[self._group_of[name]])
        self.left_out = frozenset()
        return loss

    def _step(self, buffer: MatrixBuffer, options_of: Callable[[str], MuonOptions]) -> None:
        updated = [(main, plan) for main, plan in buffer.flat_params if main.grad is not None]
        directions = [self._direction(main, options_of(plan.shards[0].name)) for main, plan in updated]
        spans = [plan.in_buffer for _, plan in updated]
        updates = Lane(zip(spans, directions, strict=True), lambda name: options_of(name).travel_dtype)
        place = Place(buffer.plan, buffer.group, buffer.device)
        exchange(
            place,
            [updates],
            lambda owner, blocks: _orthogonalize_on_owner(buffer, options_of, owner, blocks[0]),
            self.left_out,
        )
        for main, plan in updated:
            for shard in plan.shards:
                part = main[plan.in_flat_param(shard).as_slice()]
                options, spec = options_of(shard.name), buffer.specs[shard.name]
                apply_update(part, updates.of(shard.in_buffer), spec, shard.in_param, options)

    def _direction(self, main: Tensor, options: MuonOptions) -> Tensor:
        state = self.state[main]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(main)
        grad = main.grad
        if grad is None:
            raise InvariantError(refusal("main grad", "none", "be attached", "Report this"))
        return direction_of(grad, state["momentum_buffer"], options)
