"""What megatron-core 0.9 to 0.19 looks like, and which fields of its two configs are supported.
Imports nothing of the host.

tests/hosts/test_megatron_core_options.py fails if the installed megatron-core has a field that is
in no list.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron_distopt.hosts.megatron.refused import Refused
from megatron_distopt.patch_points import PatchPoint

#: The name of the class that the factory builds, and the arguments that it gives to it, by name or
#: in this order.
CLASS = "DistributedOptimizer"
CLASS_PARAMETERS = (
    "optimizer",
    "config",
    "grad_scaler",
    "init_state_fn",
    "model_chunks",
    "per_model_buffers",
    "data_parallel_group",
    "data_parallel_group_gloo",
    "data_parallel_group_idx",
)
#: A last argument that megatron-core 0.9 does not give: it has only one instance.
CLASS_MAY_TAKE = ("distributed_optimizer_instance_id",)

#: The factory that every training loop calls; it is imported by value almost everywhere.
PATCH_POINT = PatchPoint(
    "megatron.core.optimizer", "get_megatron_optimizer", ("config", "model_chunks")
)


#: The values of OptimizerConfig.optimizer for which the host builds a distributed optimizer.
FIRST_ORDER = ("adam", "sgd")

#: The host's option instead of `use_distributed_optimizer` for optimizers of whole matrices.
LAYER_WISE = "use_layer_wise_distributed_optimizer"

#: The class that every factory builds, see [Note: the constructor is the patch point] in get_in.py.
CLASS_POINT = f"megatron.core.optimizer.distrib_optimizer.{CLASS}"

#: Methods of the host's classes that only the host's own step calls; ours does not replace them.
NOT_CALLED = frozenset(
    (
        "_copy_main_params_to_model_params",
        "_copy_main_params_to_param_buffer",
        "_copy_model_grads_to_main_grads",
        "_copy_model_params_to_main_params",
        "_filter_grads_for_norm",
        "get_grads_for_grad_norm",
        "get_main_grads_for_grad_norm",
    )
)

#: Methods of the host that Ascend's MindSpeed (for megatron-core 0.12.1 to 0.16, July 2026) always
#: replaces, with the module of the replacement. Our methods do the same as the replacements, so
#: these are allowed and not called.
ADOPTED = frozenset(
    (
        # finds the saved param group of each group by its multipliers and not by its number
        ("load_state_dict", "mindspeed.core.megatron_basic.megatron_basic"),
        # for one optimizer and for a chain: reads the file on the CPU, whatever device wrote it
        ("load_parameter_state", "mindspeed.core.optimizer.distrib_optimizer"),
        ("load_parameter_state", "mindspeed.core.optimizer.optimizer"),
        # turns an update count that is a tensor into a number
        ("state_dict", "mindspeed.core.optimizer.distrib_optimizer"),
        # in the step of a chain, gathers params of experts and of other layers once each
        ("step_with_ready_grads", "mindspeed.core.optimizer.fix_duplicate_allgather"),
        # counts zeros only if the config asks for it, and not in every step of a chain
        ("step", "mindspeed.core.megatron_basic.count_zero_fix"),
    )
)

#: The keys by which the host identifies param groups; their order may depend on the layout.
GROUP_IDENTIFIERS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")

#: The function that reads a checkpoint, see [Note: checkpoints of the host's own] in checkpoint.py.
LOAD_POINT = PatchPoint(
    "megatron.core.dist_checkpointing.serialization", "load", ("sharded_state_dict",)
)

#: Functions of Megatron-LM's training script that protecting.py and averaging.py in hosts/megatron/
#: replace.
SCRIPT_LOAD_POINT = PatchPoint(
    "megatron.training.checkpointing",
    "load_checkpoint",
    ("ddp_model|model", "optimizer", "opt_param_scheduler"),
)
SCRIPT_STEP_POINT = PatchPoint(
    "megatron.training.training",
    "train_step",
    ("forward_step_func", "data_iterator", "model", "optimizer", "opt_param_scheduler"),
)
EVALUATE_POINT = PatchPoint(
    "megatron.training.training", "evaluate", ("forward_step_func", "data_iterator", "model")
)
#: The script of a protected run.
SCRIPT = SCRIPT_LOAD_POINT, SCRIPT_STEP_POINT


_WITHOUT = "or --use-distributed-optimizer"
#: Options of the host's configs and attributes of its params that are refused.
REFUSED = (
    Refused("optimizer_cuda_graph", "Drop --optimizer-cuda-graph"),
    Refused("use_megatron_fsdp", f"Drop --use-megatron-fsdp, {_WITHOUT}"),
    Refused("use_custom_fsdp", f"Drop --use-custom-fsdp, {_WITHOUT}"),
    Refused("reuse_grad_buf_for_mxfp8_param_ag", "Drop --reuse-grad-buf-for-mxfp8-param-ag"),
    Refused("fp8_param_gather", "Drop --fp8-param-gather"),
    Refused("fp4_param_gather", "Drop --fp4-param-gather"),
    # in 0.9: experts are also cut over other groups
    Refused("moe_extended_tp", "Drop --moe-extended-tp"),
    # a copy of a param, which the gradient norm would count more than once
    Refused(
        "is_gtp_weight_remat",
        "Leave generalized tensor parallelism out, or use the host's own optimizer",
    ),
    # the param is to be clipped by the norm of a group of its own
    Refused("grad_norm_group", "Leave mtp_detach_heads out, or use the host's own optimizer"),
)

#: Options of ours that the host decides, and how.
HOSTS_OWN = {
    "overlap_grad_reduce": "--overlap-grad-reduce",
    "overlap_param_gather": "--overlap-param-gather",
    "bucket_size": "--ddp-bucket-size",
    "reduce_dtype": "--grad-reduce-in-bf16",
    "shared_memory": "its own collectives",
}

#: Known fields of OptimizerConfig. The step, the host's param groups or its grad scaler follow
#: them, or they have no effect unless a refused field or another optimizer is set. The latter
#: include a kernel of the host's own Muon and a folder for its log.
_CONFIG = """
    adam_beta1 adam_beta2 adam_eps apply_wd_to_qk_layernorm barrier_with_L1_time bf16 clip_grad
    config_logger_dir decoupled_lr decoupled_min_lr decoupled_weight_decay exp_avg_dtype
    exp_avg_sq_dtype fp16 fp8_recipe grad_norm_skip_threshold hysteresis initial_loss_scale
    log_num_zeros_in_grad loss_scale loss_scale_window lr main_grads_dtype main_params_dtype
    min_loss_scale min_lr muon_coefficient_type muon_extra_scale_factor muon_fp32_matmul_prec
    muon_momentum muon_nesterov muon_num_ns_steps muon_scalar_optimizer muon_scale_mode
    muon_split_qkv muon_tp_mode muon_use_nesterov muon_use_syrk optimizer optimizer_cpu_offload
    optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d overlap_grad_reduce
    overlap_param_gather overlap_param_gather_with_optimizer_step params_dtype pin_cpu_grads
    pin_cpu_params sgd_momentum store_param_remainders timers use_distributed_optimizer
    use_layer_wise_distributed_optimizer use_precision_aware_optimizer
    use_precision_aware_optimizer_no_fp8_or_ds_fp8 use_torch_optimizer_for_cpu_offload weight_decay
"""
_OTHER_OPTIMIZERS = ("adaptive_muon_", "lion_", "soap_")
#: Known fields of DistributedDataParallelConfig. The host's own buffers and collectives follow
#: them, or they have no effect unless FSDP or fp8 params are set, which are refused.
_DDP_CONFIG = """
    align_param_gather average_in_collective bucket_size check_for_large_grads check_for_nan_in_grad
    data_parallel_sharding_strategy delay_wgrad_compute disable_symmetric_registration
    grad_reduce_in_fp32 gradient_reduce_div_fusion keep_fp8_transpose_cache
    keep_fp8_transpose_cache_when_using_custom_fsdp nccl_ub num_buckets
    num_distributed_optimizer_instances outer_dp_sharding_strategy overlap_grad_reduce
    overlap_param_gather pad_buckets_for_high_nccl_busbw
    param_name_patterns_for_fp32_local_accumulation preserve_fp32_weights
    reduce_scatter_with_fp32_accumulation suggested_communication_unit_size
    use_distributed_optimizer
"""
_OF_FSDP = ("fsdp_", "megatron_fsdp_")


def is_judged(where: str, field: str) -> bool:
    """Whether a field of a config is known. Unknown fields must have their default."""
    if any(row.option == field for row in REFUSED):
        return True
    if where == "config":
        return field in _CONFIG.split() or field.startswith(_OTHER_OPTIMIZERS)
    return field in _DDP_CONFIG.split() or field.startswith(_OF_FSDP)


def arguments() -> Any:
    """The arguments of Megatron-LM's training script; None if another script trains."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
