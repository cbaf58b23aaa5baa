"""What megatron-core 0.9 to 0.19 looks like. Data only; imports nothing of the host."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_distopt.hosts.patch_points import PatchPoint

#: What the factory calls the class that it builds, and gives to its constructor by name or in this order.
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
#: What it may give as well, last: megatron-core 0.9 has one instance and no number for it.
CLASS_MAY_TAKE = ("distributed_optimizer_instance_id",)
#: What it puts around what it built.
CHAIN = "ChainedOptimizer"

#: The factory that every training loop calls; it is imported by value almost everywhere.
PATCH_POINT = PatchPoint("megatron.core.optimizer", "get_megatron_optimizer", ("config", "model_chunks"))


#: What OptimizerConfig.optimizer has to be for a distributed optimizer of the host's.
FIRST_ORDER = ("adam", "sgd")

#: Its option in place of `use_distributed_optimizer` for optimizers of whole matrices.
LAYER_WISE = "use_layer_wise_distributed_optimizer"

#: What every factory ends in, see [Note: the constructor is the patch point] in adapter.py.
CLASS_POINT = f"megatron.core.optimizer.distrib_optimizer.{CLASS}"


@dataclass(frozen=True)
class Refused:
    """An option of the host that cannot be combined with this optimizer."""

    where: str  # "config" for OptimizerConfig, "ddp_config" for DistributedDataParallelConfig
    option: str  # its name; it is refused where it is truthy
    remedy: str  # what to write instead


REFUSED = (
    Refused("config", "optimizer_cuda_graph", "Drop --optimizer-cuda-graph"),
    Refused("config", "use_megatron_fsdp", "Drop --use-megatron-fsdp, or --use-distributed-optimizer"),
    Refused("config", "reuse_grad_buf_for_mxfp8_param_ag", "Drop --reuse-grad-buf-for-mxfp8-param-ag"),
    Refused("ddp_config", "use_megatron_fsdp", "Drop --use-megatron-fsdp, or --use-distributed-optimizer"),
    Refused("ddp_config", "use_custom_fsdp", "Drop --use-custom-fsdp, or --use-distributed-optimizer"),
    Refused("ddp_config", "reuse_grad_buf_for_mxfp8_param_ag", "Drop --reuse-grad-buf-for-mxfp8-param-ag"),
    Refused("ddp_config", "fp8_param_gather", "Drop --fp8-param-gather"),
    Refused("ddp_config", "fp4_param_gather", "Drop --fp4-param-gather"),
)

#: Options of ours that it has a flag of its own for.
HOSTS_OWN = {
    "overlap_grad_reduce": "--overlap-grad-reduce",
    "overlap_param_gather": "--overlap-param-gather",
    "bucket_size": "--ddp-bucket-size",
    "reduce_dtype": "--grad-reduce-in-bf16",
    "shared_memory": "own collectives",
    "log_communication": "timers (--timing-log-level 2)",
}
