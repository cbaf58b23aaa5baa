"""The plain host: its calls, its kinds of models, its refusals."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Embedding, LayerNorm, Linear, Module, Sequential

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.errors import CheckpointError, ConfigError, DistOptError, LayoutError, RanksDisagreeError
from megatron_distopt.version import VERSION
from tests.support.models import Params, exact_grads, stepped
from tests.support.refusals import assert_says
from tests.support.spawn import run_ranks

SIZE = 3
# torch's for-each kernels are the same to the bit wherever a tensor ends (test_sharded_equals_undistributed.py, FUSED).
CONFIG = DistOptConfig(accelerator="torch", adam="torch_foreach", lr=0.01, weight_decay=0.1)


class Tied(Module):
    """Input and output embedding are one param; a norm stays in fp32, and one param is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = Embedding(13, 8).bfloat16()
        self.norm = LayerNorm(8)
        self.frozen = Linear(8, 8, bias=False).bfloat16().requires_grad_(False)
        self.head = Linear(8, 13, bias=False).bfloat16()
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.frozen(self.norm(self.embedding(tokens).float()).bfloat16())
        return torch.nn.functional.cross_entropy(self.head(hidden).float(), tokens)


def tied_and_frozen(rank: int) -> dict[str, Any]:
    model = Tied()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = distribute(model, CONFIG)
    for _ in range(3):
        _step(optimizer, model(torch.arange(13)))
    after = dict(model.named_parameters())
    return {
        "names": sorted(slot.name for buffer in optimizer.sharded.buffers for slot in buffer.layout.slots),
        "is_tied": model.head.weight is model.embedding.weight,
        "frozen_equal": torch.equal(before["frozen.weight"], after["frozen.weight"]),
        "moved": not torch.equal(before["embedding.weight"], after["embedding.weight"]),
        # A norm weight that had been through bf16 would be a multiple of 2**-8 near 1.
        "norm_is_fine": bool(((after["norm.weight"].detach() * 256) % 1 != 0).any()),
        "params": [param.detach().float() for param in after.values()],
    }


def chunks_equal_one_model(rank: int) -> dict[str, Any]:
    whole, halves = Params(), [Params(), Params()]
    one = distribute(whole, CONFIG)
    several = distribute(halves, CONFIG)
    grads = exact_grads(0, 0, rank)
    _step(one, whole(grads))
    _step(several, halves[0](grads) + halves[1](grads))
    names = [slot.name for buffer in several.sharded.buffers for slot in buffer.layout.slots]
    shared = Linear(2, 2, bias=False)
    across = distribute([shared, Sequential(shared)], CONFIG)
    equal = all(
        torch.equal(left, right)
        for half in halves
        for left, right in zip(whole.parameters(), half.parameters(), strict=True)
    )
    slots = [slot.name for buffer in across.sharded.buffers for slot in buffer.layout.slots]
    return {"equal": equal, "first_name": names[0], "shared_between_chunks": slots}


def groups_stay_alike(rank: int) -> dict[str, Any]:
    """Param groups of a model so small that ranks own nothing of a group, or nothing at all."""
    model = Linear(1, 1)
    groups = [
        {"params": [model.weight], "lr_mult": 2.0, "is_decoupled_lr": True},
        {"params": [model.bias], "weight_decay": 0.0, "default_config": True},
    ]
    optimizer = distribute(model, CONFIG, param_groups=groups)
    before = model.weight.item()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    _step(optimizer, model(torch.ones(1, 1)).sum())
    frozen_by_lr = model.weight.item() == before
    optimizer.param_groups[0]["lr"] = 0.5
    _step(optimizer, model(torch.ones(1, 1)).sum())
    keys = [sorted(set(group) - {"params"}) for group in optimizer.param_groups]
    return {
        "owned": sum(run.main.numel() for run in optimizer.sharded.flat_params),
        "keys": keys,
        "extras": (optimizer.param_groups[0]["lr_mult"], optimizer.param_groups[1]["weight_decay"]),
        "lr_is_live": frozen_by_lr and model.weight.item() != before,
    }


def state_round_trip(rank: int) -> dict[str, Any]:
    """Two more steps after loading equal two more steps without."""
    config = dataclasses.replace(CONFIG, loss_scale="dynamic", growth_interval=2, initial_loss_scale=64.0)
    first, second = Params(default=torch.float16), Params(default=torch.float16)
    one, other = distribute(first, config), distribute(second, config)
    for step in range(3):
        _step(one, first(exact_grads(step, 0, rank)))
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    one.save(folder[0])
    other.load(folder[0])
    same_at_once = _equal(first, second)
    for step in range(3, 5):
        _step(one, first(exact_grads(step, 0, rank)))
        _step(other, second(exact_grads(step, 0, rank)))
    missing = f"{folder[0]}/missing" if rank == 1 else folder[0]
    return {
        "same_at_once": same_at_once,
        "same_later": _equal(first, second),
        "scales": (one.sharded.loss_scale.scale.item(), other.sharded.loss_scale.scale.item()),
        "refusal": _refusal(lambda: other.load(missing)),
        "unchanged": _equal(first, second),
    }


def reload_after_change(rank: int) -> dict[str, Any]:
    """What is below the precision of bf16 goes where a reload is asked for, and stays where nothing was changed."""
    model = Linear(8, 8, bias=False).bfloat16()
    optimizer = distribute(model, dataclasses.replace(CONFIG, lr=2.0**-12, weight_decay=0.0))
    torch.nn.init.constant_(model.weight, 0.5)
    _step(optimizer, model(torch.ones(1, 8, dtype=torch.bfloat16)).float().sum())

    def follows() -> bool:
        return all(torch.equal(run.main, run.model.float()) for run in optimizer.sharded.flat_params)

    before = follows()
    optimizer.reload_model_params()
    return {"weight": model.weight.detach().float().unique().tolist(), "follows": (before, follows())}


def frozen_in_a_group(rank: int) -> dict[str, Any]:
    """A frozen param together with others in a group, a group with nothing but a frozen one, and an empty group."""
    model = Sequential(Linear(2, 2), Linear(2, 2))
    for param in (model[0].weight, model[0].bias):
        param.requires_grad_(False)
    groups = [{"params": [model[0].weight, *model[1].parameters()]}, {"params": [model[0].bias]}, {"params": []}]
    optimizer = distribute(model, CONFIG, param_groups=groups)
    start = [param.detach().clone() for param in model.parameters()]
    _step(optimizer, model(torch.ones(1, 2)).sum())
    return {"moved": [not torch.equal(*pair) for pair in zip(model.parameters(), start, strict=True)]}


def _float64(rank: int) -> object:
    return distribute(Linear(2, 2).double(), CONFIG)


def _fp16_without_scale(rank: int) -> object:
    return distribute(Linear(2, 2).half(), CONFIG)


def _nothing_trainable(rank: int) -> object:
    return distribute(Linear(2, 2).requires_grad_(False), CONFIG)


def _in_two_groups(rank: int) -> object:
    model = Linear(2, 2, bias=False)
    return distribute(model, CONFIG, param_groups=[{"params": [model.weight]}, {"params": [model.weight]}])


def _foreign_params(rank: int) -> object:
    model = Linear(2, 2)
    return distribute(model, CONFIG, param_groups=[{"params": [*model.parameters(), *Linear(1, 1).parameters()]}])


def _on_meta(rank: int) -> object:
    return distribute(Linear(2, 2, device="meta"), CONFIG)


def _one_rank_only(rank: int) -> object:
    return distribute(Linear(2, 2).to(torch.float64 if rank == 2 else torch.float32), CONFIG)


def _other_options(rank: int) -> object:
    return distribute(Linear(2, 2), dataclasses.replace(CONFIG, lr=0.5 if rank == 1 else 0.01))


def _other_names(rank: int) -> object:
    return distribute(Sequential(Linear(2, 2)) if rank == 1 else Linear(2, 2), CONFIG)


def _other_shape(rank: int) -> object:
    return distribute(Linear(2, 3 if rank == 0 else 2), CONFIG)


def _other_dtype(rank: int) -> object:
    return distribute(Linear(2, 2).to(torch.bfloat16 if rank == 2 else torch.float32), CONFIG)


def _other_order(rank: int) -> object:
    model = Module()
    for name in ("b", "a") if rank == 0 else ("a", "b"):
        model.add_module(name, Linear(2, 2, bias=False))
    return distribute(model, CONFIG)


#: By rank: the class, and what its text has to contain: the values, and the way out.
Refusal = tuple[type[DistOptError], tuple[str, ...]]


def _everyone(kind: type[DistOptError], *parts: str) -> list[Refusal]:
    return [(kind, parts)] * SIZE


def _differing(*parts: str) -> list[Refusal]:
    return _everyone(RanksDisagreeError, *parts, "with the code and options of the others")


FLOAT64 = ("param 'bias'", "float64", "float32, bfloat16, float16", "Convert or freeze the param")
BAD: dict[str, tuple[Callable[[int], object], list[Refusal]]] = {
    "float64": (_float64, _everyone(LayoutError, *FLOAT64)),
    "fp16 without loss scale": (
        _fp16_without_scale,
        _everyone(ConfigError, "fp16 params", "Write loss_scale='dynamic'"),
    ),
    "nothing trainable": (_nothing_trainable, _everyone(LayoutError, "no trainable param", "Unfreeze something")),
    "in two groups": (_in_two_groups, _everyone(LayoutError, "'weight'", "in 2 param groups", "Leave it out of one")),
    "foreign params": (
        _foreign_params,
        _everyone(LayoutError, "2 params that the model has not", "distribute([model, other_module], ...)"),
    ),
    "on meta": (_on_meta, _everyone(LayoutError, "meta", "cpu", "Move the model with model.to(...) first")),
    "one rank only": (
        _one_rank_only,
        [
            *[(RanksDisagreeError, ("rank 2 refused", *FLOAT64, "Mend what that rank reports"))] * 2,
            (LayoutError, FLOAT64),
        ],
    ),
    "other options": (_other_options, _differing("rank 1 has lr=0.5", "rank 0 has lr=0.01", "rank(s) 1")),
    "other names": (_other_names, _differing("rank 1 has 0.bias", "rank 0 has bias", "rank(s) 1")),
    "other shape": (_other_shape, _differing("rank 0 has bias[3]", "rank 1 has bias[2]", "rank(s) 0")),
    "other dtype": (_other_dtype, _differing("rank 2 has bias bfloat16", "rank 0 has bias float32", "rank(s) 2")),
    "other order": (_other_order, _differing("rank 0 has a.weight", "rank 1 has b.weight", "rank(s) 0")),
}

GOOD = {
    function.__name__: function
    for function in (
        tied_and_frozen,
        chunks_equal_one_model,
        groups_stay_alike,
        state_round_trip,
        frozen_in_a_group,
        reload_after_change,
    )
}


def run_all(rank: int, size: int) -> dict[str, Any]:
    results: dict[str, Any] = {name: _result(lambda call=call: call(rank)) for name, call in GOOD.items()}  # type: ignore[misc]
    results.update({name: _refusal(lambda make=make: make(rank)) for name, (make, _) in BAD.items()})  # type: ignore[misc]
    return results


def _result(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was found, or the error that only the tests of this function fail with."""
    try:
        return call()
    except DistOptError as error:
        return {"error": str(error)}


def _refusal(make: Callable[[], object]) -> tuple[type[DistOptError], str] | None:
    try:
        make()
    except DistOptError as error:
        return type(error), str(error)
    return None


def _step(optimizer: Any, loss: Tensor) -> None:
    optimizer.scale_loss(loss).backward()
    assert stepped(optimizer).updated, "these gradients are finite"
    optimizer.zero_grad()


def _equal(first: Module, second: Module) -> bool:
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(run_all, SIZE)


@pytest.mark.parametrize("name", BAD)
def test_distribute_when_input_is_bad_then_every_rank_says_what_to_write(
    results: list[dict[str, Any]], name: str
) -> None:
    for result, (kind, parts) in zip(results, BAD[name][1], strict=True):
        found, text = result[name]
        assert found is kind
        assert [part for part in parts if part not in text] == [], text


def test_tied_and_frozen_params_when_trained_then_are_one_and_none(results: list[dict[str, Any]]) -> None:
    for rank in range(SIZE):
        found = results[rank]["tied_and_frozen"]
        assert found["names"] == ["embedding.weight", "norm.bias", "norm.weight"]
        assert found["is_tied"] and found["frozen_equal"] and found["moved"] and found["norm_is_fine"]
        first = results[0]["tied_and_frozen"]["params"]
        assert all(torch.equal(left, right) for left, right in zip(found["params"], first, strict=True))


def test_chunks_when_given_as_a_list_then_train_as_one_model(results: list[dict[str, Any]]) -> None:
    wanted = {"equal": True, "first_name": "chunk1.held.wide_weight", "shared_between_chunks": ["chunk0.weight"]}
    assert [result["chunks_equal_one_model"] for result in results] == [wanted] * SIZE


def test_param_groups_when_a_rank_owns_nothing_then_have_the_same_form(results: list[dict[str, Any]]) -> None:
    found = [result["groups_stay_alike"] for result in results]
    # Two elements, 64 apart, over three ranks: the middle one owns neither.
    assert [each["owned"] for each in found] == [1, 0, 1]
    assert all(each["keys"] == found[0]["keys"] for each in found)
    assert all({"lr_mult", "is_decoupled_lr"} <= set(each["keys"][0]) for each in found)
    assert all(each["extras"] == (2.0, 0.0) and each["lr_is_live"] for each in found)


def test_param_when_it_is_frozen_in_a_group_then_it_is_left_alone_as_in_torch(results: list[dict[str, Any]]) -> None:
    assert [result["frozen_in_a_group"]["moved"] for result in results] == [[False, False, True, True]] * SIZE


def test_state_dict_when_loaded_then_continues_bit_for_bit(results: list[dict[str, Any]]) -> None:
    for rank in range(SIZE):
        found = results[rank]["state_round_trip"]
        assert found["same_at_once"] and found["same_later"] and found["unchanged"]
        # Growth after steps 2 and 4: the second doubling needs the counter that was saved after step 3.
        assert found["scales"] == (256.0, 256.0)
        assert found["refusal"][0] is (CheckpointError if rank == 1 else RanksDisagreeError)
        assert "missing" in found["refusal"][1]


def test_reload_model_params_when_model_changed_then_main_params_follow(results: list[dict[str, Any]]) -> None:
    # Adam's first step is 2**-12, an eighth of what lies between two bf16 numbers below 0.5, so that 0.5 stays.
    found = [result["reload_after_change"] for result in results]
    assert [each["weight"] for each in found] == [[0.5]] * SIZE
    assert [each["follows"] for each in found] == [(False, True)] * SIZE


def test_distribute_when_process_group_is_missing_then_says_how_to_start() -> None:
    with pytest.raises(ConfigError) as caught:
        distribute(Linear(2, 2), CONFIG)
    assert_says(
        str(caught.value),
        "Invalid process group: torch.distributed is not initialised. Must exist. "
        "Call torch.distributed.init_process_group first, or start with torchrun or deepspeed.",
    )


def test_distribute_when_the_program_logs_then_it_says_what_was_chosen(caplog: pytest.LogCaptureFixture) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        with caplog.at_level(logging.INFO, logger="megatron_distopt"):
            distribute(Linear(4, 4), DistOptConfig(accelerator="torch", overlap_param_gather=True))
    finally:
        dist.destroy_process_group()
    first, *lines = caplog.records[-1].getMessage().splitlines()
    assert first == f"megatron_distopt {VERSION} is active in a torch program (distribute)"
    assert [line.split()[0] for line in lines] == [
        "device",
        "inner",
        "decay",
        "nonfinite",
        "groups",
        "overlap",
        "buffer",
        "bytes",
    ]
    assert lines[5].strip() == "overlap    grads not overlapped, params overlapped"
