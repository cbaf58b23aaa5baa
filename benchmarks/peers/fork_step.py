"""The distributed optimizer of the Megatron forks of 2023 (23.06 and its children), written down
anew.

Facts, not code, are taken from them: what they do per step, tensor by tensor, in which order and in
which memory. tests/benchmarks/test_fork_step.py compares it bit for bit with a fork's own, where
MEGATRON_FORK names one and MEGATRON_FORK_RUN what helps it onto a CPU.

- Every gradient is added to a view of one flat fp32 grad buffer; params lie in it in reverse order
  of registration.
- The whole buffer is divided by the number of ranks, then reduce-scattered at once, after backward.
- The step loops over this rank's param shards in Python: gradients are handed to main params,
  unscaled, measured as a list, clipped one by one, updated by an Adam over many tensors, and copied
  to the param buffer one by one.
- The param buffer lies in the memory of the grad buffer. It is all-gathered at once, and copied to
  params one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from peers.adam import AdamBuilder
from peers.state import groups_of

# torch 2.13 renamed them; the old names warn there, and older releases have only those.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class _Piece:
    """What this rank owns of one param."""

    param: Parameter  # of the model
    main: Parameter  # fp32, 1-D: the part of it that is updated here
    in_param: slice  # where that part lies
    in_buffer: slice


class ForkStep:
    """One rank's optimizer over a model of one dtype.

    Args:
        model: its params stay where they are.
        adam: the inner optimizer.
        rank, size: of the data-parallel group, which is all ranks.
        clip_grad: largest norm of the gradient.
        loss_scale: constant; None for none, which also leaves out the search for inf.
    """

    def __init__(
        self,
        model: Module,
        adam: AdamBuilder,
        *,
        rank: int = 0,
        size: int = 1,
        clip_grad: float = 1.0,
        loss_scale: float | None = None,
    ) -> None:
        self._rank, self._size, self._clip_grad, self._loss_scale = (
            rank,
            size,
            clip_grad,
            loss_scale,
        )
        self._params = list(reversed(list(model.parameters())))
        self._ends = list(accumulate(param.numel() for param in self._params))
        numel = -(-self._ends[-1] // size) * size
        self._grads = torch.zeros(numel, dtype=torch.float32, device=self._params[0].device)
        self._values = self._grads.view(self._params[0].dtype)[:numel]
        shard_numel = numel // size
        self._shard = slice(rank * shard_numel, (rank + 1) * shard_numel)
        self._accumulate()
        groups = groups_of(model)
        pieces = [self._pieces(group["params"]) for group in groups]  # type: ignore[arg-type]
        self._pieces_of_all = [piece for found in pieces for piece in found]
        self._adam = adam(
            [
                {**group, "params": [piece.main for piece in found]}
                for group, found in zip(groups, pieces, strict=True)
            ]
        )

    def _accumulate(self) -> None:
        for param, end in zip(self._params, self._ends, strict=True):
            param.main_grad = self._grads[end - param.numel() : end].view(param.shape)  # type: ignore[attr-defined]
            param.register_post_accumulate_grad_hook(_add_to_main_grad)

    def _pieces(self, params: Sequence[Parameter]) -> list[_Piece]:
        end_of = dict(zip(self._params, self._ends, strict=True))
        found = []
        for param in params:
            start = end_of[param] - param.numel()
            low, high = max(start, self._shard.start), min(end_of[param], self._shard.stop)
            if low < high:
                in_param = slice(low - start, high - start)
                main = Parameter(param.detach().view(-1)[in_param].clone().float())
                found.append(_Piece(param, main, in_param, slice(low, high)))
        return found

    @property
    def mains(self) -> list[Parameter]:
        """fp32, 1-D: what this rank owns, decayed params first."""
        return [piece.main for piece in self._pieces_of_all]

    def zero_grad(self) -> None:
        self._grads.zero_()
        for piece in self._pieces_of_all:
            piece.main.grad = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Collective: the average of all ranks' gradients, in this rank's part of the grad
        buffer."""
        self._grads /= self._size
        if self._size > 1:
            _reduce_scatter(self._grads[self._shard], self._grads)

    @torch.no_grad()
    def step(self) -> float | None:
        """Collective: updates what this rank owns.

        Returns:
            The norm before clipping; None where a gradient was not finite and nothing was done.
        """
        for piece in self._pieces_of_all:
            piece.main.grad = piece.param.main_grad.view(-1)[piece.in_param].float()
        grads = [piece.main.grad for piece in self._pieces_of_all]
        if self._loss_scale is not None and self._unscale(grads, self._loss_scale):
            return None
        norm = self._clip(grads)
        self._adam.step()
        for piece in self._pieces_of_all:
            self._values[piece.in_buffer].copy_(piece.main)
        return norm

    def _unscale(self, grads: list[Any], loss_scale: float) -> bool:
        found_inf = self._grads.new_zeros(1)
        inverse = found_inf.new_tensor(1.0 / loss_scale)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse)
        self._over_ranks(found_inf, dist.ReduceOp.MAX)
        return bool(found_inf.item() > 0)

    def _clip(self, grads: list[Any]) -> float:
        square = self._grads.new_zeros(1)
        if grads:
            square += (
                torch.linalg.vector_norm(
                    torch.stack([torch.linalg.vector_norm(grad) for grad in grads])
                )
                ** 2
            )
        self._over_ranks(square, dist.ReduceOp.SUM)
        norm = square.item() ** 0.5
        coefficient = self._clip_grad / (norm + 1.0e-6)
        if coefficient < 1.0:
            for grad in grads:
                grad.mul_(coefficient)
        return norm

    def _over_ranks(self, value: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        if self._size > 1:
            dist.all_reduce(value, op=operation)

    @torch.no_grad()
    def gather(self) -> None:
        """Collective: all params get their new values."""
        if self._size > 1:
            _all_gather(self._values, self._values[self._shard])
        for param, end in zip(self._params, self._ends, strict=True):
            param.detach().view(-1).copy_(self._values[end - param.numel() : end])


@torch.no_grad()
def _add_to_main_grad(param: Tensor) -> None:
    param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
    param.grad = None
