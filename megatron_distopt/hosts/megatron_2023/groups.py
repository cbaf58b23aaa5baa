"""Over which ranks a param is sharded.

Dense params: the data-parallel group; with Ulysses sequence parallelism the sequence-data group, because ranks that
hold other parts of a sequence hold the same params too. Expert params: the ranks that hold the same experts.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from megatron.core import mpu
from torch.nn import Parameter

from megatron_distopt.comm import Group
from megatron_distopt.errors import HostError, refusal

#: Getters of expert data-parallel groups, newest first.
_EXPERT_GROUPS = ("get_expert_data_parallel_group", "get_data_modulo_expert_parallel_group")


def dense_group() -> Group:
    """Ranks that hold the same dense params."""
    size = getattr(mpu, "get_sequence_parallel_world_size", None)
    if size is not None and size() > 1:
        return Group.of(mpu.get_sequence_data_parallel_group())
    return Group.of(mpu.get_data_parallel_group())


def is_expert(param: Parameter) -> bool:
    """Whether other ranks of the dense group hold other experts: what DeepSpeed's and Megatron's layers mark so."""
    return not getattr(param, "allreduce", True)


def expert_group(name: str, param: Parameter) -> Group:
    """Ranks that hold the same expert as `param`.

    Raises:
        HostError: nobody says which ranks those are.
    """
    group_name = getattr(param, "group_name", None)
    if group_name is not None and group_name in _groups_of_deepspeed():
        return Group.of(_groups_of_deepspeed()[group_name])
    for getter in _EXPERT_GROUPS:
        if hasattr(mpu, getter):
            return Group.of(getattr(mpu, getter)())
    rule = f"belong to a group of DeepSpeed's, or to one that mpu.{_EXPERT_GROUPS[0]}() gives"
    remedy = "Use the MoE layer of deepspeed.moe, or give mpu that function"
    raise HostError(refusal(f"expert param {name!r}", f"group_name {group_name!r}", rule, remedy))


def expert_place(param: Parameter) -> tuple[int, int]:
    """(rank, size) of this rank among those that hold different experts."""
    group_name = getattr(param, "group_name", None)
    if group_name is not None and group_name in _groups_of_deepspeed():
        groups = import_module("deepspeed.utils.groups")
        return groups._get_expert_parallel_rank(group_name), groups._get_expert_parallel_world_size(group_name)
    if hasattr(mpu, "get_expert_model_parallel_rank"):
        return mpu.get_expert_model_parallel_rank(), mpu.get_expert_model_parallel_world_size()
    return 0, 1


def _groups_of_deepspeed() -> dict[str, Any]:
    """By the name that its MoE layers write on their params; DeepSpeed is loaded where such a layer exists."""
    if "deepspeed" not in sys.modules:
        return {}
    groups: dict[str, Any] = import_module("deepspeed.utils.groups")._get_expert_data_parallel_group_dict()
    return groups
