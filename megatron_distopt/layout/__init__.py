"""The plan: which element lies where and who owns it. Pure, standard library only, cannot be built wrong."""

from megatron_distopt.layout.boxes import Box, boxes
from megatron_distopt.layout.buckets import Bucket, BufferLayout, adopt, default_bucket_size, lay_out
from megatron_distopt.layout.flat_params import FlatParamPlan, plan_flat_params
from megatron_distopt.layout.params import ParamSlot, ParamSpec
from megatron_distopt.layout.placement import Piece, Placement
from megatron_distopt.layout.shards import ParamShard, owned_shards
from megatron_distopt.layout.span import Span

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
