"""A state of another class of optimizer is refused, in whichever way it comes; the same class with
other options, and Adam in whichever form, is taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from megatron_distopt import TorchDistributedOptimizer, distribute
from megatron_distopt.errors import CheckpointError
from tests.support.facts import outcomes
from tests.support.models import Params, train_params
from tests.support.published import pytorch_optimizer
from tests.support.spawn import run_ranks
from tests.support.values import from_first

BUILDS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": AdamW,
    "Adam": lambda params: Adam(params, foreach=True),
    "amsgrad": lambda params: AdamW(params, amsgrad=True),
    "RAdam": RAdam,
    "NAdam": NAdam,
    "Adamax": Adamax,
    "RMSprop": RMSprop,
    "RMSprop, momentum": lambda params: RMSprop(params, momentum=0.5, centered=True),
    "Adagrad": Adagrad,
    "Adadelta": Adadelta,
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01),
    "SGD, momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "Lion": pytorch_optimizer.Lion,
}
#: Those that share a state.
CLASS_OF = {name: name.partition(",")[0] for name in BUILDS} | dict.fromkeys(
    ("AdamW", "Adam", "amsgrad"), "Adam"
)


def _made(name: str, steps: int = 0) -> tuple[Params, TorchDistributedOptimizer]:
    model = Params()
    said = "elements" if name == "Lion" else None
    optimizer = distribute(model, BUILDS[name](model.groups()), updates=said)
    train_params(model, optimizer, range(steps))
    return model, optimizer


def _torchs_own(name: str) -> dict[str, Any]:
    model = Params()
    optimizer = BUILDS[name](model.groups())
    train_params(model, optimizer, [9])
    return optimizer.state_dict()


def _is_refused(
    model: Params, optimizer: TorchDistributedOptimizer, load: Callable[[Any], None]
) -> bool:
    """Whether a run refuses it; nothing is changed then, and else it makes a step."""
    weights = [param.detach().clone() for param in model.parameters()]
    try:
        load(optimizer)
    except CheckpointError:
        assert all(map(torch.equal, weights, model.parameters()))
        return True
    train_params(model, optimizer, [9])
    return False


@pytest.mark.usefixtures("one_rank")
def test_load_when_the_state_is_of_another_class_then_refused_in_every_way(tmp_path: Path) -> None:
    ways: dict[tuple[str, str], Callable[[Any], None]] = {}
    for saved in BUILDS:
        _, optimizer = _made(saved, steps=2)
        optimizer.save(tmp_path / saved)
        state, own = optimizer.state_dict(), _torchs_own(saved)
        ways[saved, "folder"] = lambda run, saved=saved: run.load(tmp_path / saved)  # type: ignore[misc]
        ways[saved, "dict"] = lambda run, state=state: run.load_state_dict(state)  # type: ignore[misc]
        ways[saved, "torch's"] = lambda run, own=own: run.load_state_dict(own)  # type: ignore[misc]
    wrong = []
    for name in BUILDS:
        model, optimizer = _made(name, steps=1)
        for (saved, way), load in ways.items():
            is_refused = _is_refused(model, optimizer, load)
            # SGD without momentum has no state: main params are taken, and all begins anew.
            is_empty = saved == "SGD" and way == "folder"
            if is_refused == (CLASS_OF[saved] == CLASS_OF[name] or is_empty):
                wrong.append((saved, name, way))
            if not is_refused:
                model, optimizer = _made(name, steps=1)
    assert wrong == []


@pytest.mark.usefixtures("one_rank")
def test_folder_when_no_param_was_updated_then_another_class_begins_from_its_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = _made("SGD", steps=2)
    optimizer.save(tmp_path / "sgd")
    other, adamw = _made("AdamW")
    adamw.load(tmp_path / "sgd")
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert adamw.param_groups[0]["lr"] == 1e-3 and "begins anew" in caplog.text


def test_error_when_classes_differ_then_it_names_both_and_what_to_do(tmp_path: Path) -> None:
    found = run_ranks(_refusals, 2, tmp_path)
    assert found == [{"folder": "", "full state": "", "DCP": "", "DCP of Lion": ""}] * 2


def _refusals(rank: int, size: int, root: Path) -> dict[str, str]:
    models = {name: _made(name, steps=1) for name in ("AdamW", "Lion", "RAdam")}
    whole = from_first(models["AdamW"][1].full_state_dict())
    for name, (model, optimizer) in models.items():
        optimizer.save(root / name)
        state = {"optim": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=root / f"dcp {name}")

    def folder() -> None:
        with pytest.raises(CheckpointError, match=r"state of Lion, but the optimizer .* is Adam"):
            models["AdamW"][1].load(root / "Lion")
        with pytest.raises(CheckpointError, match=r"start from its weights"):
            models["Lion"][1].load(root / "AdamW")

    def full_state() -> None:
        with pytest.raises(CheckpointError, match="RAdam"):
            models["RAdam"][1].load_state_dict(whole)

    def through_dcp(saved: str, name: str) -> None:
        model, optimizer = models[name]
        state = {"optim": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=root / f"dcp {saved}")
        set_optimizer_state_dict(model, optimizer, state["optim"])

    def refused_by_dcp() -> None:
        with pytest.raises(dcp.api.CheckpointException, match="optimizer_class"):
            through_dcp("AdamW", "RAdam")

    return outcomes(
        {
            "folder": folder,
            "full state": full_state,
            "DCP": refused_by_dcp,
            "DCP of Lion": lambda: through_dcp("Lion", "Lion"),
        }
    )
