"""Adam with state that is stored in other forms than fp32: read, updated and rounded back.

torch's kernel updates the fp32 values of one stretch after the other. A stretch fits into the cache
of a CPU, so memory is read and written once, in the form in which the state is stored. With [Note:
remainder] the result is bit-identical to that with fp32 state
(tests/hosts/test_state_precision.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from megatron_distopt.device import CPU
from megatron_distopt.optimizer.accelerator import has_torch_fused
from megatron_distopt.optimizer.inner import Groups
from megatron_distopt.optimizer.inner_options import without_implementation
from megatron_distopt.optimizer.low_precision.block_codes import random_bits
from megatron_distopt.optimizer.low_precision.low_precision_tensor import (
    FULL,
    SECOND_MOMENT,
    LowPrecisionTensor,
    Precision,
    stored_of,
)
from megatron_distopt.optimizer.low_precision.stored_values import RemainderValues, StoredValues

#: Elements of a stretch: for each thread of a CPU, and on a device. There more elements need more
#: scratch memory, and fewer need more launches.
_STRETCH_ON_CPU, _STRETCH = 1 << 16, 1 << 23
_MOMENTS = "exp_avg", SECOND_MOMENT


@dataclass(frozen=True, eq=False)
class _ParamUpdate:
    """A flat param that is updated in this step, with its stored state."""

    start: int  # the place of its first value in the buffer, for random bits
    main: StoredValues
    first: StoredValues  # first moment
    second: StoredValues  # second moment
    grad: Tensor  # fp32 1-D
    step: Tensor  # count of updates
    model: Tensor | None  # the model param; None if `main` writes it


class _Stretch:
    """The fp32 values of neighbouring elements of a flat param. The gradient is a view, the others
    may be copies."""

    def __init__(self, update: _ParamUpdate, place: slice) -> None:
        self.update, self.place = update, place
        self.grad = update.grad[place]
        self.main = update.main.read(place)
        self.first = update.first.read(place)
        self.second = update.second.read(place)

    def write(self) -> None:
        """Rounds the values into the stored state, and those of the main param into the model
        param."""
        update, place, noise = self.update, self.place, None
        if update.main.is_rounded_at_random or update.second.is_rounded_at_random:
            count = update.step.to(self.grad.device)
            noise = random_bits(update.start + place.start, self.grad.numel(), count)
        update.first.update(place, self.first)
        update.second.update(place, self.second, noise)
        if noise is not None and update.main.is_rounded_at_random:
            noise = noise >> 15  # not the bits that the second moment uses
        # after the second moment, because it may write sign bits there
        update.main.update(place, self.main, noise)
        if update.model is not None:
            # Rounded from the stored main param and not from the computed one, so that a checkpoint
            # gives the same model param.
            update.model[place] = update.main.read(place)


class LowPrecisionAdam(torch.optim.AdamW):
    """Adam over flat params, which are 1-D fp32 tensors, plain or in low precision, with moments in
    any precision.

    If torch has a fused kernel for the device, it reads `grad_scale` and `found_inf` as torch's
    fused optimizers do. State is stored in `precision` on devices of `device_type`, or on all
    devices if that is None. On other devices it is fp32.
    """

    _models: Mapping[Tensor, Tensor] = {}
    _places: Mapping[Tensor, int] = {}

    def __init__(
        self,
        params: Groups,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        decoupled: bool = True,  # False to add the weight decay to the gradient
        precision: Precision,
        device_type: str | None = None,
    ) -> None:
        device_types = {param.device.type for group in params for param in group["params"]}
        self._is_fused = all(
            map(has_torch_fused, device_types if device_type is None else {device_type})
        )
        super().__init__(
            [without_implementation(group) for group in params],  # drops kernels chosen before
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            fused=self._is_fused,
        )
        # torch's AdamW writes True, and the host's Adam reads it (offload.py)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = decoupled
        self.decoupled, self.precision, self._device_type = decoupled, precision, device_type

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every param that has a gradient."""
        for group in self.param_groups:
            mains = [main for main in group["params"] if main.grad is not None]
            if mains:
                self._update_in_stretches(group, [self._prepared(main) for main in mains])

    def round_into(self, models: Mapping[Tensor, Tensor], places: Mapping[Tensor, int]) -> None:
        """From now on the update of a main param is rounded into its model param.

        `places` has the place of each main param's first element in its buffer, on which random
        rounding depends.
        """
        self._models, self._places = models, places

    def new_moment(self, main: Tensor, kind: str) -> Tensor:
        """Zeros in the form in which a moment of a main param is stored, to be filled and given to
        `restore`. The present moment is not changed, because it may be the one that is loaded."""
        return self._precision_of(main).moment(main, kind)

    @torch.no_grad()
    def take_moments(self, main: Tensor) -> None:
        """Converts moments that other code has put into the state of a main param to the form in
        which they are stored."""
        state = self.state.get(main, {})
        for kind in [moment for moment in _MOMENTS if moment in state]:
            self._bring_into_form(main, state, kind)

    def _precision_of(self, main: Tensor) -> Precision:
        return self.precision if self._device_type in (None, main.device.type) else FULL

    def _prepared(self, main: Tensor) -> _ParamUpdate:
        """Creates missing state, and converts other state to its form."""
        state, stored = self.state[main], stored_of(main)
        if "step" not in state:
            # As in torch: on the device for its fused kernel, else on the CPU.
            device = main.device if self._is_fused else CPU
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        for kind in _MOMENTS:
            self._bring_into_form(main, state, kind)
        if isinstance(stored, RemainderValues):
            stored.flush()
        return _ParamUpdate(
            start=self._places.get(main, 0),
            main=stored,
            first=stored_of(state["exp_avg"]),
            second=stored_of(state[SECOND_MOMENT]),
            grad=main.grad,  # type: ignore[arg-type]
            step=state["step"],
            model=None if isinstance(main, LowPrecisionTensor) else self._models.get(main),
        )

    def _bring_into_form(self, main: Tensor, state: dict[str, Any], kind: str) -> None:
        """Creates a moment, or converts one that other code has replaced with a plain tensor, as a
        load does."""
        known, stored = state.get(kind), stored_of(main)
        if kind == SECOND_MOMENT and isinstance(stored, RemainderValues):
            if known is None:
                state[kind] = LowPrecisionTensor(stored.second).zero_()
            elif stored_of(known) is not stored.second:
                state[kind] = LowPrecisionTensor(stored.second).copy_(known)
            return
        is_in_form = isinstance(known, LowPrecisionTensor)
        if known is not None and not is_in_form:
            is_in_form = known.dtype == getattr(torch, self._precision_of(main).form_of(kind))
        if not is_in_form:
            state[kind] = self.new_moment(main, kind)
            if known is not None:
                state[kind].copy_(known)

    def _update_in_stretches(self, group: dict[str, Any], updates: Sequence[_ParamUpdate]) -> None:
        """Updates all flat params of a param group. torch's kernel takes several stretches at
        once."""
        beta1, beta2 = group["betas"]
        options = {key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
        options |= {"beta1": beta1, "beta2": beta2}
        found_inf = getattr(self, "found_inf", None)
        steps = [update.step for update in updates]
        torch._foreach_add_(steps, 1)
        for stretches in _gathered(updates):
            mains = [stretch.main for stretch in stretches]
            grads = [stretch.grad for stretch in stretches]
            firsts = [stretch.first for stretch in stretches]
            seconds = [stretch.second for stretch in stretches]
            counts = [stretch.update.step for stretch in stretches]
            if self._is_fused:
                fused = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
                options |= {"grad_scale": getattr(self, "grad_scale", None), "found_inf": found_inf}
                fused(mains, grads, firsts, seconds, [], counts, **options)
            else:
                plain = adamw if self.decoupled else adam
                before = [count - 1 for count in counts]  # this function counts up by itself
                plain(mains, grads, firsts, seconds, [], before, foreach=True, **options)
            for stretch in stretches:
                stretch.write()
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))


def _gathered(updates: Sequence[_ParamUpdate]) -> Iterator[list[_Stretch]]:
    """Lists of stretches with about the same number of elements in total, each for one call of the
    kernel."""
    gathered, numel = list[_Stretch](), 0
    for update in updates:
        is_on_cpu = update.grad.device.type == CPU
        most = _STRETCH_ON_CPU * torch.get_num_threads() if is_on_cpu else _STRETCH
        start = 0
        while start < update.main.numel:
            # If a moment has blocks, the stretch ends at a block. The blocks of both are aligned.
            about = slice(start, start + most)
            stop = max(update.first.around(about).stop, update.second.around(about).stop)
            gathered.append(_Stretch(update, slice(start, stop)))
            numel += stop - start
            start = stop
            if numel >= most:
                yield gathered
                gathered, numel = [], 0
    if gathered:
        yield gathered
