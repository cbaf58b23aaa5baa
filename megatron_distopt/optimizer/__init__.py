"""The update: which kernel, which scale, which norm, and the sharded step that ties them together."""

from megatron_distopt.optimizer.accelerator import Accelerator, check_devices, find_accelerator
from megatron_distopt.optimizer.base import adopt_instance, choose_inner
from megatron_distopt.optimizer.decide import (
    Complaint,
    check_complaint,
    decide_together,
    finish_deferred_check,
    judge_together,
    measure_together,
)
from megatron_distopt.optimizer.grad_norm import GradStats
from megatron_distopt.optimizer.graph import CapturedStep
from megatron_distopt.optimizer.inner import (
    InnerChoice,
    count_updates,
    is_torchs,
    moments_of,
    restore,
    restore_group,
)
from megatron_distopt.optimizer.loss_scale import ConstantLossScale, DynamicLossScale, LossScale, make_loss_scale
from megatron_distopt.optimizer.main_params import FlatParam, ParamGroup
from megatron_distopt.optimizer.memory import Memory, measure_memory
from megatron_distopt.optimizer.sharded import ShardedOptimizer, StepPlan
from megatron_distopt.optimizer.sync_check import find_synchronisations, forbid_synchronisations
from megatron_distopt.optimizer.verdict import StepAction, StepDecision, StepResult, clip_divisor

__all__ = [
    "Accelerator",
    "CapturedStep",
    "Complaint",
    "ConstantLossScale",
    "DynamicLossScale",
    "FlatParam",
    "GradStats",
    "InnerChoice",
    "LossScale",
    "Memory",
    "ParamGroup",
    "ShardedOptimizer",
    "StepAction",
    "StepDecision",
    "StepPlan",
    "StepResult",
    "adopt_instance",
    "check_complaint",
    "check_devices",
    "choose_inner",
    "clip_divisor",
    "count_updates",
    "decide_together",
    "find_accelerator",
    "find_synchronisations",
    "finish_deferred_check",
    "forbid_synchronisations",
    "is_torchs",
    "judge_together",
    "make_loss_scale",
    "measure_memory",
    "measure_together",
    "moments_of",
    "restore",
    "restore_group",
]
