"""How far torch's fused AdamW and the formula of apex's and TransformerEngine's FusedAdam round apart.

docs/hosts.md quotes the figures, because forks that trained with FusedAdam get torch's fused kernels on CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

NUMEL, LR, BETAS, EPS = 4_000, 1e-3, (0.9, 0.95), 1e-8


@dataclass
class Adam:
    """A formula with tensors of one dtype; everything is rounded to it, as in a kernel."""

    param: Tensor
    decay: float
    first: Tensor
    second: Tensor

    @classmethod
    def of(cls, param: Tensor, decay: float) -> Adam:
        return cls(param, decay, torch.zeros_like(param), torch.zeros_like(param))

    def step(self, grad: Tensor, count: int) -> None:
        """Source: apex, csrc/multi_tensor_adam.cu, AdamFunctor with ADAM_MODE_1 (decoupled decay)."""
        beta1, beta2, lr, decay, eps = (self.param.new_tensor(each) for each in (*BETAS, LR, self.decay, EPS))
        corrections = [self.param.new_tensor(1 - float(beta) ** count) for beta in (beta1, beta2)]
        self.first = beta1 * self.first + (1 - beta1) * grad
        self.second = beta2 * self.second + (1 - beta2) * grad * grad
        denominator = (self.second / corrections[1]).sqrt() + eps
        self.param = self.param - lr * (self.first / corrections[0] / denominator + decay * self.param)


def _distances(decay: float, steps: int) -> tuple[float, float, float]:
    """Norms of FusedAdam - torch, torch - exact and FusedAdam - exact, over that of the params."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(NUMEL, generator=generator) * 0.02
    param, fused, exact = start.clone(), Adam.of(start, decay), Adam.of(start.double(), decay)
    torchs = torch.optim.AdamW([param], lr=LR, betas=BETAS, eps=EPS, weight_decay=decay, fused=True)
    for count in range(1, steps + 1):
        grad = torch.randn(NUMEL, generator=generator) * 1e-3
        param.grad = grad.clone()
        torchs.step()
        fused.step(grad, count)
        exact.step(grad.double(), count)
    norm = float(exact.param.norm())
    pairs = ((fused.param, param), (param, exact.param), (fused.param, exact.param))
    found = [float((left.double() - right.double()).norm()) / norm for left, right in pairs]
    return found[0], found[1], found[2]


@pytest.mark.parametrize(("decay", "most"), [(0.1, 2e-5), (0.0, 2e-6)])
def test_fused_formulas_when_a_thousand_steps_are_made_then_they_differ_by_rounding(decay: float, most: float) -> None:
    apart, torchs, fused = _distances(decay, 1000)
    assert 0 < apart < most and torchs < most and fused < 2e-6
