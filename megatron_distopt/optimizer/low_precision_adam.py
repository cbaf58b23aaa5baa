"""Adam whose state is kept in other forms than fp32: read, updated by torch's kernel and rounded back by stretches.

Where Triton compiles for the device, one kernel does all of it in one pass instead (triton_low_precision.py), and so
does compiled C on a CPU (native_adam.py).

A stretch is small enough to stay in the cache of a CPU between these, so memory is read and written once, in the forms
in which the state is kept; native.py has what converts it there. What the kernel computes is what it computes on fp32
state: [Note: remainder] in kept.py is equal to it to the bit (tests/hosts/test_state_precision.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.device import CPU
from megatron_distopt.optimizer import native_adam
from megatron_distopt.optimizer.accelerator import has_torch_fused
from megatron_distopt.optimizer.coded import Coded, kept_of
from megatron_distopt.optimizer.forms import Forms
from megatron_distopt.optimizer.inner import IMPLEMENTATION, Groups, KeepsMoments, RoundsItself
from megatron_distopt.optimizer.kept import Plain, Remainder
from megatron_distopt.optimizer.native import Scratch
from megatron_distopt.optimizer.precision import Precision
from megatron_distopt.optimizer.triton_low_precision import OnePass, Wanted

#: Elements of a stretch: for each thread of a CPU, and on a device, where it is scratch memory and launches.
_STRETCH_ON_CPU, _STRETCH = 1 << 16, 1 << 22
_FIRST, _SECOND = "exp_avg", "exp_avg_sq"


@dataclass(frozen=True, eq=False)
class _Stretch:
    """Some neighbouring elements of a flat param, with fp32 values of its state, and memory for what is computed."""

    forms: Forms
    start: int
    stop: int
    main: Tensor
    first: Tensor
    second: Tensor
    scratch: Scratch

    @property
    def grad(self) -> Tensor:
        return self.forms.grad[self.start : self.stop]

    def write_back(self) -> None:
        """Rounds the values into the forms, and the main param into the model param."""
        self.forms.write(self.start, self.stop, self.main, self.first, self.second, self.scratch.take)


class LowPrecisionAdam(KeepsMoments, RoundsItself, torch.optim.AdamW):
    """Adam over flat params, with state in any precision.

    Where torch has a fused kernel for the device, it reads `grad_scale` and `found_inf` as torch's fused optimizers do.

    Args:
        params: param groups of fp32 1-D tensors, coded or plain.
        lr, betas, eps, weight_decay: as torch's.
        decoupled: False for a decay that is added to the gradient.
        precision: of the moments.
        wanted: which implementation of the update.
    """

    #: See `inner.READS_TENSORS`.
    reads_tensors = True

    def __init__(
        self,
        params: Groups,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        decoupled: bool = True,
        precision: Precision,
        wanted: Wanted = Wanted.STRETCHES,
    ) -> None:
        device_types = {param.device.type for group in params for param in group["params"]}
        self._is_fused = all(map(has_torch_fused, device_types))
        # A group may name the kernel that it had before.
        plain = [{key: value for key, value in group.items() if key not in IMPLEMENTATION} for group in params]
        super().__init__(plain, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=self._is_fused)
        self.decoupled, self.precision = decoupled, precision
        self._one_pass, self.leaves_grads = OnePass(wanted), False
        #: By main param its number for random bits; `numbered` where empty.
        self.numbers: Mapping[Tensor, int] = {}

    def numbered(self) -> dict[Tensor, int]:
        """All main params by their place in the param groups."""
        return {main: n for n, main in enumerate(main for group in self.param_groups for main in group["params"])}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates every param that has a gradient."""
        numbers, waiting = self.numbers or self.numbered(), []
        for index, group in enumerate(self.param_groups):
            mains = [main for main in group["params"] if main.grad is not None]
            waiting += [self._forms(numbers[main], index, main) for main in mains]
        swept = self._one_pass.choose(waiting, self.param_groups, decoupled=self.decoupled)
        self.leaves_grads = self._one_pass.is_all_there_is(waiting, swept)
        given = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        self._one_pass.update(swept, self.param_groups, decoupled=self.decoupled, **given)
        done = set(swept)
        done.update(self._update_natively([each for each in waiting if each not in done], given))
        for index, group in enumerate(self.param_groups):
            forms = [each for each in waiting if each.group == index and each not in done]
            if forms:
                self._update(group, forms)

    def _update_natively(self, waiting: list[Forms], given: Mapping[str, Tensor | None]) -> list[Forms]:
        """Updates on a CPU what can be updated in one pass, and returns it."""
        chosen = native_adam.choose(waiting, self.param_groups, decoupled=self.decoupled) if self._is_fused else []
        if chosen:
            native_adam.update(chosen, self.param_groups, decoupled=self.decoupled, **given)
        return chosen

    def new_moment(self, main: Tensor, kind: str) -> Tensor:
        """See `KeepsMoments`."""
        return self.precision.second_to_fill(main) if kind == _SECOND else self.precision.first(main)

    @torch.no_grad()
    def take_moments(self, main: Tensor) -> None:
        """See `KeepsMoments`."""
        state = self.state.get(main, {})
        for kind in (_FIRST, _SECOND):
            if kind in state:
                self._bring_into_form(main, state, kind)

    def _forms(self, number: int, group: int, main: Tensor) -> Forms:
        state = self.state[main]
        if "step" not in state:
            # As torch does: where its fused kernel reads it, else on the CPU.
            state["step"] = torch.zeros((), dtype=torch.float32, device=main.device if self._is_fused else CPU)
        for kind in (_FIRST, _SECOND):
            self._bring_into_form(main, state, kind)
        kept = kept_of(main)
        if isinstance(kept, Remainder):
            kept.settle()
        writes_model = isinstance(kept, Remainder) or (isinstance(kept, Plain) and kept.tensor is not main)
        model = None if writes_model else self._models.get(main)
        first, second = (kept_of(state[kind]) for kind in (_FIRST, _SECOND))
        if main.grad is None:
            raise ValueError("a main param without a gradient is not updated")
        return Forms(number, group, kept, first, second, main.grad, state["step"], model)

    def _bring_into_form(self, main: Tensor, state: dict[str, Any], kind: str) -> None:
        """Moments of which others have made plain tensors, as by loading them, go back into the form."""
        known, begin = state.get(kind), self.precision.second if kind == _SECOND else self.precision.first
        if known is None:
            state[kind] = begin(main)
        elif not self._is_in_form(main, known, kind):
            values = known.to(torch.float32, copy=True)
            state[kind] = begin(main).copy_(values)

    def _is_in_form(self, main: Tensor, moment: Tensor, kind: str) -> bool:
        kept = kept_of(main)
        if kind == _SECOND and isinstance(kept, Remainder):
            return kept_of(moment) is kept.second
        dtype = self.precision.exp_avg_sq_dtype if kind == _SECOND else self.precision.exp_avg_dtype
        return isinstance(moment, Coded) or moment.dtype == getattr(torch, dtype)

    def _update(self, group: dict[str, Any], forms: list[Forms]) -> None:
        steps, found_inf = [each.step for each in forms], getattr(self, "found_inf", None)
        torch._foreach_add_(steps, 1)
        for stretches in _gathered(forms):
            self._compute(group, stretches)
            for stretch in stretches:
                stretch.write_back()
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))

    def _compute(self, group: dict[str, Any], stretches: list[_Stretch]) -> None:
        """One call of torch's kernel."""
        options = {key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
        options["beta1"], options["beta2"] = group["betas"]
        values = [[getattr(each, name) for each in stretches] for name in ("main", "grad", "first", "second")]
        counts = [each.forms.step for each in stretches]
        if self._is_fused:
            kernel: Callable[..., None] = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
            given = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
            kernel(*values, [], counts, **options, **given)
        else:
            # It counts by itself.
            before = [count - 1 for count in counts]
            name = "adamw" if self.decoupled else "adam"
            getattr(import_module(f"torch.optim.{name}"), name)(*values, [], before, foreach=True, **options)


def _gathered(forms: Iterable[Forms]) -> Iterator[list[_Stretch]]:
    """Stretches of about the same number of elements in all, for one call of the kernel."""
    gathered, held = list[_Stretch](), 0
    # Main param, moments, random bits and what is read again for the model param; half of a stretch may be another's.
    scratch = Scratch(10 * _numel(torch.device(CPU)))
    for stretch in (stretch for each in forms for stretch in _stretches(each, scratch)):
        gathered.append(stretch)
        held += stretch.stop - stretch.start
        if held >= _numel(stretch.main.device):
            yield gathered
            scratch.give_back()
            gathered, held = [], 0
    if gathered:
        yield gathered


def _numel(device: torch.device) -> int:
    return _STRETCH_ON_CPU * torch.get_num_threads() if device.type == CPU else _STRETCH


def _stretches(forms: Forms, scratch: Scratch) -> Iterator[_Stretch]:
    start, numel = 0, _numel(forms.grad.device)
    while start < forms.main.numel:
        stop = forms.second.end_of_stretch(start, numel)
        main, first, second = (kept.read(start, stop, scratch.take) for kept in (forms.main, forms.first, forms.second))
        yield _Stretch(forms, start, stop, main, first, second, scratch)
        start = stop
