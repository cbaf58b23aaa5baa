"""How this rank's params lie in the whole model, as megatron-core has it."""

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
    """What `prepare_grads` leaves for the calls after it."""

    grads: MainGrads  # by flat param
    decision: StepDecision


class OneOptimizer(Protocol):
    """What steps and checkpoints use of each optimizer of a chain, which optimizer.py builds."""

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
    offloaded: OffloadedState  # where its state is
    counts: GroupCounts | None  # where the host's own inner optimizer counts in its param groups
    members: GroupMembers  # the params in the groups of its inner optimizer
    written: RemainderWatch  # what others did to its params
    session: Session | None  # None until ranks were compared
    prepared: PreparedStep | None  # between `prepare_grads` and the update

    def join(self, of_all: Session) -> None: ...
    def is_duplicate(self, name: str) -> bool: ...
    @property
    def stats_group(self) -> Group: ...


def whole_model_of(optimizers: Sequence[OneOptimizer]) -> WholeModel:
    """The model of which these optimizers, for example of dense and of expert params, update the
    part of this rank."""
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
        """The rank that does not exclude a param from the norm writes it. Of experts the host
        excludes biases by the tensor-parallel group of all the other params, over whose ranks
        experts may be spread."""
        param = optimizer.named[name]
        if optimizer.distributed_optimizer_instance_id > 0:  # copies of the same shards
            return False
        if getattr(param, "allreduce", True):
            # Experts that are on all ranks, cut less than the rest or not at all: tensor-parallel
            # ranks have the same.
            is_copy = is_expert(name, param) and ranks.tensor[0] >= ranks.expert_tensor[1]
            return not is_copy and not optimizer.is_duplicate(name)
        return ranks.expert_tensor[0] == 0 or bool(getattr(param, "tensor_model_parallel", False))

    return Share(optimizer.sharded, placements, writes)


def is_expert(name: str, param: Parameter) -> bool:
    """Whether a param is an expert's.

    The host marks experts where they are spread over ranks; their tensor-parallel group is another
    one anyway.
    """
    return not getattr(param, "allreduce", True) or "experts" in name.split(".")


def expert_tensor_group() -> Any:
    """The tensor-parallel group of experts; None where the host has no group of their own."""
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
