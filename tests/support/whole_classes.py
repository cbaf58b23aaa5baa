"""Optimizers of whole params with the constructor of a Megatron's Adam, in whose place they are
put."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tests.support.published import pytorch_optimizer


@contextlib.contextmanager
def in_place_of_cores_adam(optimizer: type[torch.optim.Optimizer]) -> Iterator[None]:
    """In the block megatron-core builds another optimizer where it builds its Adam."""
    from megatron.core import optimizer as host

    with (
        mock.patch.object(host, "Adam", optimizer),
        mock.patch.object(host, "USING_PYTORCH_OPTIMIZER", False, create=True),
    ):
        yield


@contextlib.contextmanager
def in_place_of_forks_adam(
    optimizer: type[torch.optim.Optimizer], *, repaired: bool = False
) -> Iterator[None]:
    """The same in a fork of 2023; `repaired` as in test_megatron_2023_numerics.py."""
    import megatron.model.distributed as fork_ddp
    from megatron import optimizer as fork_optimizer

    with (
        mock.patch.object(fork_optimizer, "Adam", optimizer),
        mock.patch.object(fork_ddp, "REPAIRED", repaired),
    ):
        yield


class Adafactor(torch.optim.Adafactor):
    """Rows and columns for a matrix."""

    def __init__(self, params: Any, lr: float, weight_decay: float, **adams: Any) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)


class Soap(pytorch_optimizer.SOAP):
    """Two preconditioners for a matrix, which it turns every other step."""

    def __init__(self, params: Any, lr: float, weight_decay: float, **adams: Any) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, precondition_frequency=2)
