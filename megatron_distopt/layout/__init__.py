"""Which element lies where and which rank owns it: frozen values that check themselves. Standard library only."""

from megatron_distopt.layout.buckets import (
    Bucket,
    BufferLayout,
    ParamSlot,
    ParamSpec,
    adopt,
    default_bucket_size,
    lay_out,
)
from megatron_distopt.layout.placement import Piece, Placement
from megatron_distopt.layout.shards import FlatParamPlan, ParamShard, owned_shards, plan_flat_params
from megatron_distopt.layout.spans import Box, Span, boxes

__all__ = [
    "Box",
    "Bucket",
    "BufferLayout",
    "FlatParamPlan",
    "ParamShard",
    "ParamSlot",
    "ParamSpec",
    "Piece",
    "Placement",
    "Span",
    "adopt",
    "boxes",
    "default_bucket_size",
    "lay_out",
    "owned_shards",
    "plan_flat_params",
]
