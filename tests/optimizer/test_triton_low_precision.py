"""State in low precision, updated by the kernel, against the same formula in torch's operators: every bit.

The kernel runs on a GPU or by Triton's interpreter; test_triton_interpreted.py runs these tests so:
TRITON_INTERPRET=1 python -m pytest tests/optimizer/test_triton_low_precision.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distopt import DistOptConfig
from megatron_distopt.errors import ConfigError
from megatron_distopt.layout import Span
from megatron_distopt.optimizer import triton_low_precision
from megatron_distopt.optimizer.choice import choose_inner
from megatron_distopt.optimizer.coded import Coded, part_of
from megatron_distopt.optimizer.codes import CODES
from megatron_distopt.optimizer.forms import Forms
from megatron_distopt.optimizer.inner import divides_in_place, split_state, step_divided
from megatron_distopt.optimizer.kept import Kept, Plain, Remainder
from megatron_distopt.optimizer.low_precision_adam import LowPrecisionAdam
from megatron_distopt.optimizer.precision import Precision
from megatron_distopt.optimizer.triton_low_precision import Kinds, OnePass, Wanted
from tests.optimizer.test_triton_adam import DEVICE, needs_kernel

MOMENTS = ("float32", "bfloat16", *CODES)
MAINS = ("float32", "remainder", "bfloat16", "float16")
#: Forms of main params and moments; the model params are fp16 in the last one.
SOME = (
    (Precision("remainder", "int8", "float8_e4m3fn"), torch.bfloat16),
    (Precision("bfloat16", "float16", "bfloat16"), torch.bfloat16),
    (Precision("float16", "float8_e5m2", "int8"), torch.float16),
)
ALL = [
    (Precision(*dtypes), model)
    for dtypes in product(MAINS, MOMENTS, MOMENTS)
    for model in (torch.bfloat16, torch.float16)
    if model is torch.bfloat16 or dtypes[0] in ("float32", "float16")
]
#: (first, stop) of flat params in one buffer: inside of a vector, of two programs, on vectors; and which are fp32.
SPANS = ((0, 3), (3, 1162), (1168, 1424), (1424, 1700))
FP32 = 3
DIVISOR = 3.5


class _Formula(LowPrecisionAdam):
    """The update as torch's operators make it: each rounds once, as each operation of the kernel does."""

    def _update_natively(self, waiting: Sequence[Forms], given: Mapping[str, Tensor | None]) -> list[Forms]:
        return []

    def _compute(self, group: dict[str, Any], stretches: Sequence[Any]) -> None:
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        for each in stretches:
            count, x, m, v = int(each.forms.step), each.main, each.first, each.second
            g = each.grad / self.grad_scale
            if self.decoupled:
                x.mul_(_rounded(1 - lr * decay))
            else:
                g = g + x * decay
            m.copy_(m + (1 - beta1) * (g - m))
            v.copy_(beta2 * v + (1 - beta2) * g * g)
            root = _rounded((1 - beta2**count) ** 0.5)
            x.sub_(_rounded(lr / (1 - beta1**count)) * (m / (_root(v) / root + group["eps"])))


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
        held = [[main, *self.inner.state[main].values()] for main in self.mains]
        kepts = [each.kept if isinstance(each, Coded) else Plain(each) for members in held for each in members]
        return [part for kept in kepts for part in _written(kept)] + list(self.models.values())


def _written(kept: Kept) -> tuple[Tensor, ...]:
    return (*kept.parts, kept.model) if isinstance(kept, Remainder) else kept.parts


def _trained(kind: type[LowPrecisionAdam], precision: Precision, dtype: torch.dtype, **options: Any) -> Trained:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(SPANS[-1][1], generator=generator)
    narrow, wide = values.to(DEVICE, dtype), values.to(DEVICE)
    models = [(wide if number == FP32 else narrow)[start:stop] for number, (start, stop) in enumerate(SPANS)]
    if precision.main_params_dtype == "float32":
        mains = [wide.clone()[start:stop] for start, stop in SPANS[:FP32]]
    else:
        mains = precision.mains(models[:FP32])
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
        kept = main.kept if isinstance(main, Coded) else Plain(main)
        start += (triton_low_precision.phase_of(kept) - start) % 8
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


def _check(precision: Precision, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, *, decoupled: bool) -> None:
    monkeypatch.setattr(torch.Tensor, "sqrt", _root)
    ours, theirs = (
        _trained(kind, precision, dtype, decoupled=decoupled, **options)
        for kind, options in ((LowPrecisionAdam, {"wanted": Wanted.KERNEL}), (_Formula, {}))
    )
    for number in range(3):
        if number == 2:
            _split(ours)
            _split(theirs)
        before = _step(ours, number)
        _step(theirs, number)
        assert all(map(torch.equal, ours.bits, theirs.bits))
        assert all(map(torch.equal, before, (main.grad for main in theirs.mains if main.grad is not None)))
    assert not divides_in_place(ours.inner) and divides_in_place(theirs.inner)


@needs_kernel
@pytest.mark.parametrize(("precision", "dtype"), SOME, ids=str)
def test_step_when_state_is_kept_in_other_forms_then_every_bit_is_that_of_the_formula(
    precision: Precision, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check(precision, dtype, monkeypatch, decoupled=dtype is torch.bfloat16)


@needs_kernel
@pytest.mark.long
@pytest.mark.parametrize(("precision", "dtype"), ALL, ids=str)
def test_step_when_state_is_kept_in_any_forms_then_every_bit_is_that_of_the_formula(
    precision: Precision, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check(precision, dtype, monkeypatch, decoupled=precision.exp_avg_dtype != "float16")


@needs_kernel
def test_step_when_something_is_not_finite_then_not_a_bit_changes() -> None:
    trained = _trained(LowPrecisionAdam, *SOME[0], wanted=Wanted.KERNEL)
    _step(trained, 0)
    before = [each.clone() for each in trained.bits]
    grads = _step(trained, 2, found_inf=torch.ones((), device=DEVICE))
    assert grads and all(map(torch.equal, trained.bits, before))
    _step(trained, 2)
    assert not all(map(torch.equal, trained.bits, before))


@needs_kernel
def test_step_when_there_are_many_flat_params_then_two_launches_for_one_combination_of_forms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[str] = []
    real = triton_low_precision.launch
    monkeypatch.setattr(
        triton_low_precision, "launch", lambda name, *args, **kw: (launched.append(name), real(name, *args, **kw))
    )
    precision = SOME[0][0]
    for num in (1, 5):
        mains = precision.mains([torch.ones(20, dtype=torch.bfloat16, device=DEVICE) for _ in range(num)])
        mains.append(torch.ones(20, device=DEVICE))
        inner = LowPrecisionAdam([{"params": mains}], precision=precision, wanted=Wanted.KERNEL)
        for _ in range(2):
            launched.clear()
            for main in mains:
                main.grad = torch.ones(20, device=DEVICE)
            inner.step()
        assert launched == ["prepare", "update_coded", "update_coded"]


def _own(wanted: Wanted, monkeypatch: pytest.MonkeyPatch) -> LowPrecisionAdam:
    """An optimizer on the CPU, which counts as a device of Triton's here, before its first step."""
    monkeypatch.setattr(triton_low_precision, "CUDA", "cpu")
    monkeypatch.setattr(triton_low_precision, "_TRIED", {})
    (main,) = Precision("remainder").mains([torch.ones(20, dtype=torch.bfloat16)])
    inner = LowPrecisionAdam([{"params": [main]}], precision=Precision("remainder"), wanted=wanted)
    main.grad = torch.ones(20)
    return inner


def _raise(*args: Any, **constants: Any) -> None:
    raise RuntimeError("no compiler")


@pytest.mark.parametrize("launch", [_raise, lambda *args, **constants: None], ids=["raises", "does nothing"])
def test_step_when_the_kernel_is_not_right_then_torch_updates_and_one_that_was_asked_for_by_name_is_refused(
    launch: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_low_precision, "launch", launch)
    inner = _own(Wanted.BEST, monkeypatch)
    inner.step()
    assert "updated by torch" in caplog.text
    (main,) = inner.param_groups[0]["params"]
    torch.testing.assert_close(main.values(), torch.full((20,), 1 - 1e-3 - 1e-5))
    assert divides_in_place(inner)
    with pytest.raises(ConfigError, match="adam 'triton'"):
        _own(Wanted.KERNEL, monkeypatch).step()


@pytest.mark.parametrize(
    ("adam", "wanted"), [("auto", Wanted.BEST), ("torch_fused", Wanted.STRETCHES), ("triton", Wanted.KERNEL)]
)
def test_choose_inner_when_state_is_in_low_precision_then_adam_says_what_updates_it(
    adam: str, wanted: Wanted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("megatron_distopt.optimizer.adam._missing_symbol", lambda *names: None)
    monkeypatch.setattr("megatron_distopt.optimizer.adam._is_installed", lambda package: True)
    choice = choose_inner(DistOptConfig(adam=adam, exp_avg_dtype="bfloat16"), "cpu")
    inner = choice.build([{"params": [torch.zeros(1)]}])
    assert isinstance(inner, LowPrecisionAdam)
    assert inner._one_pass._wanted is wanted


def test_kinds_when_of_any_forms_then_each_has_a_number_of_its_own() -> None:
    model = torch.zeros(4, dtype=torch.bfloat16)
    found = set()
    for precision, _ in ALL:
        (main,) = [model.float()] if precision.main_params_dtype == "float32" else precision.mains([model])
        inner = LowPrecisionAdam([{"params": [main]}], precision=precision)
        inner.round_into({main: model})
        main.grad = torch.zeros(4)
        found.add(Kinds.of(inner._forms(0, 0, main)))
    assert len(found) == len(MAINS) * len(MOMENTS) ** 2


@needs_kernel
def test_table_when_flat_params_lie_in_phase_then_their_vectors_are_whole() -> None:
    rows: list[Any] = []
    real = triton_low_precision._Table.of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            triton_low_precision._Table, "of", lambda given, device: rows.extend(given) or real(given, device)
        )
        trained = _trained(LowPrecisionAdam, *SOME[0], wanted=Wanted.KERNEL)
        _step(trained, 0)
        _split(trained)
        _step(trained, 2)
    assert len(rows) >= 9 and all(row.is_aligned for row in rows)
    assert {row.phase for row in rows} > {0, 3}
    assert OnePass(Wanted.STRETCHES).choose([], [], decoupled=True) == []
