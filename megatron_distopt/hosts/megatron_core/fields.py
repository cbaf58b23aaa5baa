"""The fields of megatron-core's two configs, 0.9 to 0.20, each judged. Data only; imports nothing of the host.

tests/hosts/test_megatron_core_options.py fails where the installed megatron-core has a field that is in no list.
"""

from __future__ import annotations

from megatron_distopt.hosts.megatron_core.facts import REFUSED

#: Fields of OptimizerConfig that were judged: what the step, the host's param groups or its grad scaler obey.
SERVED_BY_CONFIG = (
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "apply_wd_to_qk_layernorm",
    "barrier_with_L1_time",
    "bf16",
    "clip_grad",
    "decoupled_lr",
    "decoupled_min_lr",
    "decoupled_weight_decay",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "fp16",
    "grad_norm_skip_threshold",
    "hysteresis",
    "initial_loss_scale",
    "log_num_zeros_in_grad",
    "loss_scale",
    "loss_scale_window",
    "lr",
    "main_grads_dtype",
    "main_params_dtype",
    "min_loss_scale",
    "min_lr",
    "muon_coefficient_type",
    "muon_extra_scale_factor",
    "muon_fp32_matmul_prec",
    "muon_momentum",
    "muon_nesterov",
    "muon_num_ns_steps",
    "muon_scalar_optimizer",
    "muon_scale_mode",
    "muon_split_qkv",
    "muon_tp_mode",
    "muon_use_nesterov",
    "optimizer",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "overlap_param_gather_with_optimizer_step",
    "params_dtype",
    "pin_cpu_grads",
    "pin_cpu_params",
    "sgd_momentum",
    "store_param_remainders",
    "timers",
    "use_distributed_optimizer",
    "use_layer_wise_distributed_optimizer",
    "use_precision_aware_optimizer",
    "use_precision_aware_optimizer_no_fp8_or_ds_fp8",
    "use_torch_optimizer_for_cpu_offload",
    "weight_decay",
)
#: Those that change nothing unless a refused field or another optimizer is set, a kernel of the host's own Muon, and a
#: folder for its log.
IDLE_IN_CONFIG = (
    "adaptive_muon_beta2",
    "adaptive_muon_eps",
    "adaptive_muon_moment2_method",
    "config_logger_dir",
    "fp8_recipe",
    "lion_beta1",
    "lion_beta2",
    "muon_use_syrk",
    "soap_precondition_frequency",
    "soap_shampoo_beta",
    "soap_use_kl_shampoo",
)
#: Fields of DistributedDataParallelConfig that its own buffers and collectives obey, which stay as they are.
SERVED_BY_DDP = (
    "align_param_gather",
    "average_in_collective",
    "bucket_size",
    "check_for_large_grads",
    "check_for_nan_in_grad",
    "delay_wgrad_compute",
    "disable_symmetric_registration",
    "grad_reduce_in_fp32",
    "gradient_reduce_div_fusion",
    "nccl_ub",
    "num_buckets",
    "num_distributed_optimizer_instances",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "pad_buckets_for_high_nccl_busbw",
    "param_name_patterns_for_fp32_local_accumulation",
    "reduce_scatter_with_fp32_accumulation",
    "use_distributed_optimizer",
)
#: Those that change nothing unless FSDP or fp8 params are set, which are refused.
IDLE_IN_DDP = (
    "data_parallel_sharding_strategy",
    "fsdp_all_gather_in_start_param_sync",
    "fsdp_db_use_persist_buf_on_alloc_fail",
    "fsdp_double_buffer",
    "fsdp_manual_registration",
    "keep_fp8_transpose_cache",
    "keep_fp8_transpose_cache_when_using_custom_fsdp",
    "megatron_fsdp_cuda_graph_mode",
    "megatron_fsdp_enable_fine_grained_param_gather",
    "megatron_fsdp_grad_comm_dtype",
    "megatron_fsdp_main_grads_dtype",
    "megatron_fsdp_main_params_dtype",
    "megatron_fsdp_max_pool_double_buffer",
    "megatron_fsdp_use_decoupled_grad",
    "megatron_fsdp_version",
    "outer_dp_sharding_strategy",
    "preserve_fp32_weights",
    "suggested_communication_unit_size",
)


def judged(where: str) -> frozenset[str]:
    """Names of the fields that are served, idle or refused; any other must have its default.

    Args:
        where: as in `Refused`.
    """
    lists = {"config": (SERVED_BY_CONFIG, IDLE_IN_CONFIG), "ddp_config": (SERVED_BY_DDP, IDLE_IN_DDP)}[where]
    refused = [each.option for each in REFUSED if each.where == where]
    return frozenset(refused).union(*lists)
