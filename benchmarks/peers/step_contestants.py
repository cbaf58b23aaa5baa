"""All contestants of step.py, in the order in which a round runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from peers import adam
from peers.adam import torch_adam
from peers.core_optimizer import CoreOptimizer
from peers.steppers import FlatTensor, ForkStepper, Ours, Stepper, StepSetting, Undistributed


@dataclass(frozen=True)
class StepEntry:
    """A contestant before it is built."""

    name: str  # in results; this package is "ours"
    build: Callable[[StepSetting], Stepper]  # it, from the setting; imports what it needs


class Core(Stepper):
    """megatron-core's DistributedOptimizer on one rank; with its overlap the gather is not part of its step.

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
    forloop, foreach, fused = torch_adam(foreach=False), torch_adam(foreach=True), torch_adam(fused=True)
    deepspeed = {"may_compile": may_compile}
    return (
        StepEntry("ours", Ours),
        StepEntry("fork of 2023", partial(ForkStepper, adam=forloop)),
        StepEntry("fork of 2023, fused Adam", partial(ForkStepper, adam=fused)),
        StepEntry("torch as people write it", partial(Undistributed, adam=fused, copies_together=False)),
        StepEntry("the flat tensor", FlatTensor),
        StepEntry("torch for-loop", partial(Undistributed, adam=forloop, foreach=False, copies_together=False)),
        StepEntry("torch foreach", partial(Undistributed, adam=foreach)),
        StepEntry("torch fused", partial(Undistributed, adam=fused)),
        StepEntry("DeepSpeed CPUAdam", partial(Undistributed, adam=partial(adam.deepspeed_cpu, **deepspeed))),
        StepEntry("DeepSpeed FusedAdam", partial(Undistributed, adam=partial(adam.deepspeed_fused, **deepspeed))),
        StepEntry("megatron-core", Core),
        StepEntry("megatron-core, fused Adam", partial(Core, is_fused=True)),
        StepEntry("apex FusedAdam", partial(Undistributed, adam=adam.apex)),
        StepEntry("TransformerEngine FusedAdam", partial(Undistributed, adam=adam.transformer_engine)),
    )
