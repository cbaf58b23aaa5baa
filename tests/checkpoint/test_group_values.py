"""What a manifest says of param groups is checked before it is taken: values, types, and no param
in two of them."""

from __future__ import annotations

import copy
import logging
import math
from collections import OrderedDict
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from megatron_distopt import distribute
from megatron_distopt.checkpoint import read_manifest
from megatron_distopt.checkpoint.save import contribution_of
from megatron_distopt.comm import Group
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats import convert
from megatron_distopt.formats.recognise import load_any
from tests.support.simulated import World, small_model
from tests.support.stored import edit_manifest, snapshot
from tests.support.values import same

MODEL = small_model(layers=1)
ALONE = Group(None, 0, 1)

#: What is written into the body of the manifest, and what the error must name.
FAULTS: dict[str, tuple[tuple[Any, ...], Any, tuple[str, ...]]] = {
    "lr nan": (("groups", 0, "options", "lr"), math.nan, ("lr of param group 0", "nan", "finite")),
    "lr true": (("groups", 0, "options", "lr"), True, ("lr of param group 0", "True")),
    "eps a text": (("groups", 0, "options", "eps"), "x", ("eps of param group 0", "'x'", "number")),
    "betas a number": (
        ("groups", 0, "options", "betas"),
        0.9,
        ("betas of param group 0", "0.9", "list"),
    ),
    "a nan elsewhere": (
        ("groups", 0, "options", "lr_mult"),
        math.nan,
        ("lr_mult of param group 0", "nan"),
    ),
    "step negative": (("groups", 0, "step"), -5, ("step of param group 0", "-5", "at least 0")),
    "step a fraction": (("groups", 0, "step"), 7.5, ("step of param group 0", "7.5", "whole")),
    "scalar a text": (
        ("groups", 0, "scalars", "step"),
        ["ten", ""],
        ("step of param group 0", "'ten'", "number"),
    ),
    "loss scale zero": (("loss_scale", "scale"), 0.0, ("scale", "0.0", "above 0")),
    "skipped negative": (("num_skipped",), -1, ("num_skipped", "-1", "at least 0")),
}


def _set(body: Any, keys: tuple[Any, ...], value: Any) -> None:
    for key in keys[:-1]:
        body = body[key]
    body[keys[-1]] = value


def _refused(folder: Path) -> str:
    """The text; the run is as it was."""
    world = World.of(MODEL, lr=5.0)
    before = snapshot(world)
    with pytest.raises(CheckpointError) as caught:
        load_any(folder, world.ranks[0].model, ALONE)
    assert same(snapshot(world), before)
    return str(caught.value)


@pytest.mark.parametrize("fault", FAULTS)
def test_load_when_a_value_is_wrong_then_refused_with_its_place(fault: str, tmp_path: Path) -> None:
    World.of(MODEL, dp=2).save(tmp_path)
    keys, value, named = FAULTS[fault]
    edit_manifest(tmp_path, lambda body: _set(body, keys, value))
    text = _refused(tmp_path)
    assert str(tmp_path) in text and all(each in text for each in named), text


def test_load_when_a_param_is_in_two_groups_then_refused_with_both(tmp_path: Path) -> None:
    World.of(MODEL, dp=2).save(tmp_path)
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    edit_manifest(tmp_path, lambda body: body["groups"][1]["names"].append(name))
    text = _refused(tmp_path)
    assert repr(name) in text and "param groups 0 and 1" in text and "wd_mult" in text


def test_file_of_torch_when_a_value_is_wrong_then_refused_by_load_and_convert(
    tmp_path: Path,
) -> None:
    World.of(MODEL, dp=2).save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "good.pt", "torch")
    state = torch.load(tmp_path / "good.pt", weights_only=True)
    state["groups"][0]["options"]["lr"] = math.nan
    torch.save(state, tmp_path / "bad.pt")
    assert "lr of param group 0" in _refused(tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match="lr of param group 0"):
        convert(tmp_path / "bad.pt", tmp_path / "new", "distopt")
    assert not (tmp_path / "new").exists()


def test_save_when_a_value_would_be_refused_by_a_load_then_it_is_refused_first() -> None:
    (rank,) = World.of(MODEL).ranks
    rank.optimizer.loss_scale.load_state_dict({"scale": 0.0, "good_steps": 0, "tolerated": 0})
    with pytest.raises(CheckpointError, match=r"scale in the optimizer is 0\.0"):
        contribution_of(rank.model)
    rank.optimizer.inner.param_groups[0]["lr"] = math.nan
    with pytest.raises(CheckpointError, match=r"lr of param group 0 in the optimizer is nan"):
        contribution_of(rank.model)


def test_save_when_more_overflows_came_than_are_tolerated_then_the_count_below_zero_travels(
    tmp_path: Path,
) -> None:
    """As a Megatron counts, which goes on below 0 where the scale is at its least."""
    world = World.of(MODEL)
    world.ranks[0].optimizer.loss_scale.load_state_dict(
        {"scale": 1.0, "good_steps": 0, "tolerated": -3}
    )
    world.save(tmp_path)
    other = World.of(MODEL, filled=False)
    other.load(tmp_path)
    assert other.ranks[0].optimizer.loss_scale.state_dict()["tolerated"] == -3


def test_save_when_ranks_differ_in_an_option_of_a_param_then_the_commit_names_it(
    tmp_path: Path,
) -> None:
    world = World.of(MODEL, dp=2)
    world.ranks[1].optimizer.inner.param_groups[0]["lr"] = 0.5
    with pytest.raises(
        CheckpointError, match=r"in param groups \d and \d, which differ in lr: 0.001 and 0.5"
    ):
        world.save(tmp_path)
    assert not (tmp_path / "manifest.json").exists()


def test_options_when_they_are_tensors_or_tables_then_they_travel_in_the_form_of_the_run(
    tmp_path: Path,
) -> None:
    """torch lets a learning rate be a tensor, which a captured graph goes on reading: it is filled,
    not replaced."""
    world = World.of(MODEL)
    for group in world.ranks[0].optimizer.inner.param_groups:
        group.update(lr=torch.tensor(0.25), schedule={"warmup": 10, "ends": (1.0, 2.0)})
    world.save(tmp_path)
    other = World.of(MODEL, filled=False)
    groups = other.ranks[0].optimizer.inner.param_groups
    groups[0]["lr"] = rate = torch.tensor(5.0)
    other.load(tmp_path)
    assert groups[0]["lr"] is rate and float(rate) == 0.25
    assert groups[1]["lr"] == 0.25
    assert [group["schedule"] for group in groups] == [{"warmup": 10, "ends": [1.0, 2.0]}] * 2


def test_options_when_the_run_lacks_one_of_the_same_optimizer_then_it_gets_it(
    tmp_path: Path,
) -> None:
    """A scheduler that is made after the load finds `initial_lr`, as after torch's own."""
    world = World.of(MODEL)
    for group in world.ranks[0].optimizer.inner.param_groups:
        group["initial_lr"] = 0.5
    world.save(tmp_path)
    other = World.of(MODEL, filled=False)
    other.load(tmp_path)
    assert [group["initial_lr"] for group in other.ranks[0].optimizer.inner.param_groups] == [
        0.5,
        0.5,
    ]


def test_options_when_no_file_keeps_one_then_the_run_must_have_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World.of(MODEL)
    world.ranks[0].optimizer.inner.param_groups[0]["hook"] = print
    with caplog.at_level(logging.WARNING):
        world.save(tmp_path)
    assert (
        "param group option 'hook' is a builtin_function_or_method and will not be saved"
        in caplog.text
    )
    assert all("hook" not in group.options for group in read_manifest(tmp_path).groups)
    text = _refused(tmp_path)
    assert "hook of the params of group 0" in text and "builtin_function_or_method" in text
    other = World.of(MODEL, filled=False)
    other.ranks[0].optimizer.inner.param_groups[0]["hook"] = repr
    other.load(tmp_path)
    assert other.ranks[0].optimizer.inner.param_groups[0]["hook"] is repr


def _first_layer_frozen(lr: float) -> tuple[torch.nn.Sequential, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).requires_grad_(True)
    model[0].requires_grad_(False)
    groups = [
        {"params": list(layer.parameters()), "lr": lr * (1 + number)}
        for number, layer in enumerate(model)
    ]
    groups.append({"params": [], "lr": lr * 3})
    return model, distribute(model, torch.optim.AdamW(groups))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("form", ["folder", "file of torch"])
def test_load_when_a_group_is_frozen_then_it_has_the_options_that_were_saved(
    form: str, tmp_path: Path
) -> None:
    _, optimizer = _first_layer_frozen(0.5)
    optimizer.save(tmp_path / "saved")
    place = tmp_path / "saved"
    if form == "file of torch":
        place = tmp_path / "file.pt"
        convert(tmp_path / "saved", place, "torch")
    model, resumed = _first_layer_frozen(0.1)

    resumed.load(place)

    assert [group["lr"] for group in resumed.param_groups] == [0.5, 1.0, 1.5], (
        "options of the saved run"
    )
    assert not any(param in resumed.state for param in model[0].parameters()), (
        "it has no state before it trains"
    )


@pytest.mark.usefixtures("one_rank")
def test_load_when_frozen_params_of_one_group_were_in_several_then_refused(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].requires_grad_(False)
    params = [*model[0].parameters()]
    groups = [
        {"params": params[:1], "lr": 0.5},
        {"params": params[1:], "lr": 0.1},
        {"params": model[1].parameters()},
    ]
    distribute(model, torch.optim.AdamW(groups)).save(tmp_path)
    _, resumed = _first_layer_frozen(0.1)

    with pytest.raises(CheckpointError) as caught:
        resumed.load(tmp_path)

    for part in ("'0.bias'", "'0.weight'", "groups of different options"):
        assert part in str(caught.value), caught.value
    assert resumed.param_groups[0]["lr"] == 0.1, "nothing is changed"


def _numpys(value: Any) -> numpy.ndarray[Any, Any]:
    return numpy.array(value, dtype=numpy.float32)


class _Pair(NamedTuple):
    first: float
    second: float


#: What a saved run and a run that loads have in a param group, and what that has afterwards.
KEPT: dict[str, tuple[str, Any, Any, Any]] = {
    "numpy's number": ("lr", numpy.float32(0.5), 0.1, 0.5),
    "a number for numpy's": ("lr", 0.5, numpy.float32(0.1), 0.5),
    "a switch for a number": ("weight_decay", False, 0.1, 0.0),
    "a number for a switch": ("weight_decay", 0.1, False, 0.1),
    "a fraction": ("lr", Fraction(1, 4), 0.1, 0.25),
    "numpy's switch": ("amsgrad", numpy.False_, False, False),
    "numpy's text": ("own", numpy.str_("a"), numpy.str_("b"), "a"),
    "a tensor": ("own", torch.tensor([1.0, 2.0]), torch.zeros(2), torch.tensor([1.0, 2.0])),
    "an array": ("own", _numpys([1.0, 2.0]), _numpys([0.0, 0.0]), _numpys([1.0, 2.0])),
    "nested tuples": ("own", (1, (2, 3)), (0, (0, 0)), (1, (2, 3))),
    "a tuple with names": ("own", _Pair(1.0, 2.0), _Pair(0.0, 0.0), _Pair(1.0, 2.0)),
    "an ordered dict": ("own", OrderedDict(a=1), OrderedDict(a=0), {"a": 1}),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("form", ["folder", "state dict"])
@pytest.mark.parametrize("case", KEPT)
def test_option_when_it_is_of_another_type_then_it_is_saved_and_loaded(
    case: str, form: str, tmp_path: Path
) -> None:
    key, saved, current, expected = KEPT[case]

    def run(value: Any) -> Any:
        model = torch.nn.Linear(2, 2)
        group = {"params": list(model.parameters()), key: copy.deepcopy(value)}
        optimizer = distribute(model, torch.optim.AdamW([group], lr=0.25))
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        return optimizer

    first, second = run(saved), run(current)
    before = second.param_groups[0][key]
    if form == "folder":
        first.save(tmp_path)
        second.load(tmp_path)
    else:
        second.load_state_dict(first.state_dict())
    got = second.param_groups[0][key]
    assert type(got) is type(before) or not isinstance(before, tuple)
    if isinstance(expected, (torch.Tensor, numpy.ndarray)):
        assert got is before, "it is filled in place, because others may hold it"
        assert got.tolist() == expected.tolist()
    else:
        assert got == expected


@pytest.mark.usefixtures("one_rank")
def test_state_dict_when_the_run_lacks_an_option_then_it_gets_a_copy_as_in_torch() -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    first = distribute(model, torch.optim.AdamW(model.parameters()))
    first.param_groups[0].update(own=torch.tensor([1.0, 2.0]), pair=(1, 2))
    second = distribute(other, torch.optim.AdamW(other.parameters()))
    second.load_state_dict(first.state_dict())
    (group,) = second.param_groups
    assert group["pair"] == (1, 2) and torch.equal(group["own"], torch.tensor([1.0, 2.0]))
    assert group["own"] is not first.param_groups[0]["own"]


class _OwnRate(torch.optim.Optimizer):
    """Computes its rate where it is given none, as the Adafactor of transformers."""

    def __init__(self, params: Any, lr: float | None = None) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=0.5 if group["lr"] is None else group["lr"])


@pytest.mark.usefixtures("one_rank")
def test_rate_when_the_class_computes_it_then_none_is_saved_and_loaded(tmp_path: Path) -> None:
    def run(lr: float | None) -> Any:
        model = torch.nn.Linear(2, 2)
        return distribute(model, _OwnRate(model.parameters(), lr), updates="elements")

    run(None).save(tmp_path)
    resumed = run(None)
    resumed.load(tmp_path)
    assert resumed.param_groups[0]["lr"] is None
    with pytest.raises(CheckpointError, match="lr of the params of group 0"):
        run(0.5).load(tmp_path)


@pytest.mark.usefixtures("one_rank")
def test_switch_when_it_is_a_number_then_the_kernel_takes_it_as_torchs_others_do() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = distribute(model, torch.optim.AdamW(model.parameters(), amsgrad=1))  # type: ignore[arg-type]
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert "max_exp_avg_sq" in optimizer.state[model.weight]
    assert optimizer.param_groups[0]["amsgrad"] == 1, "the user's stays as it was written"
