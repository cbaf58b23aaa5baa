"""Where these optimizers believe to be: on CUDA, or with MINI_FORK_NATIVE=1 on a CPU."""

import torch

from ..switches import FILE_LAYOUT, NATIVE

_WHERE = "torch" if NATIVE else "torch.cuda"
FLOAT = f"{_WHERE}.FloatTensor"
HALVES = (f"{_WHERE}.HalfTensor", f"{_WHERE}.BFloat16Tensor")


def current_device():
    return "cpu" if NATIVE else torch.cuda.current_device()


def untyped_storage(tensor):
    """A fork with per-rank files has only the spelling that torch has since removed."""
    if NATIVE:
        return tensor.untyped_storage()
    return tensor.storage()._untyped() if FILE_LAYOUT == "per_rank" else tensor.storage().untyped()
