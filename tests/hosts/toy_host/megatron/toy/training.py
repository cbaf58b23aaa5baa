"""The host's training loop, which imports the factory by value."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.toy.optimizer import get_megatron_optimizer, loss_of
from torch import Tensor
from torch.nn import Linear, Module, ReLU, Sequential


def setup(args: Any) -> tuple[Module, Any]:
    torch.manual_seed(3)
    model = Sequential(Linear(6, 10), ReLU(), Linear(10, 3))
    return model, get_megatron_optimizer(args, model)


def train(args: Any, model: Module, optimizer: Any, first: int, last: int) -> list[Tensor]:
    """The params after these steps, of a global batch that is the same at any number of ranks."""
    for step in range(first, last):
        batch = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss_of(model, batch.chunk(dist.get_world_size())[dist.get_rank()]).backward()
        assert optimizer.step(), "no step is skipped"
    return [param.detach().clone() for param in model.parameters()]
