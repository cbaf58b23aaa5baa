"""What keeps the forks of 2023 from starting on today's packages, and has nothing to do with their optimizer.

Data, seen in Megatron-DeepSpeed 4efb479d with torch 2.13 and DeepSpeed 0.19. Each kind is described in hosts/fixes.py.
"""

from __future__ import annotations

from megatron_distopt.hosts.fixes import ArgumentDefault, ContiguousArguments, Fix, StandIn, Substitute

FIXES: tuple[Fix, ...] = (
    StandIn(
        "megatron.data.vit_dataset",
        ("torchvision", "torchvision.transforms", "torchvision.datasets"),
        "training.py imports the vision datasets for every model, and only vision models use them",
    ),
    StandIn(
        "megatron.data.image_folder",
        ("torchvision", "torchvision.datasets"),
        "the vision datasets import it, and only vision models use it",
    ),
    StandIn(
        "megatron.training",
        ("deepspeed.compression.compress",),
        "newer DeepSpeed has no compression, which the fork uses only with --compression-training",
    ),
    Substitute(
        "megatron.training",
        ("ezpz", "ezpz.dist"),
        "megatron_distopt.hosts.megatron_2023.ezpz",
        "argonne-lcf's fork takes rank, device and loggers from it, which is on no package index",
    ),
    ArgumentDefault(
        "megatron.training",
        "args.deepspeed",
        "deepspeed_config_dict",
        None,
        "the fork sets it only with --deepspeed and reads it for every model; DeepSpeed takes None for no config",
    ),
    ContiguousArguments(
        "megatron.model.transformer",
        "CoreAttention",
        "forward",
        ("query_layer", "key_layer", "value_layer"),
        "the fork's tensors are not contiguous for micro-batches above 1, and view refuses such tensors",
    ),
)
