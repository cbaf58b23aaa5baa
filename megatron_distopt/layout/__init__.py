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
from megatron_distopt.layout.matrices import MatrixBlock, MatrixCut, MatrixPiece, MatrixSpec, newton_schulz_flops
from megatron_distopt.layout.on_host import choose_buckets, greatest_fraction, least_fraction, pinned_nbytes
from megatron_distopt.layout.owners import MatrixOwner, OwnerPlan, Travel, plan_owners
from megatron_distopt.layout.placement import Piece, Placement
from megatron_distopt.layout.shards import FlatParamPlan, ParamShard, owned_shards, plan_flat_params
from megatron_distopt.layout.spans import Box, Span, boxes

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
    "greatest_fraction",
    "lay_out",
    "least_fraction",
    "newton_schulz_flops",
    "owned_shards",
    "pinned_nbytes",
    "plan_flat_params",
    "plan_owners",
]
