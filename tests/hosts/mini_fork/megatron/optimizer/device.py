"""Where these optimizers believe to be: on CUDA, or with MINI_FORK_NATIVE=1 on a CPU."""

import torch

from ..switches import DEVICE, FILE_LAYOUT, NATIVE

_WHERE = "torch" if DEVICE == "cpu" else f"torch.{DEVICE}"
_WHERE = _WHERE if NATIVE else "torch.cuda"
FLOAT = f"{_WHERE}.FloatTensor"
HALVES = (f"{_WHERE}.HalfTensor", f"{_WHERE}.BFloat16Tensor")


def current_device():
    return DEVICE if NATIVE else torch.cuda.current_device()


def untyped_storage(tensor):
    """A fork with per-rank files has only the spelling that torch has since removed."""
    if NATIVE:
        return tensor.untyped_storage()
    return tensor.storage()._untyped() if FILE_LAYOUT == "per_rank" else tensor.storage().untyped()
