"""Muon in a fork of 2023: of what its fused weights consist, and who has parts of them.

Source of the fused layouts: `ParallelAttention` and `ParallelMLP` of Megatron-LM 23.04 to 23.08 and Megatron-DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core import mpu
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_distopt.comm import Group
from megatron_distopt.compatibility import Feature, check_compatible
from megatron_distopt.config import DistOptConfig
from megatron_distopt.hosts.inner import groups_of
from megatron_distopt.hosts.megatron_2023.base_optimizer import Inner, choose_for
from megatron_distopt.hosts.megatron_2023.forks import has_gates
from megatron_distopt.hosts.megatron_2023.grad_buffers import BufferPlan
from megatron_distopt.hosts.muon import (
    FusedWeights,
    MuonRequest,
    check_is_adam,
    config_for_adam,
    is_matrix_of_layer,
    matrices_of,
    muon_and_adam,
    muon_params,
    with_muon_groups,
)
from megatron_distopt.hosts.naming import ModelRanks, placement_of
from megatron_distopt.optimizer.owners.sharded_muon import Matrices


def choose_muon_for(
    base: Optimizer,
    config: DistOptConfig,
    args: object,
    named: Mapping[str, Parameter],
    buffers: Sequence[BufferPlan],
    device_type: str,
) -> Inner:
    """Muon for matrices of layers, with an Adam beside it.

    Args:
        base: the fork's base optimizer.
        config: merged.
        args: of the fork.
        named: params that are updated, by name.
        buffers: of those params.
        device_type: of the params.

    Raises:
        ConfigError: the fork's own optimizer is no Adam, options that Muon does not serve, or a fused weight of another
            shape than the fork's flags say.
        LayoutError: a param that the fork marked has not two dimensions.
    """
    check_is_adam(base)
    check_compatible(config, {Feature.WHOLE_PARAMS: "Muon"})
    name_of = {param: name for name, param in named.items()}
    request, fused = MuonRequest.of(config), _fused_weights(args)
    groups = with_muon_groups(
        groups_of(base), lambda param: is_matrix_of_layer(name_of.get(param, ""), param), request.options
    )
    members, specs = muon_params(groups), {}
    tensor = (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size())
    ranks = ModelRanks(tensor, tensor, is_gated=has_gates(args))
    for plan in buffers:
        for name, param in plan.params.items():
            if param in members:
                place = placement_of(name, param, ranks, is_expert=False)
                specs[name] = matrices_of(name, param, place, request, fused)
    group_of = {name: plan.group for plan in buffers for name in plan.params}
    matrices = Matrices(specs, group_of.__getitem__, lambda name: Group.of(mpu.get_tensor_model_parallel_group()))
    rest = choose_for(base, config_for_adam(config), args, device_type)
    return Inner(muon_and_adam(rest.choice, matrices, config, request), groups, groups)


def _fused_weights(args: Any) -> FusedWeights:
    width = getattr(args, "kv_channels", None) or args.hidden_size // args.num_attention_heads  # of a head
    num_kv_heads = args.num_attention_heads
    if getattr(args, "group_query_attention", True):
        # The flag has another name in each fork.
        given = (getattr(args, name, None) for name in ("num_key_value_heads", "num_query_groups"))
        num_kv_heads = int(next((each for each in given if each), num_kv_heads))
    return FusedWeights(
        qkv="query_key_value.weight",
        qkv_rows=(args.num_attention_heads // num_kv_heads * width, width, width),
        kv="key_value.weight",
        kv_rows=(width, width),
        gated="dense_h_to_4h.weight",
        is_gated=has_gates(args),
    )
