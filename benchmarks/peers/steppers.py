"""Optimizer steps of one rank without communication, and all contestants of step.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from peers.adam import ADAM, CLIP_GRAD, AdamBuilder, foreign_adam, torch_adam
from peers.core_optimizer import CoreOptimizer
from peers.fork_step import ForkStep
from peers.state import Setting, Weights, fill, groups_of

#: Standard deviation of the params, so that an update of bf16 params is not rounded away.
_PARAM_SIZE = 0.02


@dataclass(frozen=True)
class StepSetting(Setting):
    """A size of model on one rank."""

    loss_scale: float | None = None  # that gradients were multiplied with; None for none
    device: str = "cpu"  # of model and optimizer


class Stepper:
    """A bf16 model with fp32 grads and its optimizer.

    Args:
        setting: of the model.
    """

    def __init__(self, setting: StepSetting) -> None:
        self.setting = setting
        self.model: Module = weights(setting)

    @property
    def params(self) -> list[Parameter]:
        """bf16, in the same order for all."""
        return list(self.model.parameters())

    def grads(self) -> Sequence[Tensor]:
        """fp32, by param: where the gradients are found by `step`."""
        return [param.main_grad for param in self.params]  # type: ignore[attr-defined]

    def step(self) -> None:
        """From gradients to new bf16 params: unscale, norm, clip, update, round."""
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of all memory, and of what was changed elsewhere."""


@dataclass(frozen=True)
class StepEntry:
    """A contestant before it is built."""

    name: str  # in results; this package is "ours"
    build: Callable[[StepSetting], Stepper]  # it, from the setting; imports what it needs


def weights(setting: StepSetting) -> Module:
    """The same values for all."""
    module = Weights(setting).to(setting.device)
    with torch.no_grad():
        for param in module.parameters():
            fill(param).mul_(_PARAM_SIZE)
    return module


def set_grads(stepper: Stepper, norm: float) -> None:
    """The same gradients for all, of a given norm."""
    factor = norm * (stepper.setting.loss_scale or 1.0) / stepper.setting.numel**0.5
    for grad in stepper.grads():
        fill(grad).mul_(factor)


class Ours(Stepper):
    """This package through its documented calls; reduce and gather do nothing on one rank.

    Args:
        setting: of the model.
        options: more fields of its config.
    """

    def __init__(self, setting: StepSetting, **options: Any) -> None:
        from megatron_distopt import DistOptConfig, distribute

        super().__init__(setting)
        more = {**ADAM, **options}
        config = DistOptConfig(
            accelerator="torch", clip_grad=CLIP_GRAD, loss_scale=setting.loss_scale, **more
        )
        self._optimizer = distribute(self.model, config, param_groups=groups_of(self.model))

    def grads(self) -> Sequence[Tensor]:
        """Views of the grad buffer, as if backward had accumulated there."""
        self._optimizer.zero_grad()
        for slot in self._optimizer._model.grads.slots:
            slot.show()
        return [param.grad for param in self.params if param.grad is not None]

    def step(self) -> None:
        self._optimizer.step()


class ForkStepper(Stepper):
    """The forks' step, and the copies after their all-gather, without which the model has no new
    values."""

    def __init__(self, setting: StepSetting, adam: AdamBuilder) -> None:
        super().__init__(setting)
        self._optimizer = ForkStep(
            self.model, adam, clip_grad=CLIP_GRAD, loss_scale=setting.loss_scale
        )

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.gather()


class Undistributed(Stepper):
    """What a user writes around an optimizer: fp32 main params by param, torch's clipping, a copy
    back.

    Args:
        setting: of the model.
        adam: the optimizer over the main params.
        foreach: of `clip_grad_norm_`, as its documentation has it.
        copies_together: whether the copy back is one call of torch's private `_foreach_copy_`.
    """

    def __init__(
        self,
        setting: StepSetting,
        adam: AdamBuilder,
        *,
        foreach: bool = True,
        copies_together: bool = True,
    ) -> None:
        super().__init__(setting)
        self._foreach, self._copies_together = foreach, copies_together
        self._mains = [Parameter(param.detach().float()) for param in self.params]
        self._grads = [torch.zeros_like(main) for main in self._mains]
        main_of = dict(zip(self.params, self._mains, strict=True))
        groups = groups_of(self.model)
        mains = [[main_of[param] for param in group["params"]] for group in groups]  # type: ignore[attr-defined]
        self._optimizer = adam(
            [{**group, "params": found} for group, found in zip(groups, mains, strict=True)]
        )

    def grads(self) -> Sequence[Tensor]:
        return self._grads

    def step(self) -> None:
        for main, grad in zip(self._mains, self._grads, strict=True):
            main.grad = grad
        if self.setting.loss_scale is not None and self._unscale(self.setting.loss_scale):
            return
        torch.nn.utils.clip_grad_norm_(self._mains, CLIP_GRAD, foreach=self._foreach)
        self._optimizer.step()
        with torch.no_grad():
            if self._copies_together:
                torch._foreach_copy_(self.params, self._mains)
                return
            for param, main in zip(self.params, self._mains, strict=True):
                param.copy_(main)

    def _unscale(self, loss_scale: float) -> bool:
        found_inf = self._grads[0].new_zeros(1)
        inverse = found_inf.new_tensor(1.0 / loss_scale)
        torch._amp_foreach_non_finite_check_and_unscale_(self._grads, found_inf, inverse)
        return bool(found_inf.item() > 0)


class FlatTensor(Stepper):
    """The floor of what a step does: one flat fp32 tensor, its norm, one fused AdamW that clips,
    one cast to bf16.

    Weight decay is the same for all elements, and nothing is checked, counted or kept by name.
    """

    def __init__(self, setting: StepSetting) -> None:
        super().__init__(setting)
        self._model = torch.cat([param.detach().view(-1) for param in self.params])
        self._main = Parameter(self._model.float())
        self._main.grad = torch.zeros_like(self._main)
        self._grads, start = [], 0
        for param in self.params:
            stretch = slice(start, start + param.numel())
            param.data = self._model[stretch].view(param.shape)
            self._grads.append(self._main.grad[stretch].view(param.shape))
            start = stretch.stop
        self._optimizer = torch.optim.AdamW([self._main], **ADAM, fused=True)

    def grads(self) -> Sequence[Tensor]:
        return self._grads

    @torch.no_grad()
    def step(self) -> None:
        scale = self.setting.loss_scale or 1.0
        norm = torch.linalg.vector_norm(self._main.grad) / scale
        # torch's fused kernels divide the gradient by it.
        self._optimizer.grad_scale = scale * (norm / CLIP_GRAD).clamp(min=1.0)  # type: ignore[attr-defined]
        self._optimizer.step()
        self._model.copy_(self._main)


class Core(Stepper):
    """megatron-core's DistributedOptimizer on one rank; with its overlap the gather is not part of
    its step.

    Args:
        setting: of the model.
        options: more of `CoreOptimizer`.
    """

    def __init__(self, setting: StepSetting, **options: Any) -> None:
        super().__init__(setting)
        options = {"bucket_size": setting.numel, "loss_scale": setting.loss_scale, **options}
        self._core = CoreOptimizer(self.model, **options)

    def step(self) -> None:
        self._core.optimizer.step()

    def close(self) -> None:
        self._core.close()


def step_entries(*, may_compile: bool) -> tuple[StepEntry, ...]:
    """What `may_compile` allows is DeepSpeed's ops, which take minutes, once."""
    forloop, foreach, fused = (
        torch_adam(foreach=False),
        torch_adam(foreach=True),
        torch_adam(fused=True),
    )
    cpu_adam = foreign_adam(
        "deepspeed.ops.adam", "DeepSpeedCPUAdam", "cpu_adam", may_compile=may_compile
    )
    fused_adam = foreign_adam(
        "deepspeed.ops.adam", "FusedAdam", "fused_adam", may_compile=may_compile
    )
    apex = foreign_adam("apex.optimizers", "FusedAdam")
    transformer_engine = foreign_adam("transformer_engine.pytorch.optimizers", "FusedAdam")
    return (
        StepEntry("ours", Ours),
        StepEntry("ours, with averages", partial(Ours, ema_decay=0.999)),
        StepEntry("fork of 2023", partial(ForkStepper, adam=forloop)),
        StepEntry("fork of 2023, fused Adam", partial(ForkStepper, adam=fused)),
        StepEntry(
            "torch as people write it", partial(Undistributed, adam=fused, copies_together=False)
        ),
        StepEntry("the flat tensor", FlatTensor),
        StepEntry(
            "torch for-loop",
            partial(Undistributed, adam=forloop, foreach=False, copies_together=False),
        ),
        StepEntry("torch foreach", partial(Undistributed, adam=foreach)),
        StepEntry("torch fused", partial(Undistributed, adam=fused)),
        StepEntry("DeepSpeed CPUAdam", partial(Undistributed, adam=cpu_adam)),
        StepEntry("DeepSpeed FusedAdam", partial(Undistributed, adam=fused_adam)),
        StepEntry("megatron-core", Core),
        StepEntry("megatron-core, fused Adam", partial(Core, is_fused=True)),
        StepEntry("apex FusedAdam", partial(Undistributed, adam=apex)),
        StepEntry("TransformerEngine FusedAdam", partial(Undistributed, adam=transformer_engine)),
    )
