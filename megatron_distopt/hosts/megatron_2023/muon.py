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
    check_is_adam,
    config_for_adam,
    cut_of,
    is_matrix_of_layer,
    matrices_of,
    muon_and_adam,
    muon_params,
    options_from,
    with_muon_groups,
)
from megatron_distopt.hosts.naming import ModelRanks, placement_of
from megatron_distopt.layout import MatrixSpec
from megatron_distopt.optimizer.owners.sharded_muon import Matrices, shape_of_matrix

_QKV, _KV, _GATED = "query_key_value.weight", "key_value.weight", "dense_h_to_4h.weight"
#: Names of the flags in the arguments of a fork.
_KV_HEADS = ("num_key_value_heads", "num_query_groups")


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
    options = options_from(config)
    groups = with_muon_groups(groups_of(base), lambda param: is_matrix_of_layer(name_of.get(param, ""), param), options)
    members = muon_params(groups)
    of_muon = {name: param for plan in buffers for name, param in plan.params.items() if param in members}
    specs = {name: _matrices_of(name, param, config, args) for name, param in of_muon.items()}
    group_of = {name: plan.group for plan in buffers for name in plan.params}
    matrices = Matrices(specs, group_of.__getitem__, lambda name: Group.of(mpu.get_tensor_model_parallel_group()))
    rest = choose_for(base, config_for_adam(config), args, device_type)
    return Inner(muon_and_adam(rest.choice, matrices, config, options), groups, groups)


def _matrices_of(name: str, param: Parameter, config: DistOptConfig, args: object) -> MatrixSpec:
    spec = shape_of_matrix(name, param)
    sizes = _sizes_of_parts(name, spec.rows, config, args)
    tensor = (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size())
    place = placement_of(name, param, ModelRanks(tensor, tensor, is_gated=has_gates(args)), is_expert=False)
    return matrices_of(name, spec, sizes, cut_of(place, config.muon_tp_mode, is_split=bool(sizes)))


def _sizes_of_parts(name: str, rows: int, config: DistOptConfig, args: Any) -> tuple[int, ...]:
    """Rows of the parts of a fused weight, of one group of heads; none where it is one matrix."""
    width = getattr(args, "kv_channels", None) or args.hidden_size // args.num_attention_heads  # of a head
    if config.muon_split != "none" and name.endswith(_QKV):
        return (args.num_attention_heads // _num_kv_heads(args) * width, width, width)
    if config.muon_split != "none" and name.endswith(_KV):
        return (width, width)
    if config.muon_split == "all" and name.endswith(_GATED) and has_gates(args):
        return (rows // 2, rows // 2)
    return ()


def _num_kv_heads(args: Any) -> int:
    if not getattr(args, "group_query_attention", True):
        return int(args.num_attention_heads)
    given = (getattr(args, name, None) for name in _KV_HEADS)
    return int(next((each for each in given if each), args.num_attention_heads))
