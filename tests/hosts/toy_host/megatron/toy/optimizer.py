"""The host's side: gradients in one buffer, a factory, and its own optimizer, which every rank has
whole. Its distributed one is never built."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter


class GradBuffer:
    """fp32 gradients of all params, one after the other; `index_map` says where."""

    def __init__(self, model: Module) -> None:
        self.index_map: dict[Parameter, tuple[int, int]] = {}
        stop = 0
        for param in reversed(list(model.parameters())):
            start, stop = stop, stop + param.numel()
            self.index_map[param] = start, stop
        self.numel_unpadded, self.num_ranks = stop, dist.get_world_size()
        self.data = torch.zeros(-(-stop // self.num_ranks) * self.num_ranks)
        for param in self.index_map:
            param.register_post_accumulate_grad_hook(self._add)

    def _add(self, param: Parameter) -> None:
        assert param.grad is not None, "called after backward"
        start, stop = self.index_map[param]
        self.data[start:stop].add_(param.grad.flatten())
        param.grad = None


class ToyOptimizer:
    """Averages gradients over all ranks and updates every param on every rank."""

    def __init__(self, base: torch.optim.Optimizer, model: Module, grads: GradBuffer) -> None:
        self.base, self.model, self.grads = base, model, grads

    def zero_grad(self) -> None:
        self.grads.data.zero_()
        for param in self.grads.index_map:
            param.grad = None

    def step(self) -> bool:
        dist.all_reduce(self.grads.data)
        self.grads.data.div_(self.grads.num_ranks)
        for param, (start, stop) in self.grads.index_map.items():
            param.grad = self.grads.data[start:stop].view_as(param).to(param.dtype)
        self.base.step()
        return True


class ToyDistributedOptimizer(ToyOptimizer):
    """The one that is replaced."""

    def __init__(self, *args: Any) -> None:
        raise RuntimeError("This one needs a GPU.")


def get_megatron_optimizer(args: Any, model: Module) -> ToyOptimizer:
    base = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    kind = ToyDistributedOptimizer if args.use_distributed_optimizer else ToyOptimizer
    return kind(base, model, GradBuffer(model))


def loss_of(model: Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()
