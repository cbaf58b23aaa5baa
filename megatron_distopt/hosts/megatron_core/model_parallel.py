"""Where this rank's params lie in the whole model of megatron-core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.core import parallel_state
from torch.nn import Parameter

from megatron_distopt.checkpoint import Share, WholeModel
from megatron_distopt.comm import Group
from megatron_distopt.hosts.megatron.naming import (
    FROM_WEIGHTS,
    ModelRanks,
    canonical,
    global_names,
    placement_of,
)
from megatron_distopt.hosts.megatron.saving import options_of_run
from megatron_distopt.hosts.megatron_core.buffers import chunks_of
from megatron_distopt.hosts.megatron_core.facts import arguments
from megatron_distopt.hosts.megatron_core.group_counts import GroupCounts
from megatron_distopt.hosts.megatron_core.state_between_phases import OffloadedState
from megatron_distopt.hosts.watches.watched_params import GroupMembers, RemainderWatch
from megatron_distopt.optimizer.main_params import MainGrads
from megatron_distopt.optimizer.sharded import ShardedOptimizer
from megatron_distopt.optimizer.step import StepDecision
from megatron_distopt.session import Session


@dataclass(frozen=True)
class PreparedStep:
    """The result of `prepare_grads` for the calls after it."""

    grads: MainGrads  # by flat param
    decision: StepDecision


class OneOptimizer(Protocol):
    """The attributes of each optimizer of a chain that steps and checkpoints use; optimizer.py
    implements it."""

    config: Any  # the host's OptimizerConfig
    ddp_config: Any  # and its DistributedDataParallelConfig
    model_chunks: list[Any]
    buffers: list[Any]  # of the host
    data_parallel_group: Any
    data_parallel_group_idx: int
    distributed_optimizer_instance_id: int
    grad_scaler: Any
    param_groups: list[dict[str, Any]]
    named: dict[str, Parameter]  # the params that it updates
    sharded: ShardedOptimizer
    offloaded: OffloadedState  # moves its state off the device
    counts: GroupCounts | None  # if the host's own inner optimizer counts in its param groups
    members: GroupMembers  # the params in the groups of its inner optimizer
    written: RemainderWatch  # watches writes to its params
    session: Session | None  # None until ranks were compared
    prepared: PreparedStep | None  # between `prepare_grads` and the update

    def join(self, of_all: Session) -> None: ...
    def is_duplicate(self, name: str) -> bool: ...
    @property
    def stats_group(self) -> Group: ...


def whole_model_of(optimizers: Sequence[OneOptimizer]) -> WholeModel:
    """The whole model of which these optimizers, such as one for dense and one for expert params,
    update this rank's part."""
    optimizers[0].sharded.check_has_params("save or load")
    ranks = ranks_of(optimizers[0].model_chunks)
    names = global_names(chunks_of(optimizers), ranks)
    frozen = frozenset(name for param, name in names.items() if not param.requires_grad)
    about: dict[str, str | int] = {
        "host": "megatron-core",
        "ranks": Group.of().size,
        "data_parallel": parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        "tensor_parallel": ranks.tensor[1],
        "pipeline_parallel": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert_parallel": ranks.expert[1],
    }
    shares = [_share_of(optimizer, names, ranks) for optimizer in optimizers]
    return WholeModel(shares, canonical, frozen, about, FROM_WEIGHTS, options_of_run(arguments()))


def _share_of(optimizer: OneOptimizer, names: Mapping[Parameter, str], ranks: ModelRanks) -> Share:
    placements = {
        name: placement_of(names[param], param, ranks, is_expert=is_expert(names[param], param))
        for name, param in optimizer.named.items()
    }

    def writes(name: str) -> bool:
        """Whether this rank writes a param: the one that counts it in the norm does. Experts are an
        exception, because the host excludes their biases by the tensor-parallel group of the dense
        params, over which experts may be spread."""
        param = optimizer.named[name]
        if optimizer.distributed_optimizer_instance_id > 0:  # copies of the same shards
            return False
        if getattr(param, "allreduce", True):
            # Experts that all ranks hold, and that are cut less than the dense params or not at
            # all: several tensor-parallel ranks have the same ones.
            is_copy = is_expert(name, param) and ranks.tensor[0] >= ranks.expert_tensor[1]
            return not is_copy and not optimizer.is_duplicate(name)
        return ranks.expert_tensor[0] == 0 or bool(getattr(param, "tensor_model_parallel", False))

    return Share(optimizer.sharded, placements, writes)


def is_expert(name: str, param: Parameter) -> bool:
    """Whether a param is an expert's.

    The host marks experts only if they are spread over ranks. Otherwise their name tells, because
    they have a tensor-parallel group of their own in any case.
    """
    return not getattr(param, "allreduce", True) or "experts" in name.split(".")


def expert_tensor_group() -> Any:
    """The tensor-parallel group of experts; None if the host has no such group."""
    find = getattr(parallel_state, "get_expert_tensor_parallel_group", None)
    return None if find is None else find(check_initialized=False)


def tensor_group_of(name: str, param: Parameter, chunks: Sequence[Any]) -> Any:
    """The process group of the ranks over which a param is cut, or would be."""
    own = getattr(chunks[0], "tp_group", None) or parallel_state.get_tensor_model_parallel_group()
    return (expert_tensor_group() or own) if is_expert(name, param) else own


def ranks_of(chunks: Sequence[Any]) -> ModelRanks:
    tensor = parallel_state.get_tensor_model_parallel_group()
    expert_tensor = expert_tensor_group() or tensor
    expert = parallel_state.get_expert_model_parallel_group()
    return ModelRanks(
        tensor=(tensor.rank(), tensor.size()),
        expert_tensor=(expert_tensor.rank(), expert_tensor.size()),
        expert=(expert.rank(), expert.size()),
        is_gated=bool(getattr(chunks[0].config, "gated_linear_unit", False)),
        embedding="embedding.word_embeddings.weight",
    )
