"""Adam whose state is stored in other forms than fp32: read, updated and rounded back.

torch's kernel updates fp32 values of one stretch after the other. A stretch is small enough to stay
in the cache of a CPU in between, so memory is read and written once, in the forms in which the
state is stored. With [Note: remainder] the result is that of fp32 state to the bit
(tests/hosts/test_state_precision.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.device import CPU
from megatron_distopt.optimizer.accelerator import has_torch_fused
from megatron_distopt.optimizer.inner import Groups
from megatron_distopt.optimizer.inner_options import without_implementation
from megatron_distopt.optimizer.low_precision.low_precision_tensor import (
    FULL,
    LowPrecisionTensor,
    Precision,
    stored_of,
)
from megatron_distopt.optimizer.low_precision.stored_values import (
    ParamUpdate,
    PlainValues,
    RemainderValues,
)

#: Elements of a stretch: for each thread of a CPU, and on a device, where it is scratch memory and
#: launches.
_STRETCH_ON_CPU, _STRETCH = 1 << 16, 1 << 23
_MOMENTS = _FIRST, _SECOND = "exp_avg", "exp_avg_sq"


@dataclass(frozen=True, eq=False)
class _Stretch:
    """Some neighbouring elements of a flat param, fp32; the gradient is a view, the others may be
    copies."""

    update: ParamUpdate
    start: int
    stop: int
    grad: Tensor
    main: Tensor
    first: Tensor
    second: Tensor


class LowPrecisionAdam(torch.optim.AdamW):
    """Adam over flat params, fp32 1-D tensors in low precision or plain, with moments in any
    precision.

    Where torch has a fused kernel for the device, it reads `grad_scale` and `found_inf` as torch's
    fused optimizers do. State is stored in `precision` on devices of `device_type`, or everywhere
    where that is None; else it is fp32.
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
        decoupled: bool = True,  # or the decay is added to the gradient
        precision: Precision,
        device_type: str | None = None,
    ) -> None:
        device_types = {param.device.type for group in params for param in group["params"]}
        self._is_fused = all(
            map(has_torch_fused, device_types if device_type is None else {device_type})
        )
        super().__init__(
            [without_implementation(group) for group in params],  # which it had before
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
        updates = list[ParamUpdate]()
        for index, group in enumerate(self.param_groups):
            updates += [
                self._prepared(index, main, main.grad)
                for main in group["params"]
                if main.grad is not None
            ]
        tensors = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        for index, group in enumerate(self.param_groups):
            members = [update for update in updates if update.group == index]
            if members:
                self._update_in_stretches(group, members, tensors)

    def round_into(self, models: Mapping[Tensor, Tensor], places: Mapping[Tensor, int]) -> None:
        """From now on the update of a main param is rounded into its model param.

        `places`: of the first elements of main params among those of their buffers; random rounding
        depends on it.
        """
        self._models, self._places = models, places

    def new_moment(self, main: Tensor, kind: str) -> Tensor:
        """Zeros in the form in which a moment of a main param is kept, to be filled and given to
        `restore`. The present one stays, because it may be what is loaded."""
        precision = self._precision_of(main)
        return precision.second_to_fill(main) if kind == _SECOND else precision.first(main)

    @torch.no_grad()
    def take_moments(self, main: Tensor) -> None:
        """Brings moments that others have put into the state of a main param into the form in which
        they are kept."""
        state = self.state.get(main, {})
        for kind in [moment for moment in _MOMENTS if moment in state]:
            self._bring_into_form(main, state, kind)

    def _precision_of(self, main: Tensor) -> Precision:
        return self.precision if self._device_type in (None, main.device.type) else FULL

    def _prepared(self, group: int, main: Tensor, grad: Tensor) -> ParamUpdate:
        """Makes the state that is not there yet, and brings the other into its form."""
        state = self.state[main]
        if "step" not in state:
            # As torch does: where its fused kernel reads it, else on the CPU.
            state["step"] = torch.zeros(
                (), dtype=torch.float32, device=main.device if self._is_fused else CPU
            )
        for kind in _MOMENTS:
            self._bring_into_form(main, state, kind)
        stored, model = stored_of(main), self._models.get(main)
        if isinstance(stored, RemainderValues):
            stored.settle()
            model = None
        # it is the model param itself
        elif isinstance(stored, PlainValues) and stored.tensor is not main:
            model = None
        first, second = (stored_of(state[kind]) for kind in _MOMENTS)
        return ParamUpdate(
            self._places.get(main, 0), group, stored, first, second, grad, state["step"], model
        )

    def _bring_into_form(self, main: Tensor, state: dict[str, Any], kind: str) -> None:
        """Moments of which others have made plain tensors, as by loading them, go back into the
        form."""
        precision = self._precision_of(main)
        begin = precision.second if kind == _SECOND else precision.first
        known, stored = state.get(kind), stored_of(main)
        if known is None:
            state[kind] = begin(main)
            return
        if kind == _SECOND and isinstance(stored, RemainderValues):
            is_in_form = stored_of(known) is stored.second
        else:
            dtype = precision.exp_avg_sq_dtype if kind == _SECOND else precision.exp_avg_dtype
            is_in_form = isinstance(known, LowPrecisionTensor) or known.dtype == getattr(
                torch, dtype
            )
        if not is_in_form:
            values = known.to(torch.float32, copy=True)
            state[kind] = begin(main).copy_(values)

    def _update_in_stretches(
        self, group: dict[str, Any], updates: list[ParamUpdate], tensors: dict[str, Tensor | None]
    ) -> None:
        steps, found_inf = [update.step for update in updates], tensors["found_inf"]
        options = {key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
        options["beta1"], options["beta2"] = group["betas"]
        torch._foreach_add_(steps, 1)
        for stretches in _gathered(updates):
            parts = [
                [getattr(stretch, name) for stretch in stretches]
                for name in ("main", "grad", "first", "second")
            ]
            counts = [stretch.update.step for stretch in stretches]
            if self._is_fused:
                kernel: Callable[..., None] = (
                    torch._fused_adamw_ if self.decoupled else torch._fused_adam_
                )
                kernel(*parts, [], counts, **options, **tensors)
            else:
                before = [count - 1 for count in counts]  # it counts by itself
                name = "adamw" if self.decoupled else "adam"
                getattr(import_module(f"torch.optim.{name}"), name)(
                    *parts, [], before, foreach=True, **options
                )
            for stretch in stretches:
                stretch.update.write(
                    stretch.start, stretch.stop, stretch.main, stretch.first, stretch.second
                )
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))


def _gathered(updates: Iterable[ParamUpdate]) -> Iterator[list[_Stretch]]:
    """Stretches of about the same number of elements in all, for one call of the kernel."""
    gathered, numel = list[_Stretch](), 0
    for update in updates:
        most = (
            _STRETCH_ON_CPU * torch.get_num_threads()
            if update.grad.device.type == CPU
            else _STRETCH
        )
        start = 0
        while start < update.main.numel:
            stop = update.second.end_of_stretch(start, most)
            values = (stored.read(start, stop) for stored in update.state)
            gathered.append(_Stretch(update, start, stop, update.grad[start:stop], *values))
            numel, start = numel + stop - start, stop
            if numel >= most:
                yield gathered
                gathered, numel = [], 0
    if gathered:
        yield gathered
