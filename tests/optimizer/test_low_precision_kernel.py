"""State in low precision, updated by the kernel, against the same formula in torch's operators: every bit.

The kernel runs on a GPU or by Triton's interpreter, in a process of its own: Triton decides when its functions are made
whether it interprets.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distopt import DistOptConfig
from megatron_distopt.errors import ConfigError
from megatron_distopt.layout import Span
from megatron_distopt.optimizer.choice import choose_inner
from megatron_distopt.optimizer.inner import divides_in_place, split_state, step_divided
from megatron_distopt.optimizer.low_precision import one_pass
from megatron_distopt.optimizer.low_precision.block_codes import CODES
from megatron_distopt.optimizer.low_precision.low_precision_adam import LowPrecisionAdam, _gathered
from megatron_distopt.optimizer.low_precision.low_precision_tensor import Precision, part_of, stored_of
from megatron_distopt.optimizer.low_precision.one_pass import Table
from megatron_distopt.optimizer.low_precision.stored_values import ParamUpdate, RemainderValues, phase_of
from tests.support.spawn import run_ranks

HAS_GPU, HAS_TRITON = torch.cuda.is_available(), find_spec("triton") is not None
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if HAS_GPU and not IS_INTERPRETED else "cpu")

MOMENTS = ("float32", "bfloat16", *CODES)
MAINS = ("float32", "remainder", "bfloat16", "float16")
#: Forms of main params and moments; the model params are fp16 in the last one.
SOME = (
    (Precision("remainder", "int8", "bfloat16"), torch.bfloat16),
    (Precision("float16", "float8_e5m2", "float8_e4m3fn"), torch.float16),
)
ALL = tuple(
    (Precision(*dtypes), model)
    for dtypes in product(MAINS, MOMENTS, MOMENTS)
    for model in (torch.bfloat16, torch.float16)
    if model is torch.bfloat16 or dtypes[0] in ("float32", "float16")
)
Cases = tuple[tuple[Precision, torch.dtype], ...]
each_table = pytest.mark.parametrize("cases", [SOME, pytest.param(ALL, marks=pytest.mark.long)], ids=["some", "all"])
#: (first, stop) of flat params in one buffer: inside of a vector, of two programs, on vectors; and which are fp32.
SPANS = ((0, 3), (3, 1162), (1168, 1424), (1424, 1700))
FP32 = 3
DIVISOR = 3.5


class _Formula(LowPrecisionAdam):
    """The update as torch's operators make it: each rounds once, as each operation of the kernel does."""

    def _update_in_stretches(self, group: dict[str, Any], updates: list[ParamUpdate], tensors: Any) -> None:
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        for update in updates:
            update.step.add_(1)
        for stretch in (stretch for stretches in _gathered(updates) for stretch in stretches):
            count, x, m, v = int(stretch.update.step), stretch.main, stretch.first, stretch.second
            g = stretch.grad / tensors["grad_scale"]
            if self.decoupled:
                x.mul_(_rounded(1 - lr * decay))
            else:
                g = g + x * decay
            m.copy_(m + (1 - beta1) * (g - m))
            v.copy_(beta2 * v + (1 - beta2) * g * g)
            root = _rounded((1 - beta2**count) ** 0.5)
            x.sub_(_rounded(lr / (1 - beta1**count)) * (m / (_root(v) / root + group["eps"])))
            stretch.update.write(stretch.start, stretch.stop, x, m, v)


def _rounded(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64).float()


def _root(values: Tensor) -> Tensor:
    """To nearest; torch's in fp32 is not always so."""
    return torch.sqrt(values.double()).float()


@dataclass(eq=False)
class Trained:
    """An optimizer over flat params of common buffers, and the model param of each main param."""

    inner: LowPrecisionAdam
    models: dict[Tensor, Tensor]

    @property
    def mains(self) -> list[Tensor]:
        return [main for group in self.inner.param_groups for main in group["params"]]

    @property
    def bits(self) -> list[Tensor]:
        """All that a step writes."""
        tensors = [tensor for main in self.mains for tensor in (main, *self.inner.state[main].values())]
        stored = list(map(stored_of, tensors))
        rounded = [each.model for each in stored if isinstance(each, RemainderValues)]
        return [part for each in stored for part in each.parts] + rounded + list(self.models.values())


def _trained(kind: type[LowPrecisionAdam], precision: Precision, dtype: torch.dtype, **options: Any) -> Trained:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(SPANS[-1][1], generator=generator)
    narrow, wide = values.to(DEVICE, dtype), values.to(DEVICE)
    models = [(wide if number == FP32 else narrow)[start:stop] for number, (start, stop) in enumerate(SPANS)]
    if precision.main_params_dtype == "float32":
        mains = [wide.clone()[start:stop] for start, stop in SPANS[:FP32]]
    else:
        mains = list(map(precision.main, models[:FP32]))
    groups = [
        {"params": [*mains[:2], models[FP32]]},
        {"params": mains[2:], "lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.0},
    ]
    inner = kind(groups, lr=1.7e-3, weight_decay=0.1, precision=precision, **options)
    made = Trained(inner, dict(zip(mains, models[:FP32], strict=True)))
    inner.round_into(made.models)
    return made


def _step(trained: Trained, number: int, divisor: float = DIVISOR, found_inf: Tensor | None = None) -> list[Tensor]:
    """The gradients lie in one buffer, as the model params do; that of one flat param is missing at times."""
    generator = torch.Generator().manual_seed(number)
    grads, start = torch.randn(2 * SPANS[-1][1], generator=generator).to(DEVICE), 0
    for index, main in enumerate(trained.mains):
        start += (phase_of(stored_of(main)) - start) % 8
        main.grad = None if number == 1 and index == 1 else grads[start : start + main.numel()]
        start += main.numel()
    given = [main.grad for main in trained.mains if main.grad is not None]
    step_divided(trained.inner, given, divisor, found_inf)
    return given


def _split(trained: Trained) -> None:
    """Cuts a flat param inside of a block."""
    main, group = trained.mains[1], trained.inner.param_groups[0]
    parts = {span: part_of(main, span) for span in (Span(0, 203), Span(203, main.numel()))}
    split_state(trained.inner, group, main, parts)
    model = trained.models.pop(main)
    trained.models.update({part: model[span.as_slice()] for span, part in parts.items()})
    trained.inner.round_into(trained.models)


def _check(precision: Precision, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    decoupled = dtype is torch.bfloat16
    monkeypatch.setattr(torch.Tensor, "sqrt", _root)
    rows, real = list[Any](), Table.of
    monkeypatch.setattr(Table, "of", lambda given, device: rows.extend(given) or real(given, device))
    ours = _trained(LowPrecisionAdam, precision, dtype, decoupled=decoupled)
    theirs = _trained(_Formula, precision, dtype, decoupled=decoupled, by_kernel=False)
    for number in range(2):
        if number == 1:
            _split(ours)
            _split(theirs)
        before = _step(ours, number)
        _step(theirs, number)
        assert all(map(torch.equal, ours.bits, theirs.bits))
        assert all(map(torch.equal, before, (main.grad for main in theirs.mains if main.grad is not None)))
    assert not divides_in_place(ours.inner) and divides_in_place(theirs.inner)
    columns = list(zip(*(row.cells for row in rows), strict=True))
    assert set(columns[-1]) == {1} and len(set(columns[10])) > 1  # all are aligned, whatever their phases
    # Where something is not finite, not a bit changes.
    wanted = [each.clone() for each in ours.bits]
    assert _step(ours, 3, found_inf=torch.ones((), device=DEVICE))
    assert all(map(torch.equal, ours.bits, wanted))


def _check_all(rank: int, size: int, cases: Cases) -> None:
    if IS_INTERPRETED:  # what was imported before the variable was set is made anew, but for what is compiled
        for name in [name for name in sys.modules if re.match(r"triton(?!\._C\b)(\.|$)", name)]:
            del sys.modules[name]
    for precision, dtype in cases:
        with pytest.MonkeyPatch.context() as patch:
            _check(precision, dtype, patch)


@pytest.mark.skipif(not HAS_TRITON or not HAS_GPU, reason="needs triton and a GPU")
@each_table
def test_kernel_when_state_is_stored_in_other_forms_then_every_bit_is_that_of_the_formula(cases: Cases) -> None:
    _check_all(0, 1, cases)


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@each_table
def test_kernel_when_it_is_interpreted_then_every_bit_is_that_of_the_formula(
    cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run_ranks(_check_all, 1, cases, seconds=3000)


def test_step_when_there_are_many_flat_params_then_two_launches_for_one_combination_of_forms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[str] = []
    monkeypatch.setattr(one_pass, "has_kernel", lambda device: True)
    monkeypatch.setattr(one_pass, "launch", lambda name, *args, **kw: launched.append(name))
    precision = SOME[0][0]
    for num in (1, 5):
        mains = [precision.main(torch.ones(20, dtype=torch.bfloat16)) for _ in range(num)]
        mains.append(torch.ones(20))
        inner = LowPrecisionAdam([{"params": mains}], precision=precision)
        for _ in range(2):
            launched.clear()
            for main in mains:
                main.grad = torch.ones(20)
            inner.step()
        assert launched == ["prepare", "update", "update"]


def test_step_when_triton_cannot_compile_then_the_error_says_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: str) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(one_pass, "has_kernel", lambda device: True)
    monkeypatch.setattr(one_pass, "import_module", fail)
    main = Precision("remainder").main(torch.ones(20, dtype=torch.bfloat16))
    inner = LowPrecisionAdam([{"params": [main]}], precision=Precision("remainder"))
    main.grad = torch.ones(20)
    with pytest.raises(ConfigError, match=r"no compiler.*adam='torch_fused'"):
        inner.step()


@pytest.mark.parametrize(("adam", "by_kernel"), [("auto", True), ("torch_fused", False), ("torch_foreach", False)])
def test_choose_inner_when_state_is_in_low_precision_then_adam_says_what_updates_it(
    adam: str, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = choose_inner(DistOptConfig(adam=adam, exp_avg_dtype="bfloat16"), "cpu")
    main = torch.zeros(8)
    inner = choice.build([{"params": [main]}])
    launched: list[str] = []
    monkeypatch.setattr(one_pass, "has_kernel", lambda device: True)
    monkeypatch.setattr(one_pass, "launch", lambda name, *args, **kw: launched.append(name))
    main.grad = torch.ones(8)
    inner.step()
    assert launched == (["prepare", "update"] if by_kernel else [])
