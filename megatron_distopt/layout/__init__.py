"""Where each element lies and which rank owns it: frozen values that check themselves. Imports only
the standard library."""

from megatron_distopt.layout.buckets import (
    Bucket,
    BufferLayout,
    ParamSlot,
    ParamSpec,
    adopt,
    choose_buckets,
    default_bucket_size,
    lay_out,
)
from megatron_distopt.layout.matrices import MatrixBlock, MatrixCut, MatrixPiece, MatrixSpec
from megatron_distopt.layout.owners import MatrixOwner, OwnerPlan, Travel, plan_owners
from megatron_distopt.layout.shards import (
    FlatParamPlan,
    ParamShard,
    owned_shards,
    param_shard,
    plan_flat_params,
)
from megatron_distopt.layout.spans import Box, Piece, Placement, Span, boxes

__all__ = [
    "Box",
    "Bucket",
    "BufferLayout",
    "FlatParamPlan",
    "MatrixBlock",
    "MatrixCut",
    "MatrixOwner",
    "MatrixPiece",
    "MatrixSpec",
    "OwnerPlan",
    "ParamShard",
    "ParamSlot",
    "ParamSpec",
    "Piece",
    "Placement",
    "Span",
    "Travel",
    "adopt",
    "boxes",
    "choose_buckets",
    "default_bucket_size",
    "lay_out",
    "owned_shards",
    "param_shard",
    "plan_flat_params",
    "plan_owners",
]
