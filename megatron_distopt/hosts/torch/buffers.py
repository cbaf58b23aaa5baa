"""The buffers of any model: which params share one, and their memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

import torch
from torch.nn import Parameter

from megatron_distopt.config import DistOptConfig
from megatron_distopt.hosts.start import spec_of
from megatron_distopt.layout import BufferLayout, default_bucket_size, lay_out
from megatron_distopt.layout.buckets import alignment_for
from megatron_distopt.optimizer.low_precision.low_precision_tensor import Precision


@dataclass(frozen=True)
class ParamSet:
    """Params that share a buffer."""

    named: Mapping[str, Parameter]
    layout: BufferLayout
    dtype: torch.dtype  # of the params
    grad_dtype: torch.dtype


def plan_sets(
    named: Mapping[str, Parameter], config: DistOptConfig, num_shards: int
) -> tuple[ParamSet, ...]:
    """Lays out one buffer for each dtype of the params."""
    sets = []
    for dtype in dict.fromkeys(param.dtype for param in named.values()):
        members = {name: param for name, param in named.items() if param.dtype is dtype}
        specs = [spec_of(name, param) for name, param in members.items()]
        bucket_size = config.bucket_size
        if bucket_size is None and (config.overlap_grad_reduce or config.overlap_param_gather):
            bucket_size = default_bucket_size(sum(spec.numel for spec in specs), num_shards)
        alignment = alignment_for(*astuple(Precision.of(config)))
        layout = lay_out(
            specs, num_shards=num_shards, bucket_size=bucket_size, alignment_numel=alignment
        )
        sets.append(
            ParamSet(members, layout, dtype, torch.float32 if config.grads_in_fp32 else dtype)
        )
    return tuple(sets)
