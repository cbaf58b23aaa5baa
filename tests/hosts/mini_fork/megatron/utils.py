"""Printing, and taking wrappers off a model."""

import torch


def is_rank_0():
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def print_rank_0(message):
    if is_rank_0():
        print(message, flush=True)  # noqa: T201


def print_rank_last(message):
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        print(message, flush=True)  # noqa: T201


def unwrap_model(model, module_instances=None):
    """The innermost module of each chunk; by default through torch's DDP, this fork's DDP and
    Float16Module."""
    if module_instances is None:
        from megatron.model import DistributedDataParallel, Float16Module

        module_instances = (
            torch.nn.parallel.DistributedDataParallel,
            DistributedDataParallel,
            Float16Module,
        )
    chunks = model if isinstance(model, list) else [model]
    unwrapped = []
    for chunk in chunks:
        while isinstance(chunk, module_instances):
            chunk = chunk.module  # noqa: PLW2901
        unwrapped.append(chunk)
    return unwrapped if isinstance(model, list) else unwrapped[0]
