"""Weights that are changed beside main params as remainders: what reads or loads meanwhile; what is
refused.

What users do between steps that comes to the same as with fp32 main params is in
tests/differential/test_idioms.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import GELU, Linear, Sequential

from megatron_distopt import distribute
from megatron_distopt.errors import DistOptError
from megatron_distopt.hosts.watches.watched_params import RemainderWatch
from tests.support.facts import Facts, facts_of
from tests.support.models import fitted

Act = Callable[[Sequential, Any], None]
REMAINDER = {"main_params_dtype": "remainder"}
EIGHT_BITS = {"exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"}
#: They must be equal to the bit, because a remainder is exact.
PAIRS: tuple[dict[str, str], ...] = ({}, REMAINDER)
STEPS = 5


def _train(options: dict[str, str], rank: int, *acts: Act) -> tuple[list[float], list[Tensor]]:
    """Something is done after the third step."""
    torch.manual_seed(0)
    model = Sequential(Linear(64, 100), GELU(), Linear(100, 8)).bfloat16()
    optimizer = distribute(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), accelerator="torch", **options
    )
    losses = []
    for step in range(STEPS):
        losses.append(fitted(model, optimizer, step * 10 + rank, rows=64))
        for act in acts if step == 2 else ():
            act(model, optimizer)
    return losses, [param.detach().clone() for param in model.parameters()]


def _answer(rank: int, *acts: Act) -> str:
    """What remainders say."""
    try:
        _train(REMAINDER, rank, *acts)
    except DistOptError as error:
        return str(error)
    return "nothing"


def _halve(model: Sequential, optimizer: Any) -> None:
    with torch.no_grad():
        model[0].weight.mul_(0.5)


def _replace(model: Sequential, optimizer: Any) -> None:
    model[0].weight.data = model[0].weight.detach() * 0.5


def _reload(model: Sequential, optimizer: Any) -> None:
    optimizer.reload_model_params()


def _halve_and_load_without_main_params(model: Sequential, optimizer: Any) -> None:
    """A state as torch's own AdamW has it."""
    state = optimizer.state_dict()
    for values in state["state"].values():
        values.pop("main_param", None)
    _halve(model, optimizer)
    optimizer.load_state_dict(state)


Use = Callable[[Any, Path], object]
READS: dict[str, Use] = {
    "state_dict": lambda optimizer, _: optimizer.state_dict(),
    "full_state_dict": lambda optimizer, _: optimizer.full_state_dict(),
    "save": lambda optimizer, folder: optimizer.save(folder),
}


def _refused(use: Use, folder: Path, words: str) -> Act:
    def act(model: Sequential, optimizer: Any) -> None:
        with pytest.raises(DistOptError, match=words):
            use(optimizer, folder)

    return act


def collect_facts(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """What is answered to loads and reads after weights were changed, by name."""
    part = _halve_and_load_without_main_params
    answers: dict[str, Any] = {
        "loaded": _answer(rank, part),
        "reloaded": [_train(options, rank, part, _reload)[0] for options in PAIRS],
    }
    for name, read in READS.items():
        answers[name] = _answer(
            rank, _replace, _refused(read, folder / "new", "reload_model_params")
        )
    return answers


facts = facts_of(collect_facts, 2)


def test_remainders_when_read_or_loaded_after_a_silent_change_then_refused_until_told(
    facts: Facts,
) -> None:
    for answers in facts.by_rank:
        one, other = answers["reloaded"]
        assert one == other
        for name in ("loaded", *READS):
            assert "reload_model_params()" in answers[name], name


def test_watch_of_a_megatron_when_one_element_is_written_then_refused_until_it_is_told(
    one_rank: None,
) -> None:
    model = Sequential(Linear(33, 41), Linear(41, 1)).bfloat16()
    optimizer = distribute(model, torch.optim.AdamW(model.parameters()), **REMAINDER)
    watch = RemainderWatch(optimizer.sharded, dict(model.named_parameters()))
    for values in (param.detach().view(-1) for param in model.parameters()):
        for place in (0, len(values) // 2, len(values) - 1):
            watch.check()
            values[place] += 1
            with pytest.raises(DistOptError, match="reload_model_params"):
                watch.check()
            watch.forget()


@pytest.mark.parametrize(
    ("optimizer", "options", "named"),
    [
        (torch.optim.SGD, REMAINDER, "SGD"),
        (torch.optim.Adagrad, EIGHT_BITS, "Adagrad"),
        (lambda params: torch.optim.AdamW(params, amsgrad=True), EIGHT_BITS, "amsgrad"),
        (torch.optim.AdamW, {**EIGHT_BITS, "adam": "apex"}, "apex"),
        (torch.optim.AdamW, {"exp_avg_dtype": "int4"}, "int4"),
        (torch.optim.AdamW, {"main_params_dtype": "float16"}, "float16"),
        (torch.optim.AdamW, {"exp_avg_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_low_precision_when_it_cannot_be_had_then_the_error_says_what_can(
    optimizer: Any, options: dict[str, str], named: str, one_rank: None
) -> None:
    model = Linear(4, 4).bfloat16()
    with pytest.raises(DistOptError, match=named):
        distribute(model, optimizer(model.parameters()), **options)


@pytest.mark.parametrize("form", ["remainder", "bfloat16"])
def test_main_params_when_params_are_fp16_then_forms_of_bf16_are_refused(
    form: str, one_rank: None
) -> None:
    model = Linear(4, 4).half()
    with pytest.raises(DistOptError, match="main_params_dtype=float32"):
        distribute(
            model,
            torch.optim.AdamW(model.parameters()),
            main_params_dtype=form,
            loss_scale="dynamic",
        )
