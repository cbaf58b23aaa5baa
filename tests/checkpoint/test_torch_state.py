"""The state in torch's format: one rank's is torch's own, several ranks' goes through
torch.distributed.checkpoint.

Exercises checkpoint/load_torch_state.py, checkpoint/gather_whole.py.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megatron_distopt import DistOptConfig, TorchDistributedOptimizer, distribute
from megatron_distopt.checkpoint.torch_state import ShardedValue
from megatron_distopt.errors import AccessError, CheckpointError, DistOptError
from megatron_distopt.layout import Box
from tests.support.facts import Facts, facts_of
from tests.support.models import SHAPES, Params, train_params
from tests.support.spawn import run_ranks
from tests.support.values import same

# Small buckets, so that params are cut by shard borders. torch's for-each kernels are the same
# wherever a tensor ends.
CONFIG = DistOptConfig(
    accelerator="torch", adam="torch_foreach", lr=0.01, weight_decay=0.1, bucket_size=300
)
MIXED = {"wide.weight": torch.bfloat16, "norm.weight": torch.bfloat16, "scale": torch.bfloat16}
#: A dtype of torch, and two forms that no dtype of torch has.
LOW = {
    "bf16": replace(CONFIG, adam="auto", exp_avg_dtype="bfloat16", exp_avg_sq_dtype="bfloat16"),
    "remainder": replace(CONFIG, adam="auto", main_params_dtype="remainder", exp_avg_dtype="int8"),
}
#: Classes of torch's: without a state, with one that begins in the first step, and with a loss
#: scale that grows.
GIVEN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain": lambda params: torch.optim.SGD(params, lr=0.01),
    "dampened": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.5, dampening=0.5),
    "later": lambda params: torch.optim.NAdam(params, lr=0.01),
    "scaled": lambda params: torch.optim.AdamW(params, lr=0.01),
}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def _made(
    kind: DistOptConfig | str = CONFIG, *, steps: int = 0
) -> tuple[Params, TorchDistributedOptimizer]:
    if isinstance(kind, str) and kind in GIVEN:
        model, scaled = (
            Params(default=torch.bfloat16),
            {"loss_scale": "dynamic", "growth_interval": 1},
        )
        options: dict[str, Any] = scaled if kind == "scaled" else {}
        optimizer = distribute(model, GIVEN[kind](model.groups()), bucket_size=300, **options)
    else:
        model = Params(MIXED)
        optimizer = distribute(
            model, LOW[kind] if isinstance(kind, str) else kind, param_groups=model.groups()
        )
    train_params(model, optimizer, range(steps))
    return model, optimizer


def _separate(optimizer: TorchDistributedOptimizer) -> None:
    """A param with a count of its own, and one that was never updated."""
    sharded = optimizer.sharded
    sharded.separate(lambda name: ("norm" in name, "deep" in name))
    for run in sharded.flat_params:
        if "norm" in run.plan.shards[0].name:
            sharded.inner.state[run.main]["step"].fill_(7)
        if "deep" in run.plan.shards[0].name:
            sharded.inner.state.pop(run.main)


# One rank.


def _undistributed() -> tuple[Params, torch.optim.AdamW]:
    """In fp32, so that torch's own AdamW does what ours does with main params."""
    model = Params()
    return model, torch.optim.AdamW(model.groups(), lr=0.01, weight_decay=0.1, foreach=True)  # type: ignore[arg-type]


def _ours_in_fp32(steps: int = 0) -> tuple[Params, TorchDistributedOptimizer]:
    model = Params()
    optimizer = distribute(model, CONFIG, param_groups=model.groups())
    train_params(model, optimizer, range(steps))
    return model, optimizer


def _train_both(
    one: tuple[Params, Any], other: tuple[Params, Any], steps: Sequence[int] = (3, 4)
) -> None:
    """They are the same to the bit afterwards."""
    train_params(*one, steps)
    train_params(*other, steps)
    assert same(_weights(one[0]), _weights(other[0]))


def _weights(model: Params) -> list[Tensor]:
    return [param.detach().clone() for _, param in model.named()]


@pytest.mark.usefixtures("one_rank")
def test_one_rank_when_ours_is_loaded_by_torchs_adamw_then_it_goes_on_bit_for_bit() -> None:
    model, optimizer = _ours_in_fp32(3)
    theirs, adamw = _undistributed()
    theirs.load_state_dict(model.state_dict())
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    adamw.load_state_dict(torch.load(file, weights_only=True))
    _train_both((model, optimizer), (theirs, adamw))


@pytest.mark.usefixtures("one_rank")
def test_one_rank_when_torchs_adamw_is_loaded_by_ours_then_it_goes_on_bit_for_bit() -> None:
    theirs, adamw = _undistributed()
    train_params(theirs, adamw, range(3))
    adamw.param_groups[0]["lr"] = 0.125
    model, optimizer = _ours_in_fp32(1)
    model.load_state_dict(theirs.state_dict())
    optimizer.load_state_dict(adamw.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.01]
    _train_both((model, optimizer), (theirs, adamw))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_first", [True, False])
def test_one_rank_when_model_and_optimizer_are_loaded_in_any_order_then_it_goes_on_bit_for_bit(
    is_first: bool,
) -> None:
    model, optimizer = _made(steps=2)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    other_model, other = _made()
    if is_first:
        other.load_state_dict(state)
    other_model.load_state_dict(weights)
    if not is_first:
        other.load_state_dict(state)
    _train_both((model, optimizer), (other_model, other), (2, 3))
    assert same(other.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.usefixtures("one_rank")
def test_one_rank_when_other_weights_were_loaded_then_a_load_goes_on_from_them() -> None:
    _, optimizer = _made(steps=2)
    state = copy.deepcopy(optimizer.state_dict())
    model, other = _made()
    weights, before = _weights(model), model.held["wide_weight"].detach().clone()
    other.load_state_dict(state)
    assert same(_weights(model), weights)
    for group in other.param_groups:
        group["lr"] = 0.0
    train_params(model, other, [2])
    assert torch.equal(model.held["wide_weight"], before)


@pytest.mark.usefixtures("one_rank")
def test_one_rank_when_an_optimizer_of_torch_was_given_then_its_state_is_its_own() -> None:
    kind: Any = torch.optim.RMSprop
    how: dict[str, Any] = {"lr": 0.01, "momentum": 0.5}
    theirs = Params()
    reference = kind(theirs.groups(), foreach=True, **how)
    model = Params()
    optimizer = distribute(model, kind(model.groups(), foreach=True, **how))
    train_params(theirs, reference, range(2))
    model.load_state_dict(theirs.state_dict())
    optimizer.load_state_dict(reference.state_dict())
    _train_both((model, optimizer), (theirs, reference), (2, 3))
    ours, wanted = optimizer.state_dict()["state"], reference.state_dict()["state"]
    assert all(
        same({key: ours[number][key] for key in wanted[number]}, wanted[number])
        for number in wanted
    )


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", LOW)
def test_one_rank_when_state_is_in_low_precision_then_torch_saves_its_values(
    name: str, tmp_path: Path
) -> None:
    _, optimizer = _made(name, steps=2)
    wanted = optimizer.full_state_dict()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    _save_other(0, name, tmp_path)
    given = {"optim": optimizer.state_dict()}
    dcp.load(given, checkpoint_id=tmp_path / "later")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    for state in (saved, copy.deepcopy(optimizer.state_dict()), given["optim"]):
        _, other = _made(name)
        other.load_state_dict(state)
        assert same(other.full_state_dict(), wanted)
    value = optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(value.norm(), wanted["state"][0]["exp_avg"].norm())
    value.zero_()
    assert not optimizer.full_state_dict()["state"][0]["exp_avg"].any(), "it is live"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_one_rank_when_a_flat_state_of_torchs_sgd_in_mixed_dtypes_is_loaded_then_it_goes_on(
    momentum: float,
) -> None:
    models = [
        torch.nn.Sequential(torch.nn.Linear(4, 4).bfloat16(), torch.nn.LayerNorm(4))
        for _ in range(2)
    ]
    models[1].load_state_dict(models[0].state_dict())
    theirs, given = (
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum) for model in models
    )
    ours = distribute(models[1], given)
    for step in range(2):
        for model, optimizer in zip(models, (theirs, ours), strict=True):
            for param in model.parameters():
                param.grad = torch.full_like(param, 0.25 + step)
            optimizer.step()
        state = get_optimizer_state_dict(models[0], theirs, options=FLAT)
        set_optimizer_state_dict(models[1], ours, state, options=FLAT)
    for mine, wanted in zip(models[1].parameters(), models[0].parameters(), strict=True):
        # A 16-bit param of torch's is rounded in each step.
        assert torch.allclose(mine.float(), wanted.float(), atol=0.02)


@pytest.mark.usefixtures("one_rank")
def test_state_when_read_by_param_then_it_is_live_and_cannot_be_replaced() -> None:
    model, optimizer = _made(steps=1)
    param = dict(model.named())["wide.bias"]
    assert len(optimizer.state) == len(SHAPES) and param in optimizer.state
    optimizer.state[param]["exp_avg"].fill_(3.0)
    assert bool((optimizer.state[param]["exp_avg"] == 3.0).all())
    with pytest.raises(AccessError, match="reset_state"):
        optimizer.state[param] = {"exp_avg": torch.zeros(())}
    with pytest.raises(AccessError, match="reset_state"):
        optimizer.state[param]["exp_avg"] = torch.zeros(())
    with pytest.raises(AccessError, match="reset_state"):
        optimizer.state[param]["step"].fill_(0)
    assert copy.deepcopy(optimizer.state[param])["step"].item() == 1


#: What is done to a good state, and what the error must name.
FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], tuple[str, ...]]] = {
    "no groups": (lambda state: state.pop("param_groups"), ("param_groups",)),
    "other groups": (lambda state: state["param_groups"].pop(), ("param groups", "[2]", "[2, 3]")),
    "other shape": (
        lambda state: _put(state, "exp_avg", torch.zeros(3)),
        ("exp_avg of", "[3]", "[31, 17]"),
    ),
    "one moment": (
        lambda state: state["state"][0].pop("exp_avg_sq"),
        ("exp_avg, step besides", "exp_avg_sq"),
    ),
    "no count": (lambda state: state["state"][0].pop("step"), ("besides", "needs", "step")),
    "negative count": (lambda state: _put(state, "step", torch.tensor(-5.0)), ("step of", "-5")),
    "lr nan": (
        lambda state: state["param_groups"][0].update(lr=float("nan")),
        ("lr of param group 0", "nan"),
    ),
    "lr a text": (
        lambda state: state["param_groups"][1].update(lr="1e-3"),
        ("lr of param group 1", "1e-3"),
    ),
    "betas of three": (
        lambda state: state["param_groups"][1].update(betas=(0.9, 0.9, 0.9)),
        ("betas", "type"),
    ),
    "no maxima": (lambda state: state["param_groups"][0].update(amsgrad=True), ("max_exp_avg_sq",)),
}


def _put(state: dict[str, Any], key: str, value: object) -> None:
    state["state"][0][key] = value


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("fault", FAULTS)
def test_load_when_the_state_does_not_fit_then_refused_and_nothing_is_changed(fault: str) -> None:
    change, named = FAULTS[fault]
    _, optimizer = _made(steps=2)
    before, state = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.state_dict())
    change(state)
    with pytest.raises(CheckpointError) as caught:
        optimizer.load_state_dict(state)
    assert all(each in str(caught.value) for each in named), str(caught.value)
    assert same(optimizer.state_dict(), before)


# Several ranks.


def collect_facts(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Saves in every way."""
    model, optimizer = _made(steps=2)
    _separate(optimizer)
    state = get_optimizer_state_dict(model, optimizer)
    dcp.save({"optim": state}, checkpoint_id=folder / "nested")
    dcp.save(
        {"optim": get_optimizer_state_dict(model, optimizer, options=FLAT)},
        checkpoint_id=folder / "flat",
    )
    offloaded = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(cpu_offload=True)
    )
    dcp.save({"optim": offloaded}, checkpoint_id=folder / "offloaded")
    future = dcp.async_save(
        {"optim": state},
        checkpoint_id=folder / "later",
        process_group=dist.new_group(backend="gloo"),
    )
    future.result()
    optimizer.save(folder / "ours")
    full = optimizer.full_state_dict()
    if rank == 0:
        torch.save(full, folder / "full.pt")
    else:
        assert full == {}
    for name in (*LOW, *GIVEN):
        _save_other(rank, name, folder / name)
    whole = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    value = next(
        each["exp_avg"]
        for each in state["state"].values()
        if isinstance(each["exp_avg"], ShardedValue)
    )
    assert copy.deepcopy(value).boxes == value.boxes and str(list(value.shape)) in repr(value)
    texts = {
        "torch.save": _text(lambda: torch.save(state, io.BytesIO())),
        "full_state_dict=True, then torch.save": _text(lambda: torch.save(whole, io.BytesIO())),
        "norm": _text(value.norm),
        "add": _text(lambda: value + 1),
        "copy into a plain tensor": _text(lambda: torch.zeros(value.shape).copy_(value)),
        "item": _text(lambda: value.sum().item()),
        "numpy": _text(value.numpy),
        "tolist": _text(value.tolist),
        "storage, as of safetensors": _text(value.storage),
    }
    dist.barrier()  # the whole state is on the disk
    return {
        "refused": texts,
        "different states": _different(rank, folder),
        "asked alone": _asked_alone(rank),
    }


def _asked_alone(rank: int) -> object:
    """What a dummy step of torch's would change, where rank 0 alone asks for the state of a class
    without one."""
    model, optimizer = _made("plain")
    calls: list[object] = []
    optimizer.register_step_post_hook(lambda *given: calls.append(given))
    if rank == 0:
        get_optimizer_state_dict(model, optimizer)
    return len(calls), optimizer.last_step


def _save_other(rank: int, name: str, folder: Path) -> None:
    _, other = _made(name, steps=2)
    gloo = dist.new_group(backend="gloo")
    dcp.async_save(
        {"optim": other.state_dict()}, checkpoint_id=folder / "later", process_group=gloo
    ).result()
    full = other.full_state_dict()
    if rank == 0:
        torch.save(full, folder / "full.pt")


def _text(act: Callable[[], object]) -> str:
    try:
        act()
    except CheckpointError as error:
        return str(error)
    return ""


def _read(rank: int, size: int, folder: Path) -> dict[str, bool]:
    """Loads in every way, into a new optimizer or into one with another state."""
    wanted, found = torch.load(folder / "full.pt", weights_only=True), {}
    for name, steps in (("nested", 1), ("offloaded", 1), ("later", 0), ("flat", 0)):
        model, optimizer = _made(steps=steps)
        options = FLAT if name == "flat" else None
        state = {"optim": get_optimizer_state_dict(model, optimizer, options=options)}
        dcp.load(state, checkpoint_id=folder / name)
        set_optimizer_state_dict(model, optimizer, state["optim"], options=options)
        found[f"{name} after {steps}"] = _is_as(optimizer, wanted)
    for name in (*LOW, *GIVEN):
        _, other = _made(name, steps=1 if name in LOW else 0)
        state = {"optim": other.state_dict()}
        dcp.load(state, checkpoint_id=folder / name / "later")
        other.load_state_dict(state["optim"])
        found[name] = _is_as(other, torch.load(folder / name / "full.pt", weights_only=True))
    model, optimizer = _made(steps=1)
    optimizer.load_state_dict(wanted)
    found["full"] = _is_as(optimizer, wanted)
    model, optimizer = _made()
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(model, optimizer, _by_name(wanted), options=options)
    found["full by name"] = _is_as(optimizer, wanted)
    model, optimizer = _made()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given = _by_name(wanted) if rank == 0 else {}
    set_optimizer_state_dict(model, optimizer, given, options=options)
    found["broadcast"] = _is_as(optimizer, wanted)
    model, optimizer = _made()
    optimizer.load(folder / "ours")
    found["ours"] = _is_as(optimizer, wanted)
    return found


def _is_as(optimizer: TorchDistributedOptimizer, wanted: dict[str, Any]) -> bool:
    full = optimizer.full_state_dict()
    return dist.get_rank() != 0 or same(full, wanted)


def _by_name(full: dict[str, Any]) -> dict[str, Any]:
    """As torch's calls have it: names of params for numbers."""
    names = ["held." + name.replace(".", "_") for name in _in_groups()]
    state = {names[number]: dict(each) for number, each in full["state"].items()}
    groups = [
        {**group, "params": [names[number] for number in group["params"]]}
        for group in full["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


def _in_groups() -> list[str]:
    """Names in the order of `Params.groups`."""
    return sorted(SHAPES, key=lambda name: len(SHAPES[name]) <= 1)


facts = facts_of(collect_facts, 2)


def test_sharded_values_when_used_as_tensors_then_refused_with_what_to_call(facts: Facts) -> None:
    for texts in facts["refused"]:
        for what, text in texts.items():
            named = ("optimizer.save(folder)", "on all ranks", "full_state_dict()")
            assert all(each in text for each in named), what


def test_full_state_when_gathered_then_torchs_adamw_takes_it(facts: Facts) -> None:
    full = torch.load(facts.folder / "full.pt", weights_only=True)
    _, adamw = _undistributed()
    adamw.load_state_dict(full)
    assert {int(each["step"]) for each in full["state"].values()} == {0, 2, 7}
    shapes = [list(param.shape) for group in adamw.param_groups for param in group["params"]]
    assert [list(full["state"][number]["exp_avg"].shape) for number in range(len(SHAPES))] == shapes


def test_state_when_rank_0_alone_asks_for_it_then_torch_makes_no_step(facts: Facts) -> None:
    assert facts["asked alone"] == [(0, None)] * 2


def test_full_state_when_16_bit_params_or_a_loss_scale_then_they_go_on_from_it(
    facts: Facts,
) -> None:
    full = {name: torch.load(facts.folder / name / "full.pt", weights_only=True) for name in GIVEN}
    assert all("main_param" in state for each in full.values() for state in each["state"].values())
    scale = {
        "scale": 4 * DistOptConfig().initial_loss_scale,
        "good_steps": 0,
        "tolerated": 2,
        "num_skipped": 0,
    }
    assert full["scaled"]["param_groups"][0]["dynamic_loss_scale"] == scale


@pytest.mark.usefixtures("one_rank")
def test_state_when_it_has_no_loss_scale_then_that_of_the_run_goes_on_and_a_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, optimizer = _made("scaled")
    state, before = copy.deepcopy(optimizer.state_dict()), optimizer.sharded.loss_scale.state_dict()
    del state["param_groups"][0]["dynamic_loss_scale"]
    optimizer.load_state_dict(state)
    assert optimizer.sharded.loss_scale.state_dict() == before
    assert "no loss scale" in caplog.text


@pytest.mark.usefixtures("one_rank")
def test_state_when_no_step_was_made_then_a_load_of_it_begins_anew() -> None:
    for name in GIVEN:
        (model, optimizer), (other_model, other) = _made(name), _made(name)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        other.load_state_dict(optimizer.full_state_dict())
        train_params(model, optimizer, [0])
        train_params(other_model, other, [0])
        assert same(_weights(other_model), _weights(model)), name


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("size", [1, 3])
def test_load_when_the_number_of_ranks_is_another_then_every_way_gives_the_same_state(
    facts: Facts, size: int
) -> None:
    for rank, found in enumerate(
        [_read(0, 1, facts.folder)] if size == 1 else run_ranks(_read, size, facts.folder)
    ):
        assert all(found.values()), (
            f"rank {rank}: {[way for way, is_same in found.items() if not is_same]}"
        )


def _different(rank: int, folder: Path) -> list[str]:
    """Ranks are given other states: each text."""
    texts = []
    for change in (_other_count, _other_shape_on_rank_1):
        _, optimizer = _made(steps=1)
        before = optimizer.full_state_dict()
        state = torch.load(folder / "full.pt", weights_only=True)
        change(state, rank)
        try:
            optimizer.load_state_dict(state)
        except DistOptError as error:
            texts.append(f"{type(error).__name__}: {error}")
        assert same(optimizer.full_state_dict(), before)
    return texts


def _other_count(state: dict[str, Any], rank: int) -> None:
    state["state"][0]["step"].fill_(2 + rank)


def _other_shape_on_rank_1(state: dict[str, Any], rank: int) -> None:
    if rank == 1:
        state["state"][0]["exp_avg"] = torch.zeros(3)


def test_load_when_ranks_have_different_states_then_all_refuse_and_nothing_is_changed(
    facts: Facts,
) -> None:
    for rank, (counts, shapes) in enumerate(facts["different states"]):
        assert re.search(r"CheckpointError.*step .* 2 on rank 0 and 3 on rank 1", counts), counts
        assert (
            shapes.startswith(("RanksDisagreeError", "CheckpointError")[rank]) and "[3]" in shapes
        )


@pytest.mark.usefixtures("one_rank")
def test_sharded_value_when_boxes_do_not_cover_what_a_rank_owns_then_refused() -> None:
    _, optimizer = _made(steps=1)
    state = optimizer.state_dict()
    part = torch.zeros(5, 17)
    state["state"][0]["exp_avg"] = ShardedValue(
        (31, 17), [Box((0, 0), (5, 17))], [part], dtype=torch.float32, device=part.device
    )
    with pytest.raises(CheckpointError, match="each once"):
        optimizer.load_state_dict(state)
