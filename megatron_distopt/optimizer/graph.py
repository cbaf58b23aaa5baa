"""The sharded step recorded once as a graph of the device, and replayed with one launch.

[Note: what is recorded] From reduced gradients to rounded params: statistics, their all-reduce, divisor, update and
rounding. What a recording bakes in stays as it was: addresses (so nothing of the state may move), the numbers of the
param groups, the divisor. Rates are the exception, because a schedule moves them: they lie in tensors, in fp32, so a
rate that fp32 does not hold exactly is rounded. Where anything else of it changes the step is recorded anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_distopt.comm import Group
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.optimizer import accelerator
from megatron_distopt.optimizer.decide import divide_deferred, finish_deferred_check, measure_deferred, send_deferred
from megatron_distopt.optimizer.sharded import ShardedOptimizer
from megatron_distopt.optimizer.verdict import StepAction, StepDecision, StepResult

__all__ = ["CapturedStep", "Record"]

#: On the device: see `DeferredCheck`; what the gradient was divided by; found_inf, or None where nothing is skipped.
Output = tuple[Tensor, float | Tensor, Tensor | None]
Record = Callable[[Callable[[], Output]], tuple[Callable[[], None], Output]]


@dataclass(frozen=True, eq=False)
class _Recording:
    """A recorded step.

    Args:
        baked: what was baked in, see [Note: what is recorded].
        replay: carries it out.
        output: where every replay writes it.
    """

    baked: tuple[object, ...]
    replay: Callable[[], None]
    output: Output


class CapturedStep:
    """`ShardedOptimizer.step` through a recorded graph.

    The first step is an ordinary one, which allocates the moments; the second is recorded and replayed.

    Args:
        optimizer: one whose check is deferred (`defers_check`); its statistics go over a backend that can be recorded,
            such as NCCL.
        record: records what a function queues on the device, see `accelerator.record`, which it is where None.
        extra: see `measure_together`; filled before every step, and holds the sums afterwards.

    Raises:
        ConfigError: the CPU has to decide in every step, or the device records nothing.
    """

    def __init__(self, optimizer: ShardedOptimizer, record: Record | None = None, extra: Tensor | None = None) -> None:
        _check_deferred(optimizer)
        if record is None and not accelerator.can_record(optimizer.device):
            rule, remedy = "be made on a device that records", "Call optimizer.step() there"
            raise ConfigError(refusal("captured step", f"on {optimizer.device}", rule, remedy))
        self.optimizer = optimizer
        self._record: Record = record or accelerator.record
        self._extra = extra
        self._recording: _Recording | None = None
        self._is_first = True
        self._rates = [torch.zeros((), device=optimizer.device) for _ in optimizer.inner.param_groups]

    @property
    def record(self) -> Record:
        """What records it."""
        return self._record

    def step(self) -> StepResult:
        """Collective: as `ShardedOptimizer.step`.

        Raises: as of `decide`.
        """
        return StepResult(self.decide())

    @torch.no_grad()
    def decide(self) -> StepDecision:
        """Collective: the same; says what was decided.

        Raises:
            NonFiniteGradError: on all ranks, where the last step's gradient was not finite and the policy is "raise".
        """
        optimizer = self.optimizer
        if self._is_first or not all(optimizer.inner.state.get(flat.main) for flat in optimizer.flat_params):
            self._is_first = False
            return self._ordinary()
        group = optimizer.plan.stats_group()
        finish_deferred_check([optimizer], group)
        self._set_rates()
        baked = self._baked()
        if self._recording is None or self._recording.baked != baked:
            self._recording = self._recorded(baked, group)
        self._recording.replay()
        numbers, divisor, found_inf = self._recording.output
        late = send_deferred([optimizer], numbers)
        return StepDecision(StepAction.UPDATE, late, optimizer.divisor, divisor, found_inf)

    def _ordinary(self) -> StepDecision:
        optimizer = self.optimizer
        group = optimizer.plan.stats_group()
        finish_deferred_check([optimizer], group)
        numbers = measure_deferred([optimizer], group, self._extra)
        divided = divide_deferred(optimizer, numbers, optimizer.config.clip_grad, optimizer.divisor)
        late = send_deferred([optimizer], numbers)
        optimizer.update(*divided)
        return StepDecision(StepAction.UPDATE, late, optimizer.divisor, *divided)

    def _recorded(self, baked: tuple[object, ...], group: Group) -> _Recording:
        optimizer = self.optimizer

        def work() -> Output:
            numbers = measure_deferred([optimizer], group, self._extra)
            divided = divide_deferred(optimizer, numbers, optimizer.config.clip_grad, optimizer.divisor)
            optimizer.update(*divided)
            return numbers, *divided

        with self._recordable_groups(), accelerator.current(optimizer.device):
            replay, output = self._record(work)
        return _Recording(baked, replay, output)

    def _set_rates(self) -> None:
        for rate, group in zip(self._rates, self.optimizer.inner.param_groups, strict=True):
            if isinstance(group["lr"], Tensor):
                rate.copy_(group["lr"])
            else:
                rate.fill_(group["lr"])

    @contextmanager
    def _recordable_groups(self) -> Iterator[None]:
        """Rates are tensors meanwhile, and torch's own check sees that the groups are meant to be recorded."""
        groups = self.optimizer.inner.param_groups
        before = [dict(group) for group in groups]
        for rate, group in zip(self._rates, groups, strict=True):
            group["lr"], group["capturable"] = rate, True
        try:
            yield
        finally:
            for group, kept in zip(groups, before, strict=True):
                group.update(kept)

    def _baked(self) -> tuple[object, ...]:
        optimizer, inner = self.optimizer, self.optimizer.inner
        options = [
            {key: value for key, value in group.items() if key not in ("params", "lr")} for group in inner.param_groups
        ]
        tensors = [each for state in inner.state.values() for each in state.values() if isinstance(each, Tensor)]
        return (optimizer.config, optimizer.divisor, *options, *(each.data_ptr() for each in tensors))


def _check_deferred(optimizer: ShardedOptimizer) -> None:
    if not optimizer.defers_check:
        scale, name = type(optimizer.loss_scale).__name__, optimizer.plan.choice.name
        rule = "leave no decision to the CPU"
        remedy = "Write adam='torch_fused', train on a GPU, and leave loss_scale='dynamic' out"
        raise ConfigError(refusal("captured step", f"{name} with {scale} on {optimizer.device}", rule, remedy))
