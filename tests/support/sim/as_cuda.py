"""Lets code that asks a tensor whether it is CUDA's run on the simulated device: megatron-core's own optimizers do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from tests.support.sim.machine import DEVICE
from tests.support.sim.operators import pinned_like_empty

__all__ = ["taken_for_cuda"]

#: megatron-core asks for it, although its offloading does not use TransformerEngine; one that has no remainders.
_TE_VERSION = "2.0.0"


@contextmanager
def taken_for_cuda() -> Iterator[None]:
    """In the block tensors of the device say that they are CUDA's, and TransformerEngine's version is known."""
    import megatron_on_cpu
    from megatron.core import utils
    from packaging.version import Version

    plain = megatron_on_cpu._plain_type

    def named(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = plain(tensor, *args, **kwargs)
        return f"torch.cuda.{found.rpartition('.')[2]}" if isinstance(found, str) else found

    def pinned(tensor: Tensor) -> Tensor:
        return pinned_like_empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    with (
        mock.patch.object(Tensor, "is_cuda", property(lambda tensor: tensor.device.type == DEVICE), create=True),
        mock.patch.object(Tensor, "pin_memory", pinned),
        mock.patch.object(megatron_on_cpu, "_type_or_cuda_name", named),
        mock.patch.object(utils, "_te_version", Version(_TE_VERSION), create=True),
    ):
        yield
