"""Norms and zeros of gradients over a group of ranks."""

import torch

from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.model.module import param_is_not_shared


def clip_grad_norm_fp32(parameters, grads_for_norm, max_norm, model_parallel_group=None):
    """Collective: scales the gradients in place so that their norm is at most `max_norm`; returns
    what it was."""
    grads = [param.grad.detach() for param in parameters if param.grad is not None]
    assert all(grad.dtype == torch.float for grad in grads), "gradients must be fp32"
    norms = torch.stack([grad.norm() for grad in grads_for_norm] or [torch.zeros(())])
    total = norms.norm() ** 2
    torch.distributed.all_reduce(total, group=model_parallel_group)
    total_norm = (total**0.5).item()
    clip_coeff = max_norm / (total_norm + 1.0e-6)
    if clip_coeff < 1.0:
        for grad in grads:
            grad.mul_(clip_coeff)
    return total_norm


def count_zeros_fp32(parameters, model_parallel_group):
    """Collective: the number of zeros in the gradients, a replicated param counting once."""
    zeros = torch.zeros(1)
    for param in parameters:
        if (
            param.grad is not None
            and param_is_not_shared(param)
            and param_is_not_tensor_parallel_duplicate(param)
        ):
            zeros += param.grad.numel() - torch.count_nonzero(param.grad)
    torch.distributed.all_reduce(zeros, group=model_parallel_group)
    return zeros.item()
