"""How this rank's params lie in the whole model, as megatron-core has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from megatron.core import parallel_state
from torch.nn import Parameter

from megatron_distopt.checkpoint import Share, WholeModel
from megatron_distopt.comm import Group
from megatron_distopt.hosts.megatron_core.capabilities import expert_tensor_group
from megatron_distopt.hosts.megatron_core.state_between_phases import OffloadedState
from megatron_distopt.hosts.naming import FROM_WEIGHTS, ModelRanks, canonical, global_names, placement_of
from megatron_distopt.hosts.written import RemainderWatch
from megatron_distopt.optimizer.sharded import ShardedOptimizer


class HoldsState(Protocol):
    """What checkpoints read of an optimizer: the host's attributes, and some of ours.

    Args:
        sharded: the sharded step.
        offloaded: where its state is.
        written: what others did to the params.
        named: this rank's params by their names in the optimizer.
    """

    sharded: ShardedOptimizer
    offloaded: OffloadedState
    written: RemainderWatch
    named: dict[str, Parameter]
    model_chunks: list[Any]
    param_groups: list[dict[str, Any]]
    grad_scaler: Any
    distributed_optimizer_instance_id: int

    def is_duplicate(self, name: str) -> bool:
        """Whether another rank counts the param of that name, and writes it."""

    @property
    def stats_group(self) -> Group:
        """All ranks that hold a part of the model."""


def whole_model_of(optimizers: Sequence[HoldsState]) -> WholeModel:
    """Reads it off the params' attributes and the host's groups.

    Args:
        optimizers: of one model on this rank, for example one for dense and one for expert params.
    """
    ranks = ranks_of(optimizers[0].model_chunks)
    chunks = list(dict.fromkeys(chunk for optimizer in optimizers for chunk in optimizer.model_chunks))
    names = global_names(chunks, ranks)
    frozen = frozenset(name for param, name in names.items() if not param.requires_grad)
    return WholeModel(
        [_share_of(each, names, ranks) for each in optimizers], canonical, frozen, _about(ranks), FROM_WEIGHTS
    )


def _share_of(optimizer: HoldsState, names: Mapping[Parameter, str], ranks: ModelRanks) -> Share:
    placements = {
        name: placement_of(names[param], param, ranks, is_expert=is_expert(names[param], param))
        for name, param in optimizer.named.items()
    }
    # Further instances of the optimizer hold copies of the same shards.
    is_first = optimizer.distributed_optimizer_instance_id == 0
    return Share(optimizer.sharded, placements, lambda name: is_first and _is_writer(optimizer, name, ranks))


def is_expert(name: str, param: Parameter) -> bool:
    """Whether a param is an expert's.

    The host marks experts where they are spread over ranks; their tensor-parallel group is another one anyway.
    """
    return not getattr(param, "allreduce", True) or "experts" in name.split(".")


def _is_writer(optimizer: HoldsState, name: str, ranks: ModelRanks) -> bool:
    """The rank that does not exclude a param from the norm writes it. Of experts the host excludes biases by the
    tensor-parallel group of all the other params, over whose ranks experts may be spread."""
    param = optimizer.named[name]
    if getattr(param, "allreduce", True):
        # Experts that are on all ranks, cut less than the rest or not at all: tensor-parallel ranks have the same.
        is_copy = is_expert(name, param) and ranks.tensor[0] >= ranks.expert_tensor[1]
        return not is_copy and not optimizer.is_duplicate(name)
    return ranks.expert_tensor[0] == 0 or bool(getattr(param, "tensor_model_parallel", False))


def tensor_group_of(name: str, param: Parameter, chunks: Sequence[Any]) -> Any:
    """The process group of the ranks over which a param is cut, or would be."""
    own = getattr(chunks[0], "tp_group", None) or parallel_state.get_tensor_model_parallel_group()
    return (expert_tensor_group() or own) if is_expert(name, param) else own


def ranks_of(chunks: Sequence[Any]) -> ModelRanks:
    """Where this rank is in the groups over which the model is cut."""
    return ModelRanks(
        tensor=_place(parallel_state.get_tensor_model_parallel_group()),
        expert_tensor=_place(expert_tensor_group() or parallel_state.get_tensor_model_parallel_group()),
        expert=_place(parallel_state.get_expert_model_parallel_group()),
        is_gated=bool(getattr(chunks[0].config, "gated_linear_unit", False)),
        embedding="embedding.word_embeddings.weight",
    )


def _place(group: Any) -> tuple[int, int]:
    return group.rank(), group.size()


def _about(ranks: ModelRanks) -> dict[str, str | int]:
    return {
        "host": "megatron-core",
        "ranks": Group.of().size,
        "data_parallel": parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        "tensor_parallel": ranks.tensor[1],
        "pipeline_parallel": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert_parallel": ranks.expert[1],
    }
