"""What users do between steps, with state in low precision: as with fp32 main params, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import GELU, Linear, Sequential

from megatron_distopt import distribute
from megatron_distopt.errors import DistOptError
from tests.support.spawn import run_ranks

Act = Callable[[int, Sequential, Any], None]
REMAINDER = {"main_params_dtype": "remainder"}
EIGHT_BITS = {"exp_avg_dtype": "float8_e4m3fn", "exp_avg_sq_dtype": "int8"}
#: Pairs that must be equal to the bit, because a remainder is exact.
PAIRS = (({}, REMAINDER), (EIGHT_BITS, {**REMAINDER, **EIGHT_BITS}))
STEPS = 6


def _halve(model: Sequential) -> None:
    with torch.no_grad():
        model[0].weight.mul_(0.5)


def _change_and_reload(step: int, model: Sequential, optimizer: Any) -> None:
    if step == 2:
        _halve(model)
        optimizer.reload_model_params()


def _read_detached(step: int, model: Sequential, optimizer: Any) -> None:
    model[0].weight.detach().sum()


def _change_before_the_first_step(step: int, model: Sequential, optimizer: Any) -> None:
    if step == -1:
        _halve(model)


def _freeze_for_two_steps(step: int, model: Sequential, optimizer: Any) -> None:
    if step in (2, 4):
        model[0].weight.requires_grad_(step == 4)


def _leave_out_a_gradient(step: int, model: Sequential, optimizer: Any) -> None:
    for param in model[0].parameters():
        param.requires_grad_(step % 2 == 0)


def _decay_the_rate(step: int, model: Sequential, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def _go_back(first: str) -> Act:
    """Loads the states of two steps before, the named one first; "optimizer" alone leaves the weights."""
    kept: dict[str, Any] = {}

    def act(step: int, model: Sequential, optimizer: Any) -> None:
        if step == 2:
            kept.update(model=copy.deepcopy(model.state_dict()), optimizer=copy.deepcopy(optimizer.state_dict()))
        if step == 4 and first == "model":
            model.load_state_dict(kept["model"])
        if step == 4:
            optimizer.load_state_dict(kept["optimizer"])
        if step == 4 and first == "optimizer":
            model.load_state_dict(kept["model"])

    return act


EQUAL: dict[str, Act] = {
    "changes weights and says so": _change_and_reload,
    "reads weights": _read_detached,
    "changes weights before the first step": _change_before_the_first_step,
    "freezes": _freeze_for_two_steps,
    "leaves out gradients": _leave_out_a_gradient,
    "schedules the rate": _decay_the_rate,
    "loads model and optimizer": _go_back("model"),
    "loads optimizer and model": _go_back("optimizer"),
    "loads the optimizer alone": _go_back("alone"),
}


def _train(act: Act, options: dict[str, str], rank: int) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    model = Sequential(Linear(64, 100), GELU(), Linear(100, 8)).bfloat16()
    optimizer = distribute(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)
    losses = []
    act(-1, model, optimizer)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step * 10 + rank)
        inputs, targets = (torch.randn(64, width, generator=generator).bfloat16() for width in (64, 8))
        loss = (model(inputs) - targets).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
        act(step, model, optimizer)
    return losses, [param.detach().clone() for param in model.parameters()]


def compare_all(rank: int, size: int) -> dict[str, list[bool]]:
    """By idiom, whether each of `PAIRS` is equal."""
    found = {}
    for name, act in EQUAL.items():
        pairs = [[_train(act, options, rank) for options in pair] for pair in PAIRS]
        found[name] = [one[0] == two[0] and all(map(torch.equal, one[1], two[1])) for one, two in pairs]
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, list[bool]]]:
    return run_ranks(compare_all, 2)


@pytest.mark.parametrize("name", EQUAL)
def test_remainders_when_a_user_acts_between_steps_then_training_is_that_of_fp32(
    found: list[dict[str, list[bool]]], name: str
) -> None:
    assert [of_rank[name] for of_rank in found] == [[True, True]] * 2


def refuse_on_one(rank: int, size: int) -> list[str]:
    """What each way to change weights of one rank is answered with."""

    def _write_on_the_last(step: int, model: Sequential, optimizer: Any) -> None:
        if step == 2 and rank == size - 1:
            _halve(model)

    def _hold_data(step: int, model: Sequential, optimizer: Any) -> None:
        if step == 2:
            model[0].weight.data.mul_(0.5)

    answers = []
    for act in (_write_on_the_last, _hold_data):
        try:
            _train(act, REMAINDER, rank)
            answers.append("trained")
        except DistOptError as error:
            answers.append(str(error))
        dist.barrier()
    return answers


def test_remainders_when_weights_are_changed_silently_then_all_ranks_say_what_to_call() -> None:
    for answers in run_ranks(refuse_on_one, 2):
        for answer in answers:
            assert "0.weight" in answer and "reload_model_params()" in answer and "main_params_dtype" in answer


@pytest.mark.parametrize(
    ("optimizer", "options", "named"),
    [
        (torch.optim.SGD, REMAINDER, "SGD"),
        (torch.optim.Adagrad, EIGHT_BITS, "Adagrad"),
        (lambda params: torch.optim.AdamW(params, amsgrad=True), EIGHT_BITS, "amsgrad"),
        (torch.optim.AdamW, {**EIGHT_BITS, "adam": "apex"}, "apex"),
        (torch.optim.AdamW, {"exp_avg_dtype": "int4"}, "int4"),
        (torch.optim.AdamW, {"main_params_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_low_precision_when_it_cannot_be_had_then_the_error_says_what_can(
    optimizer: Any, options: dict[str, str], named: str, one_rank: None
) -> None:
    model = Linear(4, 4).bfloat16()
    with pytest.raises(DistOptError, match=named):
        distribute(model, optimizer(model.parameters()), **options)


@pytest.mark.parametrize("form", ["remainder", "bfloat16"])
def test_main_params_when_params_are_fp16_then_forms_of_bf16_are_refused(form: str, one_rank: None) -> None:
    model = Linear(4, 4).half()
    with pytest.raises(DistOptError, match="float16"):
        distribute(model, torch.optim.AdamW(model.parameters()), main_params_dtype=form, loss_scale="dynamic")
