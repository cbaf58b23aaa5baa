"""Optimizers of whole params with the constructor of a Megatron's Adam, in whose place they are put."""

from __future__ import annotations

from typing import Any

import pytorch_optimizer
import torch

__all__ = ["Adafactor", "Soap"]


class Adafactor(torch.optim.Adafactor):
    """Rows and columns for a matrix."""

    def __init__(self, params: Any, lr: float, weight_decay: float, **adams: Any) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)


class Soap(pytorch_optimizer.SOAP):
    """Two preconditioners for a matrix, which it turns every other step."""

    def __init__(self, params: Any, lr: float, weight_decay: float, **adams: Any) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, precondition_frequency=2)
