"""Steps whose check is deferred ([Note: deferred check]), forced on a CPU: every bit as without."""

from __future__ import annotations

import copy
import logging
import math
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt import DistOptConfig, TorchDistributedOptimizer, distribute
from megatron_distopt.comm import Group
from megatron_distopt.errors import NonFiniteGradError
from megatron_distopt.optimizer.deferred import DeferredCheck, deferred_divisor, deferred_norm
from megatron_distopt.optimizer.grad_norm import GradStats
from megatron_distopt.optimizer.step import clip_divisor, finish_deferred_check
from tests.support.models import Params, exact_grads, stepped
from tests.support.refusals import assert_says
from tests.support.spawn import run_ranks

STEPS, BAD = 5, 2
POLICIES = ("raise", "skip", "log")

#: By name: options and dtype. The last ones are those in which the divisor, or what it divides, is another.
CASES: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    **{f"{policy} fp32": ({"nonfinite": policy}, torch.float32) for policy in POLICIES},
    **{f"{policy} bf16 clipped": ({"nonfinite": policy, "clip_grad": 0.3}, torch.bfloat16) for policy in POLICIES},
    "skip constant scale": ({"nonfinite": "skip", "loss_scale": 8.0, "clip_grad": 0.3}, torch.float16),
    "skip 16-bit grads": ({"nonfinite": "skip", "grads_in_fp32": False, "clip_grad": 1e3}, torch.bfloat16),
    "raise 16-bit grads": ({"grads_in_fp32": False}, torch.bfloat16),
    "skip zeros counted": ({"nonfinite": "skip", "count_zeros": True}, torch.bfloat16),
}


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of some steps, one of them bad.

    Args:
        errors: by step, "" for none.
        norms, zeros, updated: of the result of every step that returned one.
        states: after every step that updated: model params, main params, moments, step counts.
        num_skipped: at the end.
    """

    errors: dict[int, str]
    norms: list[float | None]
    zeros: list[int | None]
    updated: list[bool]
    states: list[list[Tensor]]
    num_skipped: int


def train_both(rank: int, size: int) -> dict[str, tuple[Outcome, Outcome]]:
    """By case: without and with a deferred check."""
    return {name: (_train(name, rank, deferred=False), _train(name, rank, deferred=True)) for name in CASES}


def _built(name: str, *, deferred: bool) -> tuple[Params, TorchDistributedOptimizer]:
    options, dtype = CASES[name]
    model = Params(default=dtype)
    optimizer = distribute(model, DistOptConfig(accelerator="torch", lr=0.01, weight_decay=0.1, **options))
    optimizer.sharded.plan = replace(optimizer.sharded.plan, deferred_check=deferred)
    optimizer.sharded._show_flat_params()
    assert optimizer.sharded.defers_check is deferred
    return model, optimizer


def _train(name: str, rank: int, *, deferred: bool) -> Outcome:
    model, optimizer = _built(name, deferred=deferred)
    outcome = Outcome({}, [], [], [], [], 0)
    for step in range(STEPS):
        try:
            result = _step(model, optimizer, rank, step, poison=step == BAD and rank == dist.get_world_size() - 1)
        except NonFiniteGradError as error:
            outcome.errors[step] = str(error)
            outcome.states.append(_everything(optimizer))
            if deferred:  # the bad step is over; this one is made once more
                result = _step(model, optimizer, rank, step, poison=False)
            else:
                continue
        outcome.norms.append(result.grad_norm)
        outcome.zeros.append(result.num_zeros)
        outcome.updated.append(result.updated)
        outcome.states.append(_everything(optimizer))
    return replace(outcome, num_skipped=optimizer.sharded.num_skipped)


def _step(model: Params, optimizer: TorchDistributedOptimizer, rank: int, step: int, *, poison: bool) -> Any:
    optimizer.zero_grad()
    grads = exact_grads(step, 0, rank)
    if poison:
        grads["deep.weight"][1, 2, 3] = float("nan")
    optimizer.scale_loss(model(grads)).backward()
    return stepped(optimizer)


def _everything(optimizer: TorchDistributedOptimizer) -> list[Tensor]:
    sharded = optimizer.sharded
    tensors: list[Any] = [buffer.param for buffer in sharded.buffers] + [run.main for run in sharded.flat_params]
    tensors += [state[key] for state in sharded.inner.state.values() for key in sorted(state)]
    return [tensor.detach().clone() for tensor in tensors]


def _equal(left: list[Tensor], right: list[Tensor]) -> bool:
    """Bit for bit; nan is nan, as after an update with policy "log"."""
    return len(left) == len(right) and all(
        torch.equal(each.view(torch.uint8), other.view(torch.uint8))
        for each, other in zip(map(_flat, left), map(_flat, right), strict=True)
    )


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def outcomes(request: pytest.FixtureRequest) -> list[dict[str, tuple[Outcome, Outcome]]]:
    return run_ranks(train_both, request.param)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("raise")])
def test_step_when_the_check_is_deferred_then_every_bit_is_as_without(outcomes: Any, name: str) -> None:
    for outcome in outcomes:
        now, deferred = outcome[name]
        assert all(map(_equal, deferred.states, now.states))
        assert (deferred.updated, deferred.zeros, deferred.num_skipped) == (now.updated, now.zeros, now.num_skipped)
        # Of the same bits, also where one of them is nan.
        assert repr(deferred.norms) == repr(now.norms)
        assert deferred.errors == now.errors == {}


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("skip")])
def test_step_when_the_policy_is_skip_then_the_bad_step_changes_nothing(outcomes: Any, name: str) -> None:
    for outcome in outcomes:
        deferred = outcome[name][1]
        assert _equal(deferred.states[BAD], deferred.states[BAD - 1])
        assert not _equal(deferred.states[BAD + 1], deferred.states[BAD])
        assert (deferred.updated[BAD], deferred.norms[BAD], deferred.num_skipped) == (False, None, 1)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("raise")])
def test_step_when_the_policy_is_raise_then_the_next_one_raises_on_all_ranks_and_nothing_is_lost(
    outcomes: Any, name: str
) -> None:
    texts = {outcome[name][1].errors[BAD + 1] for outcome in outcomes}
    assert len(texts) == 1
    text = texts.pop()
    assert "in the step before" in text
    assert_says(text, "Invalid gradient: inf. MEGATRON_DISTOPT_NONFINITE=skip leaves such steps out, =log goes on.")
    for outcome in outcomes:
        now, deferred = outcome[name]
        assert list(now.errors) == [BAD] and list(deferred.errors) == [BAD + 1]
        assert "held." in text and "in the step before" not in now.errors[BAD]
        # Before the bad step, after it, after the error, after the step that was made once more.
        assert _equal(deferred.states[BAD], deferred.states[BAD - 1])
        assert _equal(deferred.states[BAD + 1], deferred.states[BAD - 1])
        assert _equal(deferred.states[BAD + 2], now.states[BAD + 1])
        assert deferred.num_skipped == now.num_skipped == 0


def test_step_when_the_policy_is_log_then_goes_on_and_says_it_one_step_later(
    one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = _built("log fp32", deferred=True)
    with caplog.at_level(logging.WARNING, "megatron_distopt"):
        _step(model, optimizer, 0, 0, poison=True)
        assert not caplog.records
        _step(model, optimizer, 0, 1, poison=False)
    (record,) = caplog.records[:1]
    assert_says(
        record.getMessage(),
        "gradient is inf or nan on rank 0: among 5 params from held.wide_weight to held.deep_weight, "
        "in the step before; the update goes on because nonfinite='log'",
    )


def test_settle_when_a_step_was_bad_then_raises_once_and_before_a_next_step(one_rank: None) -> None:
    model, optimizer = _built("raise fp32", deferred=True)
    _step(model, optimizer, 0, 0, poison=True)
    with pytest.raises(NonFiniteGradError, match=r"on rank 0: .*, in the step before\. Must be finite"):
        finish_deferred_check([optimizer.sharded], Group.of())
    finish_deferred_check([optimizer.sharded], Group.of())
    assert _step(model, optimizer, 0, 1, poison=False).updated


@pytest.mark.parametrize("by", ["folder", "state_dict"])
def test_load_when_a_check_is_open_then_it_is_forgotten(by: str, one_rank: None, tmp_path: Path) -> None:
    model, optimizer = _built("raise fp32", deferred=True)
    _step(model, optimizer, 0, 0, poison=False)
    optimizer.save(tmp_path / "saved")
    state = copy.deepcopy(optimizer.state_dict())
    assert not _step(model, optimizer, 0, 1, poison=True).updated
    if by == "folder":
        optimizer.load(tmp_path / "saved")
    else:
        optimizer.load_state_dict(state)
    assert _step(model, optimizer, 0, 2, poison=False).updated


def test_save_when_the_last_step_was_skipped_then_the_checkpoint_has_counted_it(one_rank: None, tmp_path: Path) -> None:
    model, optimizer = _built("skip zeros counted", deferred=True)
    for step in range(2):
        _step(model, optimizer, 0, step, poison=step == 1)
    optimizer.save(tmp_path / "saved")
    other_model, other = _built("skip zeros counted", deferred=True)
    _step(other_model, other, 0, 0, poison=True)  # its check is still open and means nothing after loading
    other.load(tmp_path / "saved")
    assert other.sharded.num_skipped == optimizer.sharded.num_skipped == 1
    assert _equal(_everything(other), _everything(optimizer))


def test_num_skipped_when_it_is_read_between_two_steps_then_the_last_one_counts_once(one_rank: None) -> None:
    model, optimizer = _built("skip constant scale", deferred=True)
    _step(model, optimizer, 0, 0, poison=True)
    assert [optimizer.sharded.num_skipped for _ in range(2)] == [1, 1]
    _step(model, optimizer, 0, 1, poison=True)
    assert optimizer.sharded.num_skipped == 2
    optimizer.sharded.num_skipped = 7  # as loading a checkpoint does
    assert optimizer.sharded.num_skipped == 7


@pytest.mark.parametrize("change", [{"adam": "torch_foreach"}, {"optimizer": "sgd"}, {"loss_scale": "dynamic"}])
def test_defers_check_when_something_decides_on_the_cpu_then_it_is_not(one_rank: None, change: dict[str, Any]) -> None:
    optimizer = distribute(Params(), DistOptConfig(accelerator="torch", **change)).sharded
    optimizer.plan = replace(optimizer.plan, deferred_check=True)
    optimizer._show_flat_params()
    assert optimizer.defers_check is False


def test_defers_check_when_nobody_says_anything_then_a_cpu_decides_at_once(one_rank: None) -> None:
    assert distribute(Params(), DistOptConfig(accelerator="torch")).sharded.defers_check is False


@pytest.mark.parametrize("clip_grad", [0.0, 0.25, 1.0, 3.0, 1e6])
@pytest.mark.parametrize("square", [0.0, 1e-30, 0.7, 9900.0, 3.3e18, math.inf, math.nan])
def test_late_divisor_when_compared_with_python_then_the_same_bits(square: float, clip_grad: float) -> None:
    for divisor in (1.0, 3.0, 65536.0):
        norm = GradStats(square, None, 0).norm(divisor)
        expected = torch.tensor(divisor * clip_divisor(norm, clip_grad), dtype=torch.float32)
        found = deferred_divisor(torch.tensor([square, 0.0, 0.0], dtype=torch.float64), divisor, clip_grad)
        assert torch.equal(torch.as_tensor(found, dtype=torch.float32), expected)


@pytest.mark.parametrize("square", [0.0, 0.5625, 9.0, 2.0**60])  # their roots are exact, whoever takes them
def test_late_norm_when_a_host_uses_it_then_it_is_the_float(square: float) -> None:
    norm = GradStats(square, None, 0).norm(4.0)
    found: Any = deferred_norm(torch.tensor([square, 0.0, 0.0], dtype=torch.float64), 4.0)
    assert found == norm and float(found) == norm and found.item() == norm
    assert "{:.3f}".format(found) == f"{norm:.3f}"  # noqa: UP032 - as forks write it
    assert math.isfinite(found) and max(found, norm + 1) == norm + 1
    assert torch.tensor([found], dtype=torch.float64).tolist() == [norm]


@pytest.mark.parametrize("is_finite", [True, False])
@pytest.mark.parametrize("is_settled", [True, False])
def test_last_step_when_nothing_follows_then_an_error_is_logged_where_it_was_bad(
    is_finite: bool, is_settled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    deferred = DeferredCheck(
        torch.tensor([1.0, 0.0, 0.0 if is_finite else 1.0], dtype=torch.float64), [], counts_zeros=False
    )
    deferred.report_unless_settled()
    if is_settled:
        deferred.settled()
    assert not caplog.messages
    del deferred
    assert len(caplog.messages) == (0 if is_finite or is_settled else 1)
    assert all("inf or nan on other ranks" in message for message in caplog.messages)


def test_last_step_when_the_process_ends_then_the_error_is_logged_at_its_end() -> None:
    program = """
import torch
from megatron_distopt.optimizer.deferred import DeferredCheck
deferred = DeferredCheck(torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64), [], counts_zeros=False)
deferred.report_unless_settled()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert "the gradient of the last step was inf or nan" in ended.stderr
