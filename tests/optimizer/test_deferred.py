"""Gradients that are inf or nan on one rank: what all ranks do about it, at once or in the next
step.

A deferred check ([Note: deferred check]) is forced on a CPU: every bit is as without.
"""

from __future__ import annotations

import copy
import logging
import math
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import product
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
from tests.support.facts import Facts, facts_of
from tests.support.models import Params, exact_grads, stepped

STEPS, BAD = 4, 1

#: By name: options and dtype. The last ones are those in which the divisor, or what it divides, is
#: another.
CASES: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "raise fp32": ({"nonfinite": "raise"}, torch.float32),
    "raise bf16 clipped": ({"nonfinite": "raise", "clip_grad": 0.3}, torch.bfloat16),
    "log fp32": ({"nonfinite": "log"}, torch.float32),
    "log bf16 clipped": ({"nonfinite": "log", "clip_grad": 0.3}, torch.bfloat16),
    "skip constant scale": (
        {"nonfinite": "skip", "loss_scale": 8.0, "clip_grad": 0.3},
        torch.float16,
    ),
    "skip 16-bit grads": (
        {"nonfinite": "skip", "grads_in_fp32": False, "clip_grad": 1e3},
        torch.bfloat16,
    ),
    "skip zeros counted": ({"nonfinite": "skip", "count_zeros": True}, torch.bfloat16),
}
#: Their check is never deferred.
_DYNAMIC = {"loss_scale": "dynamic", "hysteresis": 1}
DYNAMIC: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "dynamic": ({**_DYNAMIC, "initial_loss_scale": 64.0}, torch.float16),
    "dynamic at its minimum": ({**_DYNAMIC, "initial_loss_scale": 1.0}, torch.float16),
}


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of some steps, one of them bad."""

    errors: dict[int, str]  # by step, "" for none
    norms: list[float | None]  # of the result of every step that returned one
    zeros: list[int | None]
    updated: list[bool]
    # after every step that updated: model params, main params, moments, step counts
    states: list[list[Tensor]]
    num_skipped: int  # at the end
    scale: float  # likewise


def collect_facts(rank: int, size: int) -> dict[str, tuple[Outcome, ...]]:
    """By case: without and with a deferred check; only without where the loss scale is dynamic."""
    return {
        name: tuple(
            _train(name, rank, deferred=deferred)
            for deferred in (False, True)[: 1 + (name in CASES)]
        )
        for name in (*CASES, *DYNAMIC)
    }


def _built(name: str, *, deferred: bool) -> tuple[Params, TorchDistributedOptimizer]:
    options, dtype = {**CASES, **DYNAMIC}[name]
    model = Params(default=dtype)
    optimizer = distribute(
        model, DistOptConfig(accelerator="torch", lr=0.01, weight_decay=0.1, **options)
    )
    optimizer.sharded.plan = replace(optimizer.sharded.plan, deferred_check=deferred)
    optimizer.sharded.show_flat_params()
    assert optimizer.sharded.defers_check is deferred
    return model, optimizer


def _train(name: str, rank: int, *, deferred: bool) -> Outcome:
    model, optimizer = _built(name, deferred=deferred)
    outcome = Outcome({}, [], [], [], [], 0, 0.0)
    for step in range(STEPS):
        try:
            result = _step(
                model,
                optimizer,
                rank,
                step,
                poison=step == BAD and rank == dist.get_world_size() - 1,
            )
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
    scale = float(optimizer.sharded.loss_scale.scale)
    return replace(outcome, num_skipped=optimizer.sharded.num_skipped, scale=scale)


def _step(
    model: Params, optimizer: TorchDistributedOptimizer, rank: int, step: int, *, poison: bool
) -> Any:
    optimizer.zero_grad()
    grads = exact_grads(step, 0, rank)
    if poison:
        grads["deep.weight"][1, 2, 3] = float("nan")
        grads["scale"][0] = float("inf")
    optimizer.scale_loss(model(grads)).backward()
    return stepped(optimizer)


def _everything(optimizer: TorchDistributedOptimizer) -> list[Tensor]:
    sharded = optimizer.sharded
    tensors: list[Any] = [buffer.param for buffer in sharded.buffers] + [
        run.main for run in sharded.flat_params
    ]
    tensors += [state[key] for state in sharded.inner.state.values() for key in sorted(state)]
    return [tensor.detach().clone() for tensor in tensors]


def _equal(left: list[Tensor], right: list[Tensor]) -> bool:
    """Bit for bit; nan is nan, as after an update with policy "log"."""
    return len(left) == len(right) and all(
        torch.equal(each.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        for each, other in zip(left, right, strict=True)
    )


facts = facts_of(collect_facts, 2)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("raise")])
def test_step_when_the_check_is_deferred_then_every_bit_is_as_without(
    facts: Facts, name: str
) -> None:
    for now, deferred in facts[name]:
        assert all(map(_equal, deferred.states, now.states))
        assert (deferred.updated, deferred.zeros, deferred.num_skipped) == (
            now.updated,
            now.zeros,
            now.num_skipped,
        )
        # Of the same bits, also where one of them is nan.
        assert repr(deferred.norms) == repr(now.norms)
        assert deferred.errors == now.errors == {}


@pytest.mark.parametrize("name", [*(name for name in CASES if name.startswith("skip")), "dynamic"])
def test_step_when_the_policy_is_skip_then_the_bad_step_changes_nothing(
    facts: Facts, name: str
) -> None:
    for outcome in facts.by_rank:
        for found in outcome[name]:
            assert _equal(found.states[BAD], found.states[BAD - 1])
            assert not _equal(found.states[BAD + 1], found.states[BAD])
            assert (found.updated[BAD], found.norms[BAD], found.num_skipped) == (False, None, 1)
        assert (
            outcome["dynamic"][0].scale == 32.0 and outcome["skip constant scale"][0].scale == 8.0
        )


@pytest.mark.parametrize("name", ["raise fp32", "raise bf16 clipped", "dynamic at its minimum"])
def test_step_when_the_policy_is_raise_then_all_ranks_name_rank_and_params_and_nothing_changes(
    facts: Facts, name: str
) -> None:
    # The poison was put in on the last rank; after the reduce-scatter the owners of those elements
    # see it.
    [text] = {outcome[0].errors[BAD] for outcome in facts[name]}
    assert all(
        part in text
        for part in (
            "on rank ",
            "held.deep_weight",
            "held.scale",
            "MEGATRON_DISTOPT_NONFINITE=skip",
        )
    )
    for outcome in facts[name]:
        assert _equal(outcome[0].states[BAD], outcome[0].states[BAD - 1])


def test_step_when_the_policy_is_log_then_updates_all_the_same(facts: Facts) -> None:
    for outcome in facts["log fp32"]:
        assert outcome[0].updated[BAD] is True
        assert not _equal(outcome[0].states[BAD], outcome[0].states[BAD - 1])


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("raise")])
def test_step_when_the_policy_is_raise_then_the_next_one_raises_on_all_ranks_and_nothing_is_lost(
    facts: Facts, name: str
) -> None:
    texts = {outcome[1].errors[BAD + 1] for outcome in facts[name]}
    assert len(texts) == 1
    text = texts.pop()
    assert "in the step before" in text and "MEGATRON_DISTOPT_NONFINITE=skip" in text
    for now, deferred in facts[name]:
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
    message = caplog.messages[0]
    assert (
        "on rank 0: among 5 params from held.wide_weight to held.deep_weight, in the step before"
        in message
    )


def test_settle_when_a_step_was_bad_then_raises_once_and_before_a_next_step(one_rank: None) -> None:
    model, optimizer = _built("raise fp32", deferred=True)
    _step(model, optimizer, 0, 0, poison=True)
    with pytest.raises(NonFiniteGradError, match=r"on rank 0: .*, in the step before\. Look at"):
        finish_deferred_check([optimizer.sharded], Group.of())
    finish_deferred_check([optimizer.sharded], Group.of())
    assert _step(model, optimizer, 0, 1, poison=False).updated


@pytest.mark.parametrize("by", ["folder", "state_dict"])
def test_load_when_a_check_is_open_then_it_is_forgotten(
    by: str, one_rank: None, tmp_path: Path
) -> None:
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


def test_save_when_the_last_step_was_skipped_then_the_checkpoint_has_counted_it(
    one_rank: None, tmp_path: Path
) -> None:
    model, optimizer = _built("skip zeros counted", deferred=True)
    for step in range(2):
        _step(model, optimizer, 0, step, poison=step == 1)
    optimizer.save(tmp_path / "saved")
    other_model, other = _built("skip zeros counted", deferred=True)
    # its check is still open and means nothing after loading
    _step(other_model, other, 0, 0, poison=True)
    other.load(tmp_path / "saved")
    assert other.sharded.num_skipped == optimizer.sharded.num_skipped == 1
    assert _equal(_everything(other), _everything(optimizer))


def test_num_skipped_when_it_is_read_between_two_steps_then_the_last_one_counts_once(
    one_rank: None,
) -> None:
    model, optimizer = _built("skip constant scale", deferred=True)
    _step(model, optimizer, 0, 0, poison=True)
    assert [optimizer.sharded.num_skipped for _ in range(2)] == [1, 1]
    _step(model, optimizer, 0, 1, poison=True)
    assert optimizer.sharded.num_skipped == 2
    optimizer.sharded.num_skipped = 7  # as loading a checkpoint does
    assert optimizer.sharded.num_skipped == 7


@pytest.mark.parametrize(
    "change", [{"adam": "torch_foreach"}, {"optimizer": "sgd"}, {"loss_scale": "dynamic"}]
)
def test_defers_check_when_something_decides_on_the_cpu_then_it_is_not(
    one_rank: None, change: dict[str, Any]
) -> None:
    optimizer = distribute(Params(), DistOptConfig(accelerator="torch", **change)).sharded
    optimizer.plan = replace(optimizer.plan, deferred_check=True)
    optimizer.show_flat_params()
    assert optimizer.defers_check is False


def test_late_divisor_when_compared_with_python_then_the_same_bits() -> None:
    squares, clips = (
        (0.0, 1e-30, 0.7, 9900.0, 3.3e18, math.inf, math.nan),
        (0.0, 0.25, 1.0, 3.0, 1e6),
    )
    for square, clip_grad, divisor in product(squares, clips, (1.0, 3.0, 65536.0)):
        norm = GradStats(square, None, 0).norm(divisor)
        expected = torch.tensor(divisor * clip_divisor(norm, clip_grad), dtype=torch.float32)
        found = deferred_divisor(
            torch.tensor([square, 0.0, 0.0], dtype=torch.float64), divisor, clip_grad
        )
        assert torch.equal(torch.as_tensor(found, dtype=torch.float32), expected)


def test_late_norm_when_a_host_uses_it_then_it_is_the_float() -> None:
    for square in (0.0, 0.5625, 9.0, 2.0**60):  # their roots are exact, whoever takes them
        norm = GradStats(square, None, 0).norm(4.0)
        found: Any = deferred_norm(torch.tensor([square, 0.0, 0.0], dtype=torch.float64), 4.0)
        assert found == norm and float(found) == norm and found.item() == norm
        assert "{:.3f}".format(found) == f"{norm:.3f}"  # noqa: UP032 - as forks write it
        assert math.isfinite(found) and max(found, norm + 1) == norm + 1
        assert torch.tensor([found], dtype=torch.float64).tolist() == [norm]


@pytest.mark.parametrize(
    ("num_nonfinite", "is_settled", "num_messages"),
    [(0.0, False, 0), (1.0, True, 0), (1.0, False, 1)],
)
def test_last_step_when_nothing_follows_then_an_error_is_logged_where_it_was_bad(
    num_nonfinite: float, is_settled: bool, num_messages: int, caplog: pytest.LogCaptureFixture
) -> None:
    deferred = DeferredCheck(
        torch.tensor([1.0, 0.0, num_nonfinite], dtype=torch.float64), [], counts_zeros=False
    )
    deferred.report_unless_settled()
    if is_settled:
        deferred.close()
    assert not caplog.messages
    del deferred
    assert ["inf or nan on other ranks" in message for message in caplog.messages] == [
        True
    ] * num_messages


def test_last_step_when_the_process_ends_then_the_error_is_logged_at_its_end() -> None:
    program = """
import torch
from megatron_distopt.optimizer.deferred import DeferredCheck
deferred = DeferredCheck(torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64), [], counts_zeros=False)
deferred.report_unless_settled()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    assert "The gradient of the last step was inf or nan" in ended.stderr
