"""A model over (dp, tp, pp) ranks in one process: the state of every rank, without processes.

`World.of(...)` builds the sharded optimizers of all ranks with a state that says of every element
which one it is, so that a load at another layout can be compared bit for bit as global tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.buffers import ShardedBuffer
from megatron_distopt.checkpoint import Share, WholeModel
from megatron_distopt.checkpoint.folder import commit, new_save_id
from megatron_distopt.checkpoint.load import loadable_checkpoint, take_state
from megatron_distopt.checkpoint.load_plan import plan_load
from megatron_distopt.checkpoint.manifest import Manifest
from megatron_distopt.checkpoint.save import Saving, contribution_of
from megatron_distopt.checkpoint.whole_model import owned_pieces
from megatron_distopt.comm import Group
from megatron_distopt.config import DistOptConfig
from megatron_distopt.layout import ParamSpec, Placement, lay_out
from megatron_distopt.optimizer.choice import choose_inner
from megatron_distopt.optimizer.inner_state import restore
from megatron_distopt.optimizer.loss_scale import make_loss_scale
from megatron_distopt.optimizer.main_params import ParamGroup
from megatron_distopt.optimizer.sharded import ShardedOptimizer, StepPlan

KINDS = ("main", "exp_avg", "exp_avg_sq")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Param:
    """One param of the whole model."""

    name: str  # in the whole model
    shape: tuple[int, ...]  # of the whole param; of a padded one without its padding
    dim: int | None = None  # how tensor-parallel ranks cut it; None for replicated
    stride: int = 1
    # the first pipeline stage that holds it, as a fraction of the stages; 0 the first, 1 the last
    stage: float = 0.0
    decays: bool = True  # in which of two param groups it is
    dtype: torch.dtype = torch.bfloat16  # of the model param
    is_padded: bool = False  # the first dimension is padded to a multiple of 4 * tp

    def padded_shape(self, tp: int) -> tuple[int, ...]:
        """Of the whole param in a run with that many tensor-parallel ranks."""
        if not self.is_padded:
            return self.shape
        return (-(-self.shape[0] // (4 * tp)) * 4 * tp, *self.shape[1:])


def small_model(layers: int = 4) -> tuple[Param, ...]:
    """Padded vocabulary, fused gate and up, row- and column-parallel, replicated norms, fp32 among
    bf16."""
    params = [Param("embedding.word_embeddings.weight", (37, 6), dim=0, is_padded=True)]
    for layer in range(layers):
        stage, prefix = layer / layers, f"decoder.layers.{layer}"
        params += [
            Param(
                f"{prefix}.input_layernorm.weight",
                (6,),
                stage=stage,
                decays=False,
                dtype=torch.float32,
            ),
            Param(f"{prefix}.self_attention.linear_qkv.weight", (24, 6), dim=0, stage=stage),
            Param(f"{prefix}.self_attention.linear_proj.weight", (6, 8), dim=1, stage=stage),
            Param(f"{prefix}.mlp.linear_fc1.weight", (32, 6), dim=0, stride=2, stage=stage),
            Param(
                f"{prefix}.mlp.linear_fc1.bias", (32,), dim=0, stride=2, stage=stage, decays=False
            ),
            Param(f"{prefix}.mlp.linear_fc2.weight", (6, 16), dim=1, stage=stage),
        ]
    params += [
        Param("conv.weight", (3, 4, 5), dim=1, stage=0.99),
        Param("scale", (1,), stage=0.99, decays=False),
    ]
    return tuple(params)


def element_numbers(param: Param, kind: str, shape: Sequence[int]) -> Tensor:
    """What a tensor holds: different for every kind and param, exact in fp32; rows of padding are
    zero."""
    seed = KINDS.index(kind) * 7 + sum(map(ord, param.name)) % 101
    whole = torch.zeros(tuple(shape), dtype=torch.float32)
    values = torch.arange(math.prod(param.shape), dtype=torch.float32) * 3 + seed
    whole[tuple(slice(0, numel) for numel in param.shape)] = values.view(param.shape) + 0.25
    return whole


@dataclass(frozen=True)
class Rank:
    """One rank's optimizers and how its params lie in the whole model."""

    optimizer: ShardedOptimizer
    model: WholeModel


@dataclass(frozen=True)
class World:
    """All ranks of a layout."""

    params: tuple[Param, ...]
    tp: int
    ranks: tuple[Rank, ...]

    @classmethod
    def of(
        cls, params: tuple[Param, ...], *, dp: int = 1, tp: int = 1, pp: int = 1, **options: Any
    ) -> World:
        """Builds it; `options` are those of `_rank`."""
        ranks = [
            _rank(params, (d, dp), (t, tp), (p, pp), **options)
            for p in range(pp)
            for d in range(dp)
            for t in range(tp)
        ]
        return cls(params, tp, tuple(ranks))

    def save(self, folder: Path) -> Manifest:
        """As the ranks would, one after the other."""
        folder.mkdir(parents=True, exist_ok=True)
        save_id = new_save_id()
        savings = [
            Saving(folder, save_id, rank, len(self.ranks), None) for rank in range(len(self.ranks))
        ]
        parts = [saving.write(contribution_of(self.ranks[saving.rank].model)) for saving in savings]
        return commit(folder, parts)

    def load(self, folder: Path) -> None:
        """As the ranks would, one after the other."""
        states = [
            loadable_checkpoint(folder, rank, len(self.ranks)) for rank in range(len(self.ranks))
        ]
        names = [param.name for param in self.params]
        plans = [
            plan_load(state, each.model, names)
            for state, each in zip(states, self.ranks, strict=True)
        ]
        for plan in plans:
            plan.state.verify(plan.reads)
        for plan in plans:
            take_state(plan)

    def whole(self, kind: str) -> dict[str, Tensor]:
        """The tensors of one kind, put together from all ranks; what nobody owns is nan."""
        found = {p.name: torch.full(p.padded_shape(self.tp), math.nan) for p in self.params}
        for rank in self.ranks:
            for piece in owned_pieces(rank.model):
                state = rank.optimizer.inner.state.get(piece.flat.main, {})
                tensor = piece.flat.main if kind == "main" else state[kind]
                found[piece.placement.name][piece.piece.in_global.as_slices()] = piece.view(
                    tensor
                ).detach()
        return found


def _rank(
    params: tuple[Param, ...],
    dp: tuple[int, int],
    tp: tuple[int, int],
    pp: tuple[int, int],
    bucket_size: int | None = None,
    filled: bool = True,
    step: int | None = 10,
    adam: str = "torch_fused",
    plain_dtype: torch.dtype | None = None,
    lr: float = 1e-3,
) -> Rank:
    """With the state of `element_numbers` where filled, and fresh otherwise."""
    mine = [param for param in params if min(int(param.stage * pp[1]), pp[1] - 1) == pp[0]]
    placements = {f"module.{param.name}": _placement(param, tp) for param in mine}
    by_dtype: dict[torch.dtype, list[Param]] = {}
    for param in reversed(mine):
        by_dtype.setdefault(plain_dtype or param.dtype, []).append(param)
    buffers = [
        _buffer(members, dtype, placements, dp, bucket_size) for dtype, members in by_dtype.items()
    ]
    config = DistOptConfig(adam=adam, lr=lr, loss_scale="dynamic", initial_loss_scale=2.0**10)
    groups = [
        ParamGroup({"lr": lr, "wd_mult": mult, "weight_decay": 0.1 * mult}, _members(mine, decays))
        for mult, decays in ((1.0, True), (0.0, False))
    ]
    choice = choose_inner(config, "cpu")
    plan = StepPlan(groups, choice, config, make_loss_scale(config, CPU), lambda: Group(None, 0, 1))
    optimizer = ShardedOptimizer(buffers, plan)
    share = Share(
        optimizer, placements, lambda name: tp[0] == 0 or placements[name].dim is not None
    )
    model = WholeModel([share])
    rank = Rank(optimizer, model)
    if filled:
        _fill(rank, {param.name: param for param in params}, step)
    return rank


def _members(mine: Sequence[Param], decays: bool) -> tuple[str, ...]:
    return tuple(f"module.{param.name}" for param in mine if param.decays == decays)


def _placement(param: Param, tp: tuple[int, int]) -> Placement:
    shape = list(param.padded_shape(tp[1]))
    if param.dim is not None:
        shape[param.dim] //= tp[1]
    return Placement(
        param.name, tuple(shape), param.dim, tp[0], tp[1], param.stride, param.is_padded
    )


def _buffer(
    members: Sequence[Param],
    dtype: torch.dtype,
    placements: Mapping[str, Placement],
    dp: tuple[int, int],
    bucket_size: int | None,
) -> ShardedBuffer:
    names = [f"module.{param.name}" for param in members]
    specs = [
        ParamSpec(name, math.prod(placements[name].shape), placements[name].shape) for name in names
    ]
    layout = lay_out(specs, num_shards=dp[1], bucket_size=bucket_size, alignment_numel=4)
    return ShardedBuffer(
        layout, dp[0], torch.zeros(layout.numel), torch.zeros(layout.numel, dtype=dtype)
    )


def _fill(rank: Rank, params: Mapping[str, Param], step: int | None) -> None:
    inner = rank.optimizer.inner
    state: dict[Any, dict[str, Tensor]] = {
        run.main: {kind: torch.zeros_like(run.main) for kind in KINDS[1:]}
        for run in rank.optimizer.flat_params
    }
    for piece in owned_pieces(rank.model):
        param = params[piece.placement.name]
        for kind in KINDS:
            tensor = piece.flat.main if kind == "main" else state[piece.flat.main][kind]
            numbers = element_numbers(param, kind, piece.placement.global_shape)
            piece.view(tensor).copy_(numbers[piece.piece.in_global.as_slices()])
    for run in rank.optimizer.flat_params:
        group = inner.param_groups[run.plan.key.group]
        if step is not None:
            restore(inner, group, run.main, state[run.main], step)
        run.write_model()
