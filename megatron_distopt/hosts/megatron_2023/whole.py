"""How this rank's params lie in the whole model, as the forks of 2023 have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron import get_args
from megatron.core import mpu

from megatron_distopt.checkpoint import Share, WholeModel
from megatron_distopt.hosts.megatron_2023.groups import expert_place, is_expert
from megatron_distopt.hosts.naming import FROM_WEIGHTS, ModelRanks, canonical, global_names, placement_of

if TYPE_CHECKING:
    from megatron_distopt.hosts.megatron_2023.optimizer import DistributedOptimizer

__all__ = ["whole_model_of"]

#: Options of a fork under which the first layer of an MLP holds a gate as well.
_GATES = ("swiglu", "glu_activation")


def whole_model_of(optimizer: DistributedOptimizer) -> WholeModel:
    """Reads it off the params' attributes, the fork's groups and its arguments."""
    named, counted = optimizer.start.named, optimizer.start.plan.counted
    tensor = (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size())
    expert = next((expert_place(param) for param in named.values() if is_expert(param)), (0, 1))
    is_gated = any(getattr(get_args(), option, None) for option in _GATES)
    ranks = ModelRanks(tensor, tensor, expert, is_gated, "language_model.embedding.word_embeddings.weight")
    names = global_names(optimizer.models, ranks)
    placements = {
        name: placement_of(names[param], param, ranks, is_expert=is_expert(param)) for name, param in named.items()
    }
    frozen = frozenset(name for param, name in names.items() if not param.requires_grad)
    about = {
        "host": "a Megatron of 2023",
        "ranks": optimizer.everyone.size,
        "data_parallel": optimizer.start.data.size,
        "tensor_parallel": tensor[1],
        "pipeline_parallel": mpu.get_pipeline_model_parallel_world_size(),
        "expert_parallel": expert[1],
    }
    return WholeModel([Share(optimizer.sharded, placements, counted)], canonical, frozen, about, FROM_WEIGHTS)
