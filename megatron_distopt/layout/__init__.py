"""The plan: which element lies where and who owns it. Pure, standard library only, cannot be built wrong."""

from megatron_distopt.layout.buckets import Bucket, BufferLayout, adopt, lay_out
from megatron_distopt.layout.params import ParamSlot, ParamSpec
from megatron_distopt.layout.runs import Run, plan_runs
from megatron_distopt.layout.shards import ParamShard, owned_shards
from megatron_distopt.layout.span import Span

__all__ = [
    "Bucket",
    "BufferLayout",
    "ParamShard",
    "ParamSlot",
    "ParamSpec",
    "Run",
    "Span",
    "adopt",
    "lay_out",
    "owned_shards",
    "plan_runs",
]
