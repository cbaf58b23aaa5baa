"""Muon in a fork of 2023: the matrices in the weights of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core import mpu
from torch.optim import Optimizer

from megatron_distopt.comm import Group
from megatron_distopt.hosts.megatron.muon_groups import (
    FusedWeights,
    MuonRequest,
    is_matrix_of_layer,
    matrices_of,
    with_muon_groups,
)
from megatron_distopt.hosts.megatron.naming import ModelRanks, placement_of
from megatron_distopt.hosts.megatron_2023.buffers import BufferPlan
from megatron_distopt.hosts.megatron_2023.facts import has_gates
from megatron_distopt.layout import MatrixSpec
from megatron_distopt.optimizer.owners.sharded_muon import Matrices


def muon_matrices(
    base: Optimizer, request: MuonRequest, buffers: Sequence[BufferPlan], args: Any
) -> tuple[Matrices, list[dict[str, Any]]]:
    """The matrices of this rank that Muon updates, and the fork's param groups, split between Muon
    and Adam."""
    fused = _fused_weights(args)
    group_of = {name: plan.group for plan in buffers for name in plan.params}
    params = {name: param for plan in buffers for name, param in plan.params.items()}
    groups, names = with_muon_groups(base, params, is_matrix_of_layer, request.options)
    tensor = (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size())
    ranks = ModelRanks(tensor, tensor, is_gated=has_gates(args))
    specs: dict[str, MatrixSpec] = {}
    for name in names:
        placement = placement_of(name, params[name], ranks, is_expert=False)
        specs[name] = matrices_of(name, params[name], placement, request, fused)
    tensor_group = Group.of(mpu.get_tensor_model_parallel_group())
    return Matrices(specs, group_of.__getitem__, lambda name: tensor_group), groups


def _fused_weights(args: Any) -> FusedWeights:
    """The parts of a fork's fused weights.

    Source: `ParallelAttention` and `ParallelMLP` of Megatron-LM 23.04 to 23.08 and
    Megatron-DeepSpeed.
    """
    # rows of a head
    width = getattr(args, "kv_channels", None) or args.hidden_size // args.num_attention_heads
    num_kv_heads = args.num_attention_heads
    if getattr(args, "group_query_attention", True):
        # The flag has another name in each fork.
        given = (getattr(args, name, None) for name in ("num_key_value_heads", "num_query_groups"))
        num_kv_heads = int(next((number for number in given if number), num_kv_heads))
    return FusedWeights(
        qkv="query_key_value.weight",
        qkv_rows=(args.num_attention_heads // num_kv_heads * width, width, width),
        kv="key_value.weight",
        kv_rows=(width, width),
        gated="dense_h_to_4h.weight",
        is_gated=has_gates(args),
    )
