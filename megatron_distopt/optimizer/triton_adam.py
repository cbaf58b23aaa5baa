"""Adam in one sweep over memory, by a Triton kernel: it divides, updates, and writes the rounded model param.

[Note: one sweep] torch's fused kernel writes the divided gradient back and leaves the rounding to a second kernel:
38 bytes an element where this one moves 30 (gradient 4, main param 8, moments 16, model param 2). It is taken only
where adam='triton' asks for it. Off NVIDIA's and AMD's devices Triton's interpreter runs it (TRITON_INTERPRET=1), for
tests. Arithmetic is that of torch's fused kernels in fp32; results differ from theirs in the last bits, because a
compiler may contract a multiplication and an addition.

Source: Kingma & Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 1; Loshchilov & Hutter, "Decoupled
Weight Decay Regularization", 2019, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.device import current
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.optimizer.inner import Groups, RoundsItself

__all__ = ["TritonAdamW"]

#: Elements that one program updates.
_BLOCK = 1024

# Not installed everywhere, and this module has to be readable all the same; adam.py says what is missing.
_HAS_TRITON = find_spec("triton") is not None
triton: Any = import_module("triton") if _HAS_TRITON else None
tl: Any = import_module("triton.language") if _HAS_TRITON else None


def _sweep(  # type: ignore[no-untyped-def]  # Triton's compiler knows no other annotations
    main,
    grad,
    first,
    second,
    model,
    scalars,
    divisor,
    found_inf,
    numel,
    beta1,
    beta2,
    kept1,
    kept2,
    eps,
    weight_decay,
    DECOUPLED: tl.constexpr,
    ROUNDS: tl.constexpr,
    IS_BF16: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one run; `scalars` are 1 - lr * weight_decay, lr / bias correction 1, and the root of the second.

    A bf16 `model` is given as int16.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # Where something is not finite no element is left: nothing is read, nothing is written.
    is_here = at < numel * (1 - tl.load(found_inf)).to(tl.int64)
    shrink, step_size, root = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
    x = tl.load(main + at, mask=is_here, other=0.0)
    g = tl.div_rn(tl.load(grad + at, mask=is_here, other=0.0), tl.load(divisor))
    if DECOUPLED:
        x = x * shrink
    else:
        g = g + x * weight_decay
    m = tl.load(first + at, mask=is_here, other=0.0)
    v = tl.load(second + at, mask=is_here, other=0.0)
    m = m + kept1 * (g - m)
    v = beta2 * v + kept2 * g * g
    x = x - step_size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    tl.store(first + at, m, mask=is_here)
    tl.store(second + at, v, mask=is_here)
    tl.store(main + at, x, mask=is_here)
    if ROUNDS and IS_BF16:
        # To nearest, ties to even, in integers: Triton's interpreter would cut the last bits off where compilers round.
        bits = x.to(tl.int32, bitcast=True)
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        bits = tl.where(is_nan, bits | 0x400000, bits + 0x7FFF + ((bits >> 16) & 1))
        tl.store(model + at, (bits >> 16).to(tl.int16), mask=is_here)
    elif ROUNDS:
        tl.store(model + at, x.to(model.dtype.element_ty), mask=is_here)


_kernel: Any = triton.jit(_sweep) if _HAS_TRITON else None


class TritonAdamW(RoundsItself, torch.optim.AdamW):
    """AdamW over flat fp32 params; its state is that of torch's fused AdamW, and so are its checkpoints.

    It reads `grad_scale` and `found_inf` as torch's fused optimizers do, and leaves the gradients as they are.

    Args:
        params: param groups of fp32 1-D tensors.
        lr, betas, eps, weight_decay: as torch's.
        decoupled: False for a decay that is added to the gradient.

    Raises:
        ConfigError: a param group asks for what the kernel does not do.
    """

    #: See `inner.READS_TENSORS`.
    reads_tensors = True
    #: See `inner.LEAVES_GRADS`.
    leaves_grads = True

    def __init__(
        self,
        params: Groups,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        decoupled: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        self.decoupled = decoupled
        for number, group in enumerate(self.param_groups):
            for option in ("amsgrad", "maximize"):
                if group[option]:
                    rule, remedy = f"leave {option} off with adam='triton'", "Write adam='torch_fused'"
                    raise ConfigError(refusal(f"param group {number}", f"{option}=True", rule, remedy))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every param that has a gradient."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update(group, params)

    def _update(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        states = [self._state_of(param) for param in params]
        found_inf, divisor = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        if found_inf is None:
            found_inf = torch.zeros((), device=params[0].device)
        else:
            torch._foreach_sub_(steps, [found_inf] * len(steps))
        if divisor is None:
            divisor = torch.ones((), device=params[0].device)
        with current(params[0].device):
            for param, state, row in zip(params, states, self._scalars(group, steps), strict=True):
                self._launch(group, param, state, row, divisor, found_inf)

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        return state

    @staticmethod
    def _scalars(group: Mapping[str, Any], steps: Sequence[Tensor]) -> Tensor:
        """fp32 [params, 3], see `_sweep`: from float64, because 1 - beta2 ** step has few digits in fp32."""
        (beta1, beta2), lr, counts = group["betas"], group["lr"], torch.stack(list(steps)).double()
        shrink = torch.ones_like(counts) - lr * group["weight_decay"]
        size = lr / (1 - torch.pow(beta1, counts))
        root = torch.sqrt(1 - torch.pow(beta2, counts))
        return torch.stack([shrink, size, root], dim=1).float()

    def _launch(
        self,
        group: Mapping[str, Any],
        main: Tensor,
        state: Mapping[str, Tensor],
        scalars: Tensor,
        divisor: Tensor,
        found_inf: Tensor,
    ) -> None:
        (beta1, beta2), model, numel = group["betas"], self._models.get(main), main.numel()
        is_bf16 = model is not None and model.dtype is torch.bfloat16
        into = main if model is None else model.view(torch.int16) if is_bf16 else model
        _kernel[(triton.cdiv(numel, _BLOCK),)](
            main,
            main.grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            into,
            scalars,
            divisor,
            found_inf,
            numel,
            beta1,
            beta2,
            1 - beta1,
            1 - beta2,
            group["eps"],
            group["weight_decay"],
            DECOUPLED=self.decoupled,
            ROUNDS=model is not None,
            IS_BF16=is_bf16,
            BLOCK=_BLOCK,
        )
