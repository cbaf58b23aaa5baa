"""Checkpoints that cross precisions of the state and parallel sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import GELU, Linear, Module, Sequential

from megatron_distopt import distribute
from megatron_distopt.optimizer.low_precision.low_precision_tensor import Precision
from tests.support.facts import Facts, facts_of
from tests.support.models import fitted

PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision("remainder", "bfloat16", "bfloat16"),
    "remainder": Precision("remainder", "float32", "int8"),
    "int8": Precision("float32", "int8", "int8"),
    "bf16 param": Precision("bfloat16", "bfloat16", "int8"),
}
SIZES = (1, 2)
#: Each precision is saved at one of the sizes.
SAVED = tuple((name, SIZES[number % 2]) for number, name in enumerate(PRECISIONS))
#: From a precision at a size to another: each into itself at the same size and into another one.
#: What a checkpoint holds does not depend on where it goes, so not every pair is needed.
PAIRS = tuple(
    (one, before, *SAVED[(number + step) % len(SAVED)])
    for step in (0, 3)
    for number, (one, before) in enumerate(SAVED)
)
#: Relative errors that a precision allows: of main params and first moments to those of their
#: block's largest, which are rounded to nearest when loaded.
ERRORS = {"float32": 0.0, "remainder": 0.0, "bfloat16": 2.0**-8, "int8": 2.0**-5}
Values = dict[str, dict[str, Tensor]]


def _build(name: str, group: Any) -> tuple[Module, Any]:
    torch.manual_seed(0)
    model = Sequential(Linear(24, 70), GELU(), Linear(70, 50), GELU(), Linear(50, 8)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, distribute(model, optimizer, process_group=group, **vars(PRECISIONS[name]))


def _train(model: Any, optimizer: Any, steps: range) -> list[float]:
    return [fitted(model, optimizer, step) for step in steps]


def _values(optimizer: Any) -> Values:
    """Collective: everything that the state holds, by the number of the param and the kind; empty
    but on rank 0."""
    whole = optimizer.full_state_dict()
    return {
        str(number): {kind: value.clone() for kind, value in state.items() if kind != "step"}
        for number, state in whole.get("state", {}).items()
    }


def _groups() -> dict[int, Any]:
    return {size: dist.new_group(list(range(size))) for size in SIZES}


def collect_facts(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Saves every precision at every size, and loads all pairs; returns what was saved, loaded and
    trained on."""
    groups, saved, losses = _groups(), dict[Any, Values](), dict[Any, list[float]]()
    for name, ranks in SAVED:
        if rank < ranks:
            model, optimizer = _build(name, groups[ranks])
            _train(model, optimizer, range(4))
            optimizer.save(f"{folder}/{name}-{ranks}")
            saved[name, ranks] = _values(optimizer)
            losses[name, ranks] = _train(model, optimizer, range(4, 6))
    dist.barrier()
    loaded, resumed = dict[Any, Values](), dict[Any, list[float]]()
    for pair in PAIRS:
        one, before, other, ranks = pair
        if rank < ranks:
            model, optimizer = _build(other, groups[ranks])
            optimizer.load(f"{folder}/{one}-{before}")
            loaded[pair] = _values(optimizer)
            resumed[pair] = _train(model, optimizer, range(4, 6))
    return {"saved": saved, "losses": losses, "loaded": loaded, "resumed": resumed}


facts = facts_of(collect_facts, max(SIZES), seconds=200)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "{} at {} to {} at {}".format(*pair))
def test_load_when_precision_and_size_differ_then_rounded_anew_and_training_goes_on(
    facts: Facts, pair: tuple[str, int, str, int]
) -> None:
    one, before, other, ranks = pair
    saved, loaded, precision = (
        facts.first["saved"][one, before],
        facts.first["loaded"][pair],
        PRECISIONS[other],
    )
    assert saved.keys() == loaded.keys() and len(saved) == 6
    for number, state in saved.items():
        assert state.keys() == loaded[number].keys()
        for kind, value in state.items():
            dtype = getattr(precision, f"{kind}_dtype", precision.main_params_dtype)
            is_kept = vars(PRECISIONS[one]) == vars(precision) and before == ranks
            # the root is rounded
            error = 0.0 if is_kept else ERRORS[dtype] * (2 if kind == "exp_avg_sq" else 1)
            difference = (loaded[number][kind].float() - value.float()).abs()
            assert float(difference.max()) <= error * float(value.abs().max()), (number, kind)
    expected, resumed = facts.first["losses"][one, before], facts.first["resumed"][pair]
    if vars(PRECISIONS[one]) == vars(PRECISIONS[other]) and before == ranks:
        assert resumed == expected  # to the bit
    # A state that is lost or misplaced changes these losses by more than 0.1.
    assert resumed == pytest.approx(expected, abs=0.02)
