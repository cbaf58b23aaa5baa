"""The update: which kernel, which scale, which norm, and the sharded step that ties them together (step.py)."""

from megatron_distopt.optimizer.accelerator import Accelerator, check_devices, find_accelerator
from megatron_distopt.optimizer.choice import adopt_instance, choose_inner, fused_instance
from megatron_distopt.optimizer.coded import plain, storages_of
from megatron_distopt.optimizer.deferred import DeferredCheck, Notice
from megatron_distopt.optimizer.deterministic import check_deterministic
from megatron_distopt.optimizer.flat_muon import FlatMuon
from megatron_distopt.optimizer.given import check_new, let_go
from megatron_distopt.optimizer.grad_norm import GradStats
from megatron_distopt.optimizer.graph import CapturedStep
from megatron_distopt.optimizer.inner import (
    IMPLEMENTATION,
    InnerChoice,
    InParts,
    bring_into_form,
    count_updates,
    is_torchs,
    moment_to_fill,
    moments_of,
    part_for,
    restore,
    restore_group,
)
from megatron_distopt.optimizer.loss_scale import ConstantLossScale, DynamicLossScale, LossScale, make_loss_scale
from megatron_distopt.optimizer.main_params import FlatParam, ParamGroup
from megatron_distopt.optimizer.muon import Muon
from megatron_distopt.optimizer.muon_options import (
    MegatronMuonOptions,
    MuonOptions,
    TorchMuonOptions,
    is_muons_group,
)
from megatron_distopt.optimizer.offload import check_offload, host_nbytes
from megatron_distopt.optimizer.owned_param import OwnedParam
from megatron_distopt.optimizer.precision import Precision, check_precision
from megatron_distopt.optimizer.sharded import Memory, ShardedOptimizer, StepPlan, measure_memory
from megatron_distopt.optimizer.sharded_muon import (
    Matrices,
    adopt_muon,
    check_muon,
    choose_muon,
    is_muon,
    matrices_in,
    shape_of_matrix,
)
from megatron_distopt.optimizer.step import (
    StepAction,
    StepDecision,
    advance,
    clip_divisor,
    decide,
    finish_deferred_check,
    make_step,
    measure,
    measure_now,
    update,
    write_model,
)
from megatron_distopt.optimizer.sync_check import find_synchronisations, forbid_synchronisations
from megatron_distopt.optimizer.whole_params import TrainedParams, WholeParams, owned_params

__all__ = [
    "IMPLEMENTATION",
    "Accelerator",
    "CapturedStep",
    "ConstantLossScale",
    "DeferredCheck",
    "DynamicLossScale",
    "FlatMuon",
    "FlatParam",
    "GradStats",
    "InParts",
    "InnerChoice",
    "LossScale",
    "Matrices",
    "MegatronMuonOptions",
    "Memory",
    "Muon",
    "MuonOptions",
    "Notice",
    "OwnedParam",
    "ParamGroup",
    "Precision",
    "ShardedOptimizer",
    "StepAction",
    "StepDecision",
    "StepPlan",
    "TorchMuonOptions",
    "TrainedParams",
    "WholeParams",
    "adopt_instance",
    "adopt_muon",
    "advance",
    "bring_into_form",
    "check_deterministic",
    "check_devices",
    "check_muon",
    "check_new",
    "check_offload",
    "check_precision",
    "choose_inner",
    "choose_muon",
    "clip_divisor",
    "count_updates",
    "decide",
    "find_accelerator",
    "find_synchronisations",
    "finish_deferred_check",
    "forbid_synchronisations",
    "fused_instance",
    "host_nbytes",
    "is_muon",
    "is_muons_group",
    "is_torchs",
    "let_go",
    "make_loss_scale",
    "make_step",
    "matrices_in",
    "measure",
    "measure_memory",
    "measure_now",
    "moment_to_fill",
    "moments_of",
    "owned_params",
    "part_for",
    "plain",
    "restore",
    "restore_group",
    "shape_of_matrix",
    "storages_of",
    "update",
    "write_model",
]
