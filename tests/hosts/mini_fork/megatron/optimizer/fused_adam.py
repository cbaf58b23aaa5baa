"""`Adam` and `SGD`: torch's, or for Adam a stand-in with the conventions of apex.

apex counts steps in the param group, as an int, where torch keeps a tensor in the state of each
param; and its decay is decoupled, where torch's Adam adds it to the gradient.
"""

import torch
from torch.optim import SGD

from ..switches import ADAM


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay (arXiv:1711.05101)."""

    skips_empty_groups = True  # and does not count there

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        defaults = {
            "lr": lr,
            "bias_correction": True,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if self.skips_empty_groups and not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param, group):
        state, (beta1, beta2), grad = self.state[param], group["betas"], param.grad
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = (
                torch.zeros_like(param.data),
                torch.zeros_like(param.data),
            )
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        mean = state["exp_avg"] / (1 - beta1 ** group["step"])
        square = state["exp_avg_sq"] / (1 - beta2 ** group["step"])
        update = (mean / (square.sqrt() + group["eps"])).add_(param, alpha=group["weight_decay"])
        param.sub_(update, alpha=group["lr"])


# As apex's says, for which it stands.
FusedAdam.__module__ = "apex.optimizers.fused_adam"

Adam = FusedAdam if ADAM == "fused" else torch.optim.Adam

__all__ = ["SGD", "Adam", "FusedAdam"]
