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
from functools import partial

import torch
from torch import Tensor

from megatron_distopt.comm import Group
from megatron_distopt.device import can_record, current
from megatron_distopt.device import record as record_on
from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.optimizer.coded import storages_of
from megatron_distopt.optimizer.deferred import DeferredCheck, Notice
from megatron_distopt.optimizer.inner import InParts
from megatron_distopt.optimizer.sharded import ShardedOptimizer
from megatron_distopt.optimizer.step import (
    StepAction,
    StepDecision,
    advance,
    decide,
    divide_on_device,
    finish_deferred_check,
    keep_check,
    measure,
    measure_on_device,
    update,
    write_model,
)

#: On the device: see `measure_on_device` and `divide_on_device`.
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
    """`make_step` of one optimizer through a recorded graph.

    The first step is an ordinary one, which allocates the moments; the second is recorded and replayed.

    Args:
        optimizer: one whose check is deferred (`defers_check`); its statistics go over a backend that can be recorded,
            such as NCCL.
        record: records what a function queues on the device, see `device.record`, which it is where None.
        notice: see `measure`; its numbers are filled before every step, and are the sums afterwards.

    Raises:
        ConfigError: the CPU has to decide in every step, or the device records nothing.
    """

    def __init__(self, optimizer: ShardedOptimizer, record: Record | None = None, notice: Notice | None = None) -> None:
        _check_deferred(optimizer)
        if record is None and not can_record(optimizer.device):
            rule, remedy = "be made on a device that records", "Call optimizer.step() there"
            raise ConfigError(refusal("captured step", f"on {optimizer.device}", rule, remedy))
        self.optimizer, self.notice = optimizer, notice
        #: What records it.
        self.record: Record = record or partial(record_on, optimizer.device)
        self._recording: _Recording | None = None
        self._is_first = True
        self._rates = [torch.zeros((), device=optimizer.device) for _ in optimizer.inner.param_groups]

    @torch.no_grad()
    def step(self) -> StepDecision:
        """Collective: as `make_step`.

        Raises:
            NonFiniteGradError: on all ranks, where the last step's gradient was not finite and the policy is "raise".
        """
        optimizer, group = self.optimizer, self.optimizer.plan.stats_group()
        finish_deferred_check([optimizer], group)
        if self._is_first or not all(optimizer.inner.state.get(flat.main) for flat in optimizer.flat_params):
            self._is_first = False
            return self._ordinary(group)
        self._set_rates()
        baked = self._baked()
        if self._recording is None or self._recording.baked != baked:
            self._recording = self._recorded(baked, group)
        self._recording.replay()
        return self._decided(*self._recording.output)

    def _ordinary(self, group: Group) -> StepDecision:
        measured = measure([self.optimizer], group, self.notice)
        (decision,) = decide([self.optimizer], measured, group)
        update(self.optimizer, decision)
        return decision

    def _recorded(self, baked: tuple[object, ...], group: Group) -> _Recording:
        optimizer = self.optimizer

        def work() -> Output:
            numbers = measure_on_device([optimizer], group, self.notice)
            divided = divide_on_device(optimizer, numbers, optimizer.divisor, optimizer.config.clip_grad)
            advance(optimizer, *divided)
            write_model(optimizer)
            return numbers, *divided

        with self._recordable_groups(), current(optimizer.device):
            replay, output = self.record(work)
        return _Recording(baked, replay, output)

    def _decided(self, numbers: Tensor, divisor: float | Tensor, found_inf: Tensor | None) -> StepDecision:
        optimizer = self.optimizer
        counts_zeros = optimizer.config.count_zeros
        check = DeferredCheck(numbers, optimizer.flat_params, counts_zeros=counts_zeros, notice=self.notice)
        keep_check([optimizer], check)
        return StepDecision(StepAction.UPDATE, check, optimizer.divisor, divisor, found_inf)

    def _set_rates(self) -> None:
        for rate, group in zip(self._rates, self.optimizer.inner.param_groups, strict=True):
            if isinstance(group["lr"], Tensor):
                rate.copy_(group["lr"])
            else:
                rate.fill_(group["lr"])

    @contextmanager
    def _recordable_groups(self) -> Iterator[None]:
        """In the block rates are tensors, and the groups are marked `capturable`, which torch checks."""
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
        addresses = (part.data_ptr() for each in tensors for part in storages_of(each))
        return (optimizer.config, optimizer.divisor, *options, *addresses)


def _check_deferred(optimizer: ShardedOptimizer) -> None:
    if optimizer.host_updates is not None:
        rule, remedy = "keep all state on the device", "Write offload_fraction=0.0, or call optimizer.step()"
        raise ConfigError(refusal("captured step", "with state on the host", rule, remedy))
    if isinstance(optimizer.inner, InParts):
        name, rule = optimizer.plan.choice.name, "leave no decision to the CPU"
        raise ConfigError(refusal("captured step", name, rule, f"Call optimizer.step(), which {name} needs"))
    if not optimizer.defers_check:
        scale, name = type(optimizer.loss_scale).__name__, optimizer.plan.choice.name
        rule = "leave no decision to the CPU"
        remedy = "Write adam='torch_fused', train on a GPU, and leave loss_scale='dynamic' out"
        raise ConfigError(refusal("captured step", f"{name} with {scale} on {optimizer.device}", rule, remedy))
