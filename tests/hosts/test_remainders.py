"""Weights that are changed beside main params as remainders: what fails and what reads meanwhile; what is refused.

What users do between steps that comes to the same as with fp32 main params is in tests/differential/test_idioms.py.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
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


def _torch_state_without_main_params(optimizer: Any) -> dict[str, Any]:
    """As torch's own AdamW has it."""
    state = optimizer.state_dict()
    for values in state["state"].values():
        values.pop("main_param", None)
    return state


#: By what is given: loads that are refused.
FAILED: dict[str, Callable[[Any, Path], None]] = {
    "a folder without a checkpoint": lambda optimizer, folder: optimizer.load(folder / "none"),
    "a damaged checkpoint": lambda optimizer, folder: optimizer.load(folder / "damaged"),
    "a state dict of another model": lambda optimizer, folder: optimizer.load_state_dict(
        {"state": {}, "param_groups": [{"params": [0]}]}
    ),
}
#: By name: what leaves weights changed and main params as they were.
CHANGES: dict[str, Callable[[Sequential], None]] = {
    "written in place": _halve,
    "replaced": lambda model: setattr(model[0].weight, "data", model[0].weight.detach() * 0.5),
}


def _change_and_fail(load: str, change: str, folder: Path, *, reloads: bool) -> Act:
    """After two steps, on all ranks."""

    def act(step: int, model: Sequential, optimizer: Any) -> None:
        if step == 2:
            CHANGES[change](model)
            with pytest.raises(DistOptError):
                FAILED[load](optimizer, folder)
        if step == 2 and reloads:
            optimizer.reload_model_params()

    return act


def _leave_damaged(rank: int, folder: Path) -> None:
    """Collective: a checkpoint of the model with one bit flipped."""

    def act(step: int, model: Sequential, optimizer: Any) -> None:
        if step == 2:
            optimizer.save(folder)

    _train(act, {}, rank)
    if rank == 0:
        path = sorted(folder.glob("*.distcp"))[-1]
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    dist.barrier()


def _trained_or_refused(act: Act, options: dict[str, str], rank: int) -> Any:
    try:
        return _train(act, options, rank)
    except DistOptError as error:
        return str(error)


#: By load and change: whether one of `PAIRS` is equal with a reload, and what remainders answer without one.
Failed = dict[tuple[str, str], tuple[bool, Any]]


def fail_to_load(rank: int, folder: Path) -> Failed:
    """Collective."""
    _leave_damaged(rank, folder / "damaged")
    found = {}
    for load, (change, pair) in product(FAILED, zip(CHANGES, PAIRS, strict=True)):
        told = _change_and_fail(load, change, folder, reloads=True)
        one, two = (_train(told, options, rank) for options in pair)
        silent = _change_and_fail(load, change, folder, reloads=False)
        are_equal = one[0] == two[0] and all(map(torch.equal, one[1], two[1]))
        found[load, change] = are_equal, _trained_or_refused(silent, REMAINDER, rank)
    return found


def _change_and_load_without_main_params(*, reloads: bool) -> Act:
    def act(step: int, model: Sequential, optimizer: Any) -> None:
        if step == 2:
            state = _torch_state_without_main_params(optimizer)
            _halve(model)
            optimizer.load_state_dict(state)
        if step == 2 and reloads:
            optimizer.reload_model_params()

    return act


READS: dict[str, Callable[[Any, Path], object]] = {
    "state_dict": lambda optimizer, folder: optimizer.state_dict(),
    "full_state_dict": lambda optimizer, folder: optimizer.full_state_dict(),
    "save": lambda optimizer, folder: optimizer.save(folder),
}


def read_changed(rank: int, folder: Path) -> dict[str, Any]:
    """What remainders answer where the state is loaded in part or read after a silent change."""
    found = {
        "loaded": _trained_or_refused(_change_and_load_without_main_params(reloads=False), REMAINDER, rank),
        "reloaded": [
            _train(_change_and_load_without_main_params(reloads=True), options, rank)[0] for options in PAIRS[0]
        ],
    }
    for name, read in READS.items():

        def act(step: int, model: Sequential, optimizer: Any, read: Callable[[Any, Path], object] = read) -> None:
            if step == 2:
                CHANGES["replaced"](model)
                with pytest.raises(DistOptError, match="reload_model_params"):
                    read(optimizer, folder)

        found[name] = _trained_or_refused(act, REMAINDER, rank)
    return found


def change_all(rank: int, size: int, folder: Path) -> tuple[Failed, dict[str, Any]]:
    return fail_to_load(rank, folder), read_changed(rank, folder)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Failed, dict[str, Any]]]:
    return run_ranks(change_all, 2, tmp_path_factory.mktemp("changed"))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("load", FAILED)
def test_remainders_when_a_load_fails_after_weights_were_changed_then_the_change_is_not_forgotten(
    changed: list[tuple[Failed, dict[str, Any]]], load: str, change: str
) -> None:
    for failed, _ in changed:
        is_equal, answer = failed[load, change]
        assert is_equal
        assert "0.weight" in answer and "reload_model_params()" in answer


def test_remainders_when_the_state_is_read_or_loaded_in_part_after_a_silent_change_then_refused_until_it_is_told(
    changed: list[tuple[Failed, dict[str, Any]]],
) -> None:
    for _, answers in changed:
        one, other = answers["reloaded"]
        assert one == other
        for name in ("loaded", *READS):
            assert "reload_model_params()" in answers[name], name


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
