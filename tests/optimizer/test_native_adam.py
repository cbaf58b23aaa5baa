"""Adam of compiled C: the bits of torch's kernel between two conversions, for every form, length and option."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distopt.optimizer import native, native_adam
from megatron_distopt.optimizer.coded import storages_of
from megatron_distopt.optimizer.low_precision_adam import LowPrecisionAdam
from megatron_distopt.optimizer.precision import Precision

MAINS = ("float32", "remainder", "bfloat16")
MOMENTS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
#: A form is read and written by itself, so in every run each of them is once beside another one.
COMBINATIONS = [
    pytest.param(main, first, second, marks=() if second == after else pytest.mark.long)
    for main, (first, after), second in product(MAINS, zip(MOMENTS, (*MOMENTS[1:], MOMENTS[0]), strict=True), MOMENTS)
]
#: Lengths of flat params, and the places at which their model params begin: whole blocks, and parts of vectors.
FLAT_PARAMS = ((256, 0), (384, 5), (128, 3), (1, 0), (7, 1), (139, 0), (600, 7))
OPTIONS: dict[str, dict[str, Any]] = {
    "decoupled decay": {"weight_decay": 0.1},
    "no decay": {"weight_decay": 0.0},
    "small beta1": {"weight_decay": 0.1, "betas": (0.3, 0.9)},
    "a rate in a tensor": {"lr": torch.tensor(2e-3)},
}


@pytest.fixture(autouse=True)
def _needs_a_compiler() -> None:
    if native.library() is None or native_adam._capability() not in native_adam._KNOWN:
        pytest.skip("there is no C compiler, or torch's kernel has other instructions")


def _train(
    precision: Precision,
    *,
    divisor: float | None = None,
    bad: Sequence[int] = (),
    decoupled: bool = True,
    **options: Any,
) -> list[Tensor]:
    """Three steps; all memory that they leave."""
    generator = torch.Generator().manual_seed(1)
    models = [torch.randn(n + at, generator=generator).bfloat16()[at:] for n, at in FLAT_PARAMS]
    is_plain = precision.main_params_dtype == "float32"
    mains = [each.float() for each in models] if is_plain else precision.mains(models)
    made = LowPrecisionAdam([{"params": mains}], **options, decoupled=decoupled, precision=precision)
    made.round_into(dict(zip(mains, models, strict=True)))
    if divisor is not None:
        made.grad_scale = torch.tensor(divisor)
    for step in range(3):
        for main in mains:
            main.grad = torch.randn(main.numel(), generator=generator) * 10.0 ** (1 - step)
        made.found_inf = torch.tensor(float(step in bad))
        made.step()
    states = [value for main in mains for value in made.state[main].values()]
    return [
        *models,
        *(main.grad for main in mains),
        *(part for each in (*mains, *states) for part in storages_of(each)),
    ]


def _without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_adam, "choose", lambda *_, **__: [])


def _check(monkeypatch: pytest.MonkeyPatch, precision: Precision, **options: Any) -> None:
    chosen, choose = [], native_adam.choose
    with monkeypatch.context() as patch:
        patch.setattr(native_adam, "choose", lambda *args, **named: chosen.append(choose(*args, **named)) or chosen[-1])
        ours = _train(precision, **options)
    assert [len(each) for each in chosen] == [len(FLAT_PARAMS)] * 3
    with monkeypatch.context() as patch:
        _without(patch)
        torchs = _train(precision, **options)
    for number, (one, other) in enumerate(zip(ours, torchs, strict=True)):
        assert torch.equal(one, other), (number, precision)


@pytest.mark.parametrize(("main", "first", "second"), COMBINATIONS)
def test_update_when_in_one_pass_then_the_bits_are_those_of_torchs_kernel(
    monkeypatch: pytest.MonkeyPatch, main: str, first: str, second: str
) -> None:
    _check(monkeypatch, Precision(main, first, second), weight_decay=0.1)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_update_when_options_differ_then_the_bits_are_those_of_torchs_kernel(
    monkeypatch: pytest.MonkeyPatch, name: str, decoupled: bool
) -> None:
    for divisor, bad in ((None, ()), (3.0, (1,))):
        precision = Precision("remainder", "bfloat16", "int8")
        _check(monkeypatch, precision, divisor=divisor, bad=bad, decoupled=decoupled, **OPTIONS[name])


@pytest.mark.parametrize("threads", [1, 3])
def test_update_when_many_elements_then_threads_change_nothing(threads: int) -> None:
    known, made = torch.get_num_threads(), []
    for count in (1, threads):
        torch.set_num_threads(count)
        try:
            model = torch.linspace(-1, 1, 1 << 16).bfloat16()
            main = Precision("remainder", "int8", "int8").mains([model])[0]
            optimizer = LowPrecisionAdam([{"params": [main]}], precision=Precision("remainder", "int8", "int8"))
            main.grad = torch.linspace(-2, 3, 1 << 16)
            optimizer.step()
            made.append([model, *storages_of(main), *storages_of(optimizer.state[main]["exp_avg"])])
        finally:
            torch.set_num_threads(known)
    assert all(map(torch.equal, *made))


def test_update_when_an_option_has_no_kernel_then_the_stretches_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_adam, "_update", lambda *_: pytest.fail("updated natively"))
    # A main param in fp16 is rounded before the model param is.
    _train(Precision("float16", "int8", "int8"))
    monkeypatch.setattr(native_adam, "_capability", lambda: "DEFAULT")
    _train(Precision("remainder", "int8", "int8"))


def test_update_when_torchs_kernel_rounds_otherwise_then_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *_, **__: None)
    with caplog.at_level(logging.INFO, logger="megatron_distopt"):
        assert not native_adam._is_right.__wrapped__(True)
    assert len(caplog.records) == 1


def test_weights_when_updated_then_torch_counts_it() -> None:
    model = torch.ones(8, dtype=torch.bfloat16)
    main = Precision("remainder").mains([model])[0]
    optimizer = LowPrecisionAdam([{"params": [main]}], precision=Precision("remainder"))
    before, main.grad = model._version, torch.ones(8)
    optimizer.step()
    assert model._version > before
