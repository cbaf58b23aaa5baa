"""Adam in one sweep over memory, by a Triton kernel: it divides, updates, and writes the rounded model param.

[Note: one sweep] torch's fused kernel writes the divided gradient back and leaves the rounding to a second kernel:
38 bytes an element where this one moves 30 (gradient 4, main param 8, moments 16, model param 2). It is taken only
where adam='triton' asks for it. Off NVIDIA's and AMD's devices Triton's interpreter runs it (TRITON_INTERPRET=1), for
tests. Arithmetic is that of torch's fused kernels in fp32; results differ from theirs in the last bits, because torch's
compiler contracts a multiplication and an addition, and the terms are ordered in another way.

A step is two launches, whatever the number of flat params and param groups: `prepare` counts the updates, `sweep`
updates. Where a rate has changed it is uploaded as well.

Source: Kingma & Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 1; Loshchilov & Hutter, "Decoupled
Weight Decay Regularization", 2019, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.device import current
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.optimizer.inner import Groups, RoundsItself
from megatron_distopt.optimizer.main_params import beside, zeros_beside
from megatron_distopt.optimizer.triton_table import (
    REST_BLOCK,
    SWEEP_BLOCK,
    SWEEP_WARPS,
    GradPlace,
    GroupNumbers,
    SweepRow,
    SweepTable,
    Tables,
    launch,
    place_grads,
)

#: What the kernel rounds into, by dtype of the model param; see triton_kernels.py.
_KINDS = {None: 0, torch.bfloat16: 1, torch.float16: 2}
#: Flat params of one program of `prepare`.
_PREPARE_BLOCK = 128


@dataclass(frozen=True, eq=False)
class _Member:
    """A param that is updated in this step, its state, and the number of its param group."""

    param: Tensor
    grad: Tensor
    state: dict[str, Any]
    group: int


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
        self._tables: Tables[SweepTable] = Tables()
        self._numbers = GroupNumbers()
        for number, group in enumerate(self.param_groups):
            for option in ("amsgrad", "maximize"):
                if group[option]:
                    rule, remedy = f"leave {option} off with adam='triton'", "Write adam='torch_fused'"
                    raise ConfigError(refusal(f"param group {number}", f"{option}=True", rule, remedy))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every param that has a gradient."""
        members = [
            _Member(param, param.grad, self.state[param], number)
            for number, group in enumerate(self.param_groups)
            for param in group["params"]
            if param.grad is not None
        ]
        if members:
            device = members[0].param.device
            for member in members:
                self._begin(member)
            self._bring_in_phase(members)
            with current(device):
                self._update(members, device)

    @staticmethod
    def _begin(member: _Member) -> None:
        if not member.state:
            param = member.param
            member.state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            member.state["exp_avg"], member.state["exp_avg_sq"] = zeros_beside(param), zeros_beside(param)

    @staticmethod
    def _bring_in_phase(members: Sequence[_Member]) -> None:
        """Moves moments that others have moved or loaded; see [Note: in phase] in main_params.py."""
        for member in members:
            for key in ("exp_avg", "exp_avg_sq"):
                member.state[key] = beside(member.param, member.state[key])

    def _update(self, members: Sequence[_Member], device: torch.device) -> None:
        num = len(members)
        sources, places = place_grads([member.grad for member in members])
        rows = tuple(self._row(member, place) for member, place in zip(members, places, strict=True))
        table = self._tables.get(rows, device, lambda: SweepTable.of(rows, device))
        rates, options = self._numbers.of(self.param_groups, device)
        found_inf, divisor = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        found_inf = torch.zeros((), device=device) if found_inf is None else found_inf
        divisor = torch.ones((), device=device) if divisor is None else divisor
        launch(
            "prepare",
            -(-num // _PREPARE_BLOCK),
            table.columns.tensor,
            rates,
            options,
            found_inf,
            table.scalars,
            num,
            BLOCK=_PREPARE_BLOCK,
        )
        launch(
            "sweep",
            table.num_programs,
            table.columns.tensor,
            table.owners.tensor,
            table.scalars,
            divisor,
            found_inf,
            num,
            table.num_bodies,
            *sources,
            DECOUPLED=self.decoupled,
            BLOCK=SWEEP_BLOCK,
            REST_BLOCK=REST_BLOCK,
            num_warps=SWEEP_WARPS,
        )

    def _row(self, member: _Member, grad: GradPlace) -> SweepRow:
        model, state = self._models.get(member.param), member.state
        return SweepRow(
            member.param.data_ptr(),
            state["exp_avg"].data_ptr(),
            state["exp_avg_sq"].data_ptr(),
            state["step"].data_ptr(),
            0 if model is None else model.data_ptr(),
            _KINDS[None if model is None else model.dtype],
            grad,
            member.param.numel(),
            member.group,
        )
