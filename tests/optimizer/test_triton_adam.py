"""adam="triton": the kernel against torch's fused AdamW, and what is said where it cannot run.

The kernel itself runs where triton is installed, on a GPU or by its interpreter:
TRITON_INTERPRET=1 python -m pytest tests/optimizer/test_triton_adam.py
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.errors import ConfigError
from megatron_distopt.optimizer import choose_inner, count_updates, moments_of, restore
from megatron_distopt.optimizer.inner import RoundsItself, skips_by_itself, step_divided
from megatron_distopt.optimizer.triton_adam import TritonAdamW
from tests.support.models import Params, exact_grads, stepped
from tests.support.refusals import assert_says

HAS_GPU = torch.cuda.is_available()
HAS_TRITON = find_spec("triton") is not None
RUNS = HAS_TRITON and (HAS_GPU or os.environ.get("TRITON_INTERPRET") == "1")
WHY_NOT = "needs triton, and a GPU or TRITON_INTERPRET=1"
needs_kernel = pytest.mark.skipif(not RUNS, reason=WHY_NOT)
DEVICE = torch.device("cuda" if HAS_GPU and os.environ.get("TRITON_INTERPRET") != "1" else "cpu")

#: Less than a block, a block, more than two; the last group has neither decay nor the others' rate.
NUMELS = (3, 1024, 2500)
STEPS = 6
#: Terms are below 4 (params of a normal distribution, moments below gradients), an fp32 of that size is rounded by
#: 2**-23 at most, and each of 6 steps rounds about 5 times in one order here and in another order there.
ROUNDING = STEPS * 5 * 2.0**-23


def _mains() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(numel, generator=generator).to(DEVICE) for numel in NUMELS]


def _groups(mains: list[Tensor], lr: Any = 1e-2) -> list[dict[str, Any]]:
    return [{"params": mains[:2], "lr": lr}, {"params": mains[2:], "weight_decay": 0.0, "lr": 5e-3}]


def _inner(kind: str, mains: list[Tensor], lr: Any = 1e-2) -> Any:
    if kind == "triton":
        return TritonAdamW(_groups(mains, lr), weight_decay=0.1)
    return AdamW(_groups(mains, lr), weight_decay=0.1, fused=True)


def _train(inner: Optimizer, first: int, steps: int, divisor: float = 1.0) -> None:
    held = _held(inner)
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for main in held:
            main.grad = torch.randn(main.shape, generator=generator).to(DEVICE) * divisor
        step_divided(inner, [main.grad for main in held if main.grad is not None], divisor)


def _held(inner: Optimizer) -> list[Tensor]:
    return [main for group in inner.param_groups for main in group["params"]]


def _close(left: Optimizer, right: Optimizer) -> None:
    for mine, other in zip(_held(left), _held(right), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=ROUNDING)
        ours, theirs = moments_of(left, mine), moments_of(right, other)
        assert ours.keys() == theirs.keys() == {"exp_avg", "exp_avg_sq"}
        for key in ours:
            torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=ROUNDING)


@needs_kernel
@pytest.mark.parametrize("divisor", [1.0, 8.0])
def test_step_when_compared_with_torchs_fused_then_as_near_as_rounding(divisor: float) -> None:
    ours, theirs = _inner("triton", _mains()), _inner("torch", _mains())
    _train(ours, 0, STEPS, divisor)
    _train(theirs, 0, STEPS, divisor)
    _close(ours, theirs)
    assert count_updates(ours) == count_updates(theirs) == STEPS
    assert not torch.equal(_held(ours)[2], _mains()[2])


@needs_kernel
def test_step_when_decay_is_l2_then_as_torchs_adam() -> None:
    ours = TritonAdamW([{"params": _mains()}], lr=1e-2, weight_decay=0.1, decoupled=False)
    theirs = torch.optim.Adam(_mains(), lr=1e-2, weight_decay=0.1, fused=True)
    _train(ours, 0, STEPS)
    _train(theirs, 0, STEPS)
    _close(ours, theirs)


@needs_kernel
def test_step_when_the_rate_is_a_tensor_then_the_same() -> None:
    # 2**-7 is exact in fp32, in which the tensor is.
    ours = _inner("triton", _mains(), torch.tensor(2.0**-7, device=DEVICE))
    other = _inner("triton", _mains(), 2.0**-7)
    _train(ours, 0, 2)
    _train(other, 0, 2)
    assert all(map(torch.equal, _held(ours), _held(other)))


@needs_kernel
def test_step_when_something_is_not_finite_then_not_a_bit_changes() -> None:
    mains = _mains()
    models = {main: main.bfloat16() for main in mains}
    inner = _inner("triton", mains)
    inner.round_into(models)
    _train(inner, 0, 2)
    tensors = [*mains, *models.values(), *(each for state in inner.state.values() for each in state.values())]
    before = [tensor.clone() for tensor in tensors]
    for main in mains:
        main.grad = torch.full_like(main, float("nan"))
    grads = [main.grad for main in mains if main.grad is not None]
    assert skips_by_itself(inner)
    step_divided(inner, grads, 2.0, torch.ones((), device=DEVICE))
    assert all(map(torch.equal, tensors, before))
    assert not hasattr(inner, "found_inf") and not hasattr(inner, "grad_scale")
    _train(inner, 2, 1)
    assert not any(map(torch.equal, tensors, before))


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_step_when_it_rounds_then_the_model_param_is_the_rounded_main_param(dtype: torch.dtype) -> None:
    mains = _mains()
    models = {main: torch.zeros_like(main, dtype=dtype) for main in mains}
    inner = _inner("triton", mains)
    assert isinstance(inner, RoundsItself)
    inner.round_into(models)
    _train(inner, 0, 3)
    assert all(torch.equal(models[main], main.to(dtype)) for main in mains)


@needs_kernel
def test_step_when_main_params_lie_between_two_bf16_then_ties_go_to_even_and_nan_stays_nan() -> None:
    ties = [1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 0.0, -0.0, float("inf"), float("nan"), 2.0**-130]
    main = torch.tensor(ties, device=DEVICE)
    inner = TritonAdamW([{"params": [main]}], lr=0.0, weight_decay=0.0)
    model = torch.zeros_like(main, dtype=torch.bfloat16)
    inner.round_into({main: model})
    main.grad = torch.ones_like(main)
    inner.step()
    expected = torch.tensor(ties).bfloat16()
    torch.testing.assert_close(model.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@needs_kernel
def test_step_when_done_then_gradients_are_as_they_were() -> None:
    inner = _inner("triton", _mains())
    _train(inner, 0, 1, divisor=8.0)
    grads = [main.grad.clone() for main in _held(inner)]
    step_divided(inner, [main.grad for main in _held(inner)], 8.0)
    assert all(torch.equal(main.grad, grad) for main, grad in zip(_held(inner), grads, strict=True))


@needs_kernel
@pytest.mark.parametrize(("saved", "loaded"), [("torch", "triton"), ("triton", "torch"), ("triton", "triton")])
def test_restore_when_another_implementation_wrote_the_state_then_it_goes_on(saved: str, loaded: str) -> None:
    begun, whole = _inner(saved, _mains()), _inner(loaded, _mains())
    _train(begun, 0, 3)
    _train(whole, 0, STEPS)
    moved = _inner(loaded, [main.clone() for main in _held(begun)])
    for old, main in zip(_held(begun), _held(moved), strict=True):
        group = next(group for group in moved.param_groups if any(each is main for each in group["params"]))
        restore(moved, group, main, {key: each.clone() for key, each in moments_of(begun, old).items()}, 3)
    _train(moved, 3, STEPS - 3)
    _close(moved, whole)
    assert count_updates(moved) == STEPS
    assert saved != loaded or all(map(torch.equal, _held(moved), _held(whole)))


def _distributed(adam: str, *, deferred: bool) -> tuple[Params, Any]:
    model = Params(default=torch.bfloat16)
    config = DistOptConfig(accelerator="torch", adam=adam, lr=0.01, clip_grad=1.0, nonfinite="skip")
    optimizer = distribute(model, config)
    optimizer.sharded.plan = replace(optimizer.sharded.plan, deferred_check=deferred)
    return model, optimizer


def _iterate(model: Params, optimizer: Any, steps: range, bad: int = -1) -> None:
    for step in steps:
        optimizer.zero_grad()
        grads = exact_grads(step, 0, 0)
        if step == bad:
            grads["scale"][0] = float("inf")
        optimizer.scale_loss(model(grads)).backward()
        assert stepped(optimizer).updated is (step != bad)


@needs_kernel
@pytest.mark.usefixtures("one_rank")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="over gloo on the CPU")
def test_distribute_when_triton_updates_then_as_near_to_torchs_as_rounding_and_skips(tmp_path: Path) -> None:
    results = {}
    for adam, deferred in (("triton", False), ("triton", True), ("torch_fused", False)):
        model, optimizer = _distributed(adam, deferred=deferred)
        assert optimizer.sharded.defers_check is deferred
        _iterate(model, optimizer, range(STEPS), bad=3)
        assert optimizer.sharded.num_skipped == 1
        results[adam, deferred] = optimizer.sharded
    ours, deferred, theirs = results.values()
    _close(ours.inner, theirs.inner)
    for mine, other in zip(ours.flat_params, deferred.flat_params, strict=True):
        assert torch.equal(mine.main, other.main) and torch.equal(mine.model, other.model)
        assert torch.equal(mine.model, mine.main.bfloat16())


@needs_kernel
@pytest.mark.usefixtures("one_rank")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="over gloo on the CPU")
def test_save_when_triton_updates_then_a_loaded_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = _distributed("triton", deferred=True)
    _iterate(model, optimizer, range(3))
    optimizer.save(tmp_path / "saved")
    _iterate(model, optimizer, range(3, STEPS))
    other_model, other = _distributed("triton", deferred=True)
    other.load(tmp_path / "saved")
    _iterate(other_model, other, range(3, STEPS))
    for mine, loaded in zip(optimizer.sharded.flat_params, other.sharded.flat_params, strict=True):
        assert torch.equal(mine.main, loaded.main) and torch.equal(mine.model, loaded.model)


def _refused(device_type: str) -> str:
    with pytest.raises(ConfigError) as error:
        choose_inner(DistOptConfig(adam="triton"), device_type)
    return str(error.value)


def test_choose_inner_when_triton_is_asked_for_and_not_installed_then_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert_says(
        _refused("cuda"),
        "Invalid adam 'triton': not installed. Must be usable when it is asked for by name. "
        "Install it, or write adam='auto'.",
    )


def test_choose_inner_when_triton_has_no_kernels_for_the_device_then_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_triton(tmp_path, "jit = None", monkeypatch)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert_says(
        _refused("cpu"),
        "Invalid adam 'triton': has no kernels for cpu (TRITON_INTERPRET=1 interprets them there, which is for tests). "
        "Must be usable when it is asked for by name. Install it, or write adam='auto'.",
    )
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_inner(DistOptConfig(adam="triton"), "cpu").name == "triton"


def test_choose_inner_when_the_import_of_triton_fails_then_refused_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_triton(tmp_path, "raise RuntimeError('no driver')", monkeypatch)
    assert _refused("cuda").startswith("Invalid adam 'triton': installed, but its import fails (no driver). Must")


def _fake_triton(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "triton.py").write_text(text)
    monkeypatch.setitem(sys.modules, "triton", None)  # so that what was loaded, or nothing, is back afterwards
    del sys.modules["triton"]
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_choose_inner_when_adam_is_auto_then_triton_is_never_taken_nor_named(device_type: str) -> None:
    choice = choose_inner(DistOptConfig(adam="auto", accelerator="torch"), device_type)
    assert choice.name != "triton"
    assert not any("triton" in reason for reason in choice.why)


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_triton_adamw_when_a_group_asks_for_more_than_the_kernel_does_then_refused(option: str) -> None:
    with pytest.raises(ConfigError) as error:
        TritonAdamW([{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)], option: True}])
    assert_says(
        str(error.value),
        f"Invalid param group 1: {option}=True. Must leave {option} off with adam='triton'. Write adam='torch_fused'.",
    )
