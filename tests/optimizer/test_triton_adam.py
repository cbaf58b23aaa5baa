"""adam="triton": the kernel against torch's fused AdamW, and what is said where it cannot run.

The kernel itself runs where triton is installed, on a GPU or by its interpreter; test_triton_interpreted.py runs these
tests so:
TRITON_INTERPRET=1 python -m pytest tests/optimizer/test_triton_adam.py
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.errors import ConfigError
from megatron_distopt.optimizer import triton_adam, triton_table
from megatron_distopt.optimizer.choice import choose_inner
from megatron_distopt.optimizer.inner import (
    RoundsItself,
    count_updates,
    moments_of,
    restore,
    skips_by_itself,
    step_divided,
)
from megatron_distopt.optimizer.triton_adam import TritonAdamW
from megatron_distopt.optimizer.triton_table import GradPlace, SweepRow, SweepTable, launch
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
def test_step_when_moments_were_moved_then_they_are_in_phase_again_and_the_step_is_the_same() -> None:
    flats, moved = _flats(), _flats()
    inners = [TritonAdamW([{"params": [flat.main for flat in each]}], lr=1e-2) for each in (flats, moved)]
    for step in range(3):
        for inner, each in zip(inners, (flats, moved), strict=True):
            for flat in each:
                flat.main.grad = flat.grad
                if inner is inners[1] and step == 2:  # as offloading does
                    inner.state[flat.main]["exp_avg"] = inner.state[flat.main]["exp_avg"].clone()
            inner.step()
    for left, right in zip(flats, moved, strict=True):
        assert torch.equal(left.main, right.main)
        assert (inners[1].state[right.main]["exp_avg"].data_ptr() - right.main.data_ptr()) % 16 == 0


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


#: (first, stop) of flat params in one buffer: shorter than a vector, off every alignment, longer than a block.
SPANS = ((0, 3), (3, 1030), (1030, 1031), (1031, 1500), (1501, 1511), (1512, 3600))


@dataclass
class Flat:
    """Tensors of one flat param, and what the formula makes of them."""

    main: Tensor
    model: Tensor | None
    grad: Tensor
    expected: tuple[Tensor, Tensor, Tensor]


def _flats(shift: int = 0) -> list[Flat]:
    """Views of common buffers; `shift` elements lie between the gradients' places and those of the others."""
    generator = torch.Generator().manual_seed(3)
    mains, grads = (torch.randn(6000, generator=generator).to(DEVICE) for _ in range(2))
    models = {dtype: torch.zeros(6000, dtype=dtype, device=DEVICE) for dtype in (torch.bfloat16, torch.float16)}
    kinds = (None, torch.bfloat16, torch.bfloat16, torch.float16, torch.bfloat16, torch.float16)
    found = []
    for (start, stop), kind in zip(SPANS, kinds, strict=True):
        main = mains[start:stop]
        model = None if kind is None else models[kind][start:stop]
        zeros = torch.zeros_like(main), torch.zeros_like(main)
        found.append(Flat(main, model, grads[start + shift : stop + shift], (main.clone(), *zeros)))
    return found


def _formula(flat: Flat, group: dict[str, Any], count: int, divisor: float, *, decoupled: bool) -> None:
    """One step as torch's operators make it: each rounds once, as each operation of the kernel does."""
    x, m, v = flat.expected
    (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
    g = flat.grad / divisor
    if decoupled:
        x = x * torch.tensor(1 - lr * decay, dtype=torch.float64).float()
    else:
        g = g + x * decay
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    square_root = v.double().sqrt().float()  # torch's in fp32 is not always the nearest
    root = torch.tensor((1 - beta2**count) ** 0.5, dtype=torch.float64).float()
    x = x - torch.tensor(lr / (1 - beta1**count), dtype=torch.float64).float() * (
        m / (square_root / root + group["eps"])
    )
    flat.expected = x, m, v


def _check(inner: Optimizer, flats: list[Flat]) -> None:
    for flat in flats:
        state = inner.state[flat.main]
        for mine, other in zip((flat.main, state["exp_avg"], state["exp_avg_sq"]), flat.expected, strict=True):
            assert torch.equal(mine, other)
        assert flat.model is None or torch.equal(flat.model, flat.main.to(flat.model.dtype))


@needs_kernel
@pytest.mark.parametrize(("shift", "decoupled"), [(0, True), (8, False), (3, True)])
def test_step_when_flat_params_lie_anywhere_then_every_bit_is_that_of_the_formula(shift: int, decoupled: bool) -> None:
    flats = _flats(shift)
    groups = [
        {"params": [flat.main for flat in flats[:4]]},
        {
            "params": [flat.main for flat in flats[4:]],
            "lr": 3e-3,
            "betas": (0.8, 0.95),
            "eps": 1e-6,
            "weight_decay": 0.0,
        },
    ]
    inner = TritonAdamW(groups, lr=1.7e-3, weight_decay=0.1, decoupled=decoupled)
    inner.round_into({flat.main: flat.model for flat in flats if flat.model is not None})
    counts = dict.fromkeys(range(len(flats)), 0)
    for step in range(3):
        for group in inner.param_groups:
            group["lr"] *= 0.9
        for number, flat in enumerate(flats):
            flat.main.grad = None if number == 2 and step == 1 else flat.grad
            if flat.main.grad is not None:
                counts[number] += 1
                _formula(flat, inner.param_groups[number >= 4], counts[number], 3.5, decoupled=decoupled)
        step_divided(inner, [flat.main.grad for flat in flats if flat.main.grad is not None], 3.5)
        _check(inner, flats)
    assert [int(inner.state[flat.main]["step"]) for flat in flats] == [3, 3, 2, 3, 3, 3]


@needs_kernel
def test_prepare_when_there_were_many_updates_then_the_scalars_are_those_of_float64() -> None:
    betas = (0.9, 0.95, 0.98, 0.999, 0.9999)
    counts = torch.tensor([*range(1, 1500), 10**5, 10**6 + 7, 2**24 - 1], dtype=torch.float64)
    held = (counts - 1).float().repeat(len(betas)).to(DEVICE)
    rows = [
        SweepRow(0, 0, 0, held.data_ptr() + 4 * number, 0, 0, GradPlace(0, 0, 0), 1, number // len(counts))
        for number in range(len(held))
    ]
    columns, scalars = SweepTable.of(rows, DEVICE).columns.tensor, torch.zeros(len(rows), 8, device=DEVICE)
    rates = torch.tensor([[1e-3, 1e-4]] * len(betas), dtype=torch.float64, device=DEVICE)
    options = torch.tensor([[beta, beta, 1e-8, 0.1] for beta in betas], dtype=torch.float64, device=DEVICE)
    found_inf = torch.zeros((), device=DEVICE)
    launch("prepare", -(-len(rows) // 128), columns, rates, options, found_inf, scalars, len(rows), BLOCK=128)
    power = torch.cat([1 - torch.pow(beta, counts) for beta in betas])
    assert torch.equal(scalars[:, 1:3].cpu(), torch.stack([1e-3 / power, power.sqrt()], dim=1).float())
    assert torch.equal(held.cpu().double(), counts.repeat(len(betas)))


class _Counter(TorchDispatchMode):
    """Counts torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _launches(num: int, num_groups: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """Kernels, torch's operators and uploads of a third step."""
    kernels: list[str] = []
    uploads: list[int] = []
    mains = [torch.ones(20, device=DEVICE) for _ in range(num)]
    inner = TritonAdamW([{"params": mains[number::num_groups]} for number in range(num_groups)])
    inner.round_into({main: main.bfloat16() for main in mains[::2]})
    real, upload = triton_adam.launch, triton_table.upload
    with monkeypatch.context() as patch:
        patch.setattr(triton_adam, "launch", lambda name, *args, **kw: (kernels.append(name), real(name, *args, **kw)))
        patch.setattr(triton_table, "upload", lambda *args: (uploads.append(1), upload(*args))[1])
        for _ in range(3):
            kernels.clear(), uploads.clear()
            grads = torch.ones(20 * num, device=DEVICE)
            for main, grad in zip(mains, grads.split(20), strict=True):
                main.grad = grad
            with _Counter() as operators:
                step_divided(inner, [main.grad for main in mains if main.grad is not None], 2.0)
    return len(kernels), operators.count, len(uploads)


@needs_kernel
def test_step_when_there_are_many_flat_params_and_groups_then_launches_are_as_many_as_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, many = _launches(1, 1, monkeypatch), _launches(9, 3, monkeypatch)
    assert few == many
    assert (few[0], few[2]) == (2, 0)


def _distributed(adam: str, *, deferred: bool, **options: Any) -> tuple[Params, Any]:
    model = Params(default=torch.bfloat16)
    config = DistOptConfig(
        accelerator="torch", adam=adam, nonfinite="skip", **{"lr": 0.01, "clip_grad": 1.0, **options}
    )
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
