"""Muon in a fork of 2023: which params are matrices of their own, of what they consist, and who has parts of them.

Muon updates the two-dimensional params of numbered layers; embeddings, output layers and all else stay with Adam. A
param group of the fork with a key `use_muon` says so itself.

Source of the fused layouts: `ParallelAttention` and `ParallelMLP` of Megatron-LM 23.04 to 23.08 and Megatron-DeepSpeed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core import mpu
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_distopt.comm import Group
from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.hosts.inner import groups_of, is_adam
from megatron_distopt.hosts.megatron_2023.buffers import BufferPlan
from megatron_distopt.hosts.megatron_2023.config import choose_for
from megatron_distopt.hosts.megatron_2023.facts import has_gates
from megatron_distopt.hosts.naming import ModelRanks, placement_of
from megatron_distopt.layout import MatrixCut, MatrixSpec
from megatron_distopt.optimizer import (
    InnerChoice,
    Matrices,
    MuonOptions,
    choose_muon,
    is_muons_group,
    shape_of_matrix,
)
from megatron_distopt.options import as_flag

__all__ = ["MUON", "muon_choice", "with_muon_groups"]

#: What the option `optimizer` calls it.
MUON = "muon"

_IN_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
#: A key of a param group in which a fork says it itself.
_MARK = "use_muon"
_QKV, _KV, _GATED = "query_key_value.weight", "key_value.weight", "dense_h_to_4h.weight"
#: Names of the flags in the arguments of a fork.
_KV_HEADS = ("num_key_value_heads", "num_query_groups")
_OPTIONS = {"momentum": "muon_momentum", "nesterov": "muon_nesterov", "ns_steps": "muon_ns_steps"}
#: Of Adam, and not of Muon.
_NOT_MUONS = ("betas", "eps")


def with_muon_groups(base: Optimizer, named: Mapping[str, Parameter], config: DistOptConfig) -> list[dict[str, Any]]:
    """The fork's param groups, each cut into one for Muon and one for Adam where it has params of both kinds.

    Args:
        base: the fork's base optimizer.
        named: params that are updated, by name.
        config: merged.
    """
    name_of = {param: name for name, param in named.items()}
    options = MuonOptions(**{ours: getattr(config, name) for ours, name in _OPTIONS.items()})
    ours = dataclasses.replace(options, adjust_lr_fn=config.muon_adjust_lr)
    found: list[dict[str, Any]] = []
    for group in groups_of(base):
        kept = {key: value for key, value in group.items() if key != "params"}
        for_muon = [param for param in group["params"] if _is_for_muon(group, name_of.get(param, ""), param)]
        rest = [param for param in group["params"] if not any(param is each for each in for_muon)]
        if rest or not for_muon:
            found.append({"params": rest, **kept})
        if for_muon:
            kept = {key: value for key, value in kept.items() if key not in _NOT_MUONS}
            found.append({"params": for_muon, **vars(ours), **kept})
    return found


def _is_for_muon(group: Mapping[str, Any], name: str, param: Parameter) -> bool:
    return bool(group.get(_MARK, _IN_LAYER.search(name) is not None and param.dim() == 2))


def muon_choice(
    base: Optimizer,
    config: DistOptConfig,
    groups: Sequence[Mapping[str, Any]],
    buffers: Sequence[BufferPlan],
    args: object,
    device_type: str,
) -> InnerChoice:
    """Muon for the groups of `with_muon_groups` that are its own, with an Adam beside it.

    Args:
        base: the fork's base optimizer.
        config: merged.
        groups: with model params.
        buffers: of those params.
        args: of the fork.
        device_type: of the params.

    Raises:
        ConfigError: the fork's own optimizer is no Adam, options that Muon does not serve, or a fused weight of another
            shape than the fork's flags say.
        LayoutError: a param that the fork marked has not two dimensions.
    """
    if not is_adam(base):
        remedy = "Write --optimizer adam, whose place is taken, or drop --distopt-optimizer muon"
        raise ConfigError(refusal("optimizer", f"muon beside the fork's {type(base).__name__}", "have an Adam", remedy))
    if config.checkpoint_format != "distopt":
        got, rule = f"{config.checkpoint_format} with Muon", "be distopt, because a fork's file has Adam's moments"
        raise ConfigError(refusal("checkpoint_format", got, rule, "Drop --distopt-checkpoint-format"))
    members = {param for group in groups if is_muons_group(group) for param in group["params"]}
    of_muon = {name: param for plan in buffers for name, param in plan.params.items() if param in members}
    specs = {name: spec_of_matrix(name, param, config, args) for name, param in of_muon.items()}
    group_of = {name: plan.group for plan in buffers for name in plan.params}
    matrices = Matrices(specs, group_of.__getitem__, lambda name: Group.of(mpu.get_tensor_model_parallel_group()))
    rest = choose_for(base, dataclasses.replace(config, optimizer="adam"), args, device_type)
    return choose_muon(rest.choice, matrices, config, (f"{len(specs)} matrices of this rank are Muon's",))


def spec_of_matrix(name: str, param: Parameter, config: DistOptConfig, args: object) -> MatrixSpec:
    """The matrices of a param of Muon's on this rank, and how tensor-parallel ranks share them.

    Raises:
        ConfigError: a fused weight of another shape than the fork's flags say.
        LayoutError: it has not two dimensions.
    """
    spec = shape_of_matrix(name, param)
    sizes = _sizes_of_parts(name, spec.rows, config, args)
    if sizes and spec.rows % sum(sizes):
        got, rule = f"{spec.rows} rows", f"be a multiple of {sum(sizes)}, which its parts {sizes} have together"
        remedy = f"Write {as_flag('muon_split', 'none')}"
        raise ConfigError(refusal(f"fused weight {name!r}", got, rule, remedy))
    cut = _cut_of(name, param, config, args, is_split=bool(sizes))
    return MatrixSpec(spec.rows, spec.cols, 0, sizes, spec.rows // sum(sizes) if sizes else 1, cut)


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


def _cut_of(name: str, param: Parameter, config: DistOptConfig, args: object, *, is_split: bool) -> MatrixCut | None:
    """Of a weight that is split every part is cut by itself, in one piece."""
    tensor = (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size())
    place = placement_of(name, param, ModelRanks(tensor, tensor, is_gated=has_gates(args)), is_expert=False)
    if place.dim is None or place.size == 1 or config.muon_tp_mode == "blockwise":
        return None
    return MatrixCut(place.dim, place.size, 1 if is_split else place.stride, config.muon_tp_mode == "duplicated")
