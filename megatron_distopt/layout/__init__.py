"""The plan: which element lies where and who owns it. Pure, standard library only, cannot be built wrong."""

from megatron_distopt.layout.boxes import Box, boxes
from megatron_distopt.layout.buckets import Bucket, BufferLayout, adopt, default_bucket_numel, lay_out
from megatron_distopt.layout.params import ParamSlot, ParamSpec
from megatron_distopt.layout.placement import Piece, Placement
from megatron_distopt.layout.runs import Run, plan_runs
from megatron_distopt.layout.shards import ParamShard, owned_shards
from megatron_distopt.layout.span import Span

__all__ = [
    "Box",
    "Bucket",
    "BufferLayout",
    "ParamShard",
    "ParamSlot",
    "ParamSpec",
    "Piece",
    "Placement",
    "Run",
    "Span",
    "adopt",
    "boxes",
    "default_bucket_numel",
    "lay_out",
    "owned_shards",
    "plan_runs",
]
