"""The plain host on four ranks: what users bring along (groups, optimizers), and a model whose halves are
held by two data-parallel groups."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import BatchNorm1d, Linear, Module, Sequential
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.errors import CheckpointError, ConfigError, LayoutError, RanksDisagreeError
from tests.support.models import SHAPES, Params, exact_grads, stepped
from tests.support.spawn import run_ranks

SIZE = 4
CONFIG = DistOptConfig(accelerator="torch", adam="torch_foreach", lr=0.01, weight_decay=0.1)
STEPS = 4

Raised = tuple[type[Exception], str] | None


def averaged(step: int) -> dict[str, Tensor]:
    grads = [exact_grads(step, 0, rank) for rank in range(SIZE)]
    return {name: torch.stack([grad[name] for grad in grads]).sum(0) / SIZE for name in SHAPES}


def flat(model: Module) -> Tensor:
    return torch.cat([param.detach().float().flatten() for param in model.parameters()])


def train(model: Params, optimizer: Any, rank: int, scheduler: LRScheduler | None = None) -> Tensor:
    for step in range(STEPS):
        optimizer.zero_grad()
        optimizer.scale_loss(model(exact_grads(step, 0, rank))).backward()
        assert stepped(optimizer).updated
        if scheduler is not None:
            scheduler.step()
    return flat(model)


def train_whole(model: Params, optimizer: Optimizer, scheduler: LRScheduler | None = None) -> Tensor:
    for step in range(STEPS):
        grads = averaged(step)
        for name, param in model.named():
            param.grad = grads[name]
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return flat(model)


def forms_of_groups(rank: int) -> dict[str, Any]:
    """By the form in which params are given, the params after some steps."""
    forms: dict[str, Callable[[Params], Any]] = {
        "none": lambda model: None,
        "list": lambda model: [{"params": list(model.parameters())}],
        "generator": lambda model: [{"params": model.parameters()}],
        "tuple of groups": lambda model: ({"params": tuple(model.parameters())},),
        "single tensors": lambda model: [{"params": param} for param in model.parameters()],
    }
    facts = {}
    for name, form in forms.items():
        model = Params()
        facts[name] = train(model, distribute(model, CONFIG, param_groups=form(model)), rank)
    return facts


def instances(rank: int) -> dict[str, Any]:
    """Whether an optimizer of the user's equals itself undistributed."""
    kinds: dict[str, Callable[[Any], Optimizer]] = {
        "Adagrad": torch.optim.Adagrad,
        "Adagrad with options": lambda params: torch.optim.Adagrad(params, lr=0.5, initial_accumulator_value=0.25),
        "NAdam": lambda params: torch.optim.NAdam(params, lr=0.25),
    }
    facts: dict[str, Any] = {}
    for name, build in kinds.items():
        model, whole = Params(), Params()
        own = build(model.parameters())
        scheduler = LambdaLR(own, lambda step: 1.0 / (step + 1))  # holds the object from before
        optimizer = distribute(model, own, CONFIG)
        reference = build(whole.parameters())
        ours = train(model, optimizer, rank, scheduler)
        theirs = train_whole(whole, reference, LambdaLR(reference, lambda step: 1.0 / (step + 1)))
        facts[name] = {"equal": torch.equal(ours, theirs), "moved": not torch.equal(ours, flat(Params()))}
    return facts


def fp16_loss(rank: int) -> dict[str, Any]:
    model = Params(default=torch.float16)
    config = dataclasses.replace(CONFIG, loss_scale="dynamic", initial_loss_scale=65536.0)
    scaled = distribute(model, config).scale_loss(torch.tensor(3.0, dtype=torch.float16))
    return {"scaled": scaled.item(), "dtype": str(scaled.dtype)}


def starts_alike(rank: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    model = Sequential(Linear(5, 3), BatchNorm1d(3), Linear(3, 2).requires_grad_(False))
    model(torch.randn(7, 5))  # so that the running statistics differ
    before = {name: value.clone() for name, value in model.state_dict().items()}
    distribute(model, CONFIG)
    return {"before": before, "after": {name: value.clone() for name, value in model.state_dict().items()}}


def two_data_groups(rank: int) -> tuple[Any, Module]:
    """Ranks 0 and 1 hold one half of the model, ranks 2 and 3 the other, which has other names and shapes."""
    halves: list[Callable[[], Module]] = [lambda: Linear(5, 3), lambda: Sequential(Linear(7, 2))]
    torch.manual_seed(rank // 2)
    model = halves[rank // 2]()
    return distribute(model, CONFIG, process_group=data_group(rank), stats_process_group=dist.group.WORLD), model


_GROUPS: list[Any] = []


def data_group(rank: int) -> Any:
    """Collective, the first time: the pair of the rank."""
    if not _GROUPS:
        _GROUPS.extend([dist.new_group([0, 1]), dist.new_group([2, 3])])
    return _GROUPS[rank // 2]


def state_with_stats_group(rank: int) -> dict[str, Any]:
    optimizer, model = two_data_groups(rank)
    width = next(model.parameters()).shape[1]

    def step() -> Any:
        optimizer.zero_grad()
        model(torch.full((1, width), 1.0 + rank)).square().sum().backward()
        return stepped(optimizer).grad_norm

    norms = [step()]
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    kept = flat(model)
    norms += [step(), step()]
    later = flat(model)
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    facts = {"params back": torch.equal(flat(model), kept)}
    again = [step(), step()]
    facts |= {"norms": norms, "again": again, "same later": torch.equal(flat(model), later)}
    bad = {"state": {}} if rank == 3 else saved
    facts["refusal"] = raised(lambda: optimizer.load_state_dict(bad))
    return facts | {"unchanged": torch.equal(flat(model), later)}


def optimizers_in_turn(rank: int) -> dict[str, Any]:
    """One after the other for the same model: the first one released, or forgotten."""
    model, facts = Params(), {}
    for name in ("first", "released", "forgotten"):
        optimizer = distribute(model, CONFIG)
        before = flat(model)
        train(model, optimizer, rank)
        facts[name] = {"moved": not torch.equal(before, flat(model)), "norm": optimizer.last_step.grad_norm}
        if name == "first":
            optimizer.release()
        del optimizer
    return facts


def _bare_list(rank: int) -> object:
    model = Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    return distribute(model, CONFIG, param_groups=list(model.parameters()))  # type: ignore[arg-type]


def _no_params_key(rank: int) -> object:
    return distribute(Linear(2, 2), CONFIG, param_groups=[{"lr": 0.5}])


def _empty_list(rank: int) -> object:
    return distribute(Linear(2, 2), CONFIG, param_groups=[])


def _second_time(rank: int) -> object:
    model = Linear(2, 2)
    first = distribute(model, CONFIG)
    return first, distribute(model, CONFIG)


def _lbfgs(rank: int) -> object:
    model = Linear(2, 2)
    return distribute(model, torch.optim.LBFGS(model.parameters()), CONFIG)


def _class_of_optimizer(rank: int) -> object:
    return distribute(Linear(2, 2), torch.optim.AdamW)  # type: ignore[arg-type]


def _params_for_model(rank: int) -> object:
    return distribute(Linear(2, 2).parameters(), CONFIG)  # type: ignore[arg-type]


def _groups_beside_an_optimizer(rank: int) -> object:
    model = Linear(2, 2)
    own = torch.optim.RMSprop(model.parameters())
    return distribute(model, own, param_groups=[{"params": model.parameters()}])


def _sparse_adam(rank: int) -> object:
    return distribute(Linear(2, 2), dataclasses.replace(CONFIG, optimizer="torch.optim:SparseAdam"))


def _other_group_options(rank: int) -> object:
    model = Linear(2, 2)
    groups = [{"params": model.parameters(), "weight_decay": 0.5 if rank == 2 else 0.0, "lr_mult": 2.0}]
    return distribute(model, CONFIG, param_groups=groups)


def _other_members(rank: int) -> object:
    model = Linear(2, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    return distribute(model, CONFIG, param_groups=groups[::-1] if rank == 2 else groups)


def _other_number_of_groups(rank: int) -> object:
    model = Linear(2, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    return distribute(model, CONFIG, param_groups=None if rank == 2 else groups)


def _other_grad_dtype(rank: int) -> object:
    return distribute(Linear(2, 2).bfloat16(), dataclasses.replace(CONFIG, grads_in_fp32=rank != 2))


def _other_buckets(rank: int) -> object:
    return distribute(Linear(2, 2), dataclasses.replace(CONFIG, bucket_size=100 if rank == 2 else None))


def _bucket_too_small(rank: int) -> object:
    return distribute(Linear(2, 2), dataclasses.replace(CONFIG, bucket_size=3))


def _other_excluded(rank: int) -> object:
    return distribute(Linear(2, 2), CONFIG, excluded_from_norm=lambda name: rank == 2 and name == "bias")


class OtherRMSprop(torch.optim.RMSprop):
    """Its options are those of RMSprop."""


def _other_class_of_instance(rank: int) -> object:
    model = Linear(2, 2)
    return distribute(model, (OtherRMSprop if rank == 2 else torch.optim.RMSprop)(model.parameters()))


def _other_defaults_of_instance(rank: int) -> object:
    """The groups are alike; one that is added later would not be."""
    model = Linear(2, 2)
    groups = [{"params": model.parameters(), "lr": 0.1}]
    return distribute(model, torch.optim.RMSprop(groups, lr=0.5 if rank == 2 else 0.1))


def _other_group_of_instance(rank: int) -> object:
    model = Linear(2, 2)
    return distribute(model, torch.optim.RMSprop(model.parameters(), lr=0.5 if rank == 2 else 0.1))


def _foreign_group_later(rank: int) -> object:
    optimizer = distribute(Linear(2, 2), CONFIG)
    optimizer.add_param_group({"params": list(Linear(1, 1).parameters())})
    return optimizer


def _known_group_later(rank: int) -> object:
    model = Linear(2, 2)
    optimizer = distribute(model, CONFIG)
    optimizer.add_param_group({"params": [model.weight]})
    return optimizer


def _other_group_later(rank: int) -> object:
    model = Sequential(Linear(2, 2), Linear(3, 3), Linear(3, 3))
    optimizer = distribute(model, torch.optim.RMSprop(model[0].parameters()))
    optimizer.add_param_group({"params": list(model[2 if rank == 2 else 1].parameters())})
    return optimizer


def _bad_variable(rank: int) -> object:
    if rank == 2:
        os.environ["MEGATRON_DISTOPT_NONFINITE"] = "ignore"
    try:
        return distribute(Linear(2, 2), CONFIG)
    finally:
        os.environ.pop("MEGATRON_DISTOPT_NONFINITE", None)


def _other_variable(rank: int) -> object:
    if rank == 2:
        os.environ["MEGATRON_DISTOPT_NONFINITE"] = "skip"
    try:
        return distribute(Linear(2, 2), CONFIG)
    finally:
        os.environ.pop("MEGATRON_DISTOPT_NONFINITE", None)


def _shape_in_one_data_group(rank: int) -> object:
    model = Linear(2, 3 if rank == 3 else 2)
    return distribute(model, CONFIG, process_group=data_group(rank), stats_process_group=dist.group.WORLD)


def _float64_in_one_data_group(rank: int) -> object:
    model = Linear(2, 2).to(torch.float64 if rank == 3 else torch.float32)
    return distribute(model, CONFIG, process_group=data_group(rank), stats_process_group=dist.group.WORLD)


#: The class, and what its text has to contain: the values, and the way out.
Refusal = tuple[type[Exception], tuple[str, ...]]


def one_rank(rank: int, kind: type[Exception], *parts: str) -> list[Refusal]:
    """That rank has its own, the others say which rank it was and repeat it."""
    others = (RanksDisagreeError, (f"rank {rank} refused", *parts, "Mend what that rank reports"))
    return [(kind, parts) if each == rank else others for each in range(SIZE)]


def everyone(kind: type[Exception], *parts: str) -> list[Refusal]:
    return [(kind, parts)] * SIZE


def differing(what: str, theirs: str, ours: str) -> list[Refusal]:
    """Rank 2 differs."""
    return everyone(
        RanksDisagreeError,
        what,
        f"rank 2 has {theirs}",
        f"rank 0 has {ours}",
        "Start rank(s) 2 with the code and options",
    )


IN_ITS_PAIR = ("param shapes", "rank 3 has bias[3]", "rank 2 has bias[2]", "Start rank(s) 3 with the code and options")
GROUPS = ("list of dicts with 'params'", "Write [{'params': [...], 'weight_decay': 0.0}, ...]")
BY_PARAM = ("Use one that does, such as torch.optim.AdamW or torch.optim.Adafactor",)

BAD: dict[str, tuple[Callable[[int], object], list[Refusal]]] = {
    "bare list": (_bare_list, everyone(LayoutError, "a Parameter", *GROUPS)),
    "group without params": (_no_params_key, everyone(LayoutError, "a dict without 'params'", *GROUPS)),
    "empty list": (_empty_list, everyone(LayoutError, "empty", *GROUPS)),
    "second time": (
        _second_time,
        everyone(LayoutError, "in another distributed optimizer", "Call release() on the other one first"),
    ),
    "LBFGS instance": (_lbfgs, everyone(ConfigError, "Optimizer LBFGS", *BY_PARAM)),
    "SparseAdam by name": (_sparse_adam, everyone(ConfigError, "torch.optim:SparseAdam", *BY_PARAM)),
    "class of optimizer": (
        _class_of_optimizer,
        everyone(ConfigError, "the class AdamW", "Write distribute(model, AdamW(model.parameters(), lr=...))"),
    ),
    "params for model": (_params_for_model, everyone(ConfigError, "its params", "Write distribute(model, optimizer)")),
    "groups and an optimizer": (
        _groups_beside_an_optimizer,
        everyone(ConfigError, "param_groups", "Give the groups to the optimizer's constructor"),
    ),
    "other group options": (
        _other_group_options,
        differing("param groups", "group 0: lr_mult=2.0, weight_decay=0.5", "group 0: lr_mult=2.0, weight_decay=0.0"),
    ),
    "other members": (_other_members, differing("param group members", "bias in 0", "weight in 0")),
    "other number of groups": (_other_number_of_groups, differing("param groups", "nothing", "group 1: ")),
    "other grad dtype": (_other_grad_dtype, differing("options", "grads_in_fp32=False", "grads_in_fp32=True")),
    "other buckets": (_other_buckets, differing("options", "bucket_size=100", "bucket_size=None")),
    "bucket too small": (
        _bucket_too_small,
        everyone(ConfigError, "bucket_size is 3", "4 data-parallel ranks", "Write bucket_size=40_000_000"),
    ),
    "other excluded from the norm": (_other_excluded, differing("params excluded from the norm", "bias", "nothing")),
    "other class of instance": (
        _other_class_of_instance,
        differing("inner optimizer", "OtherRMSprop", "RMSprop"),
    ),
    "other defaults of instance": (_other_defaults_of_instance, differing("inner optimizer", "lr=0.5", "lr=0.1")),
    "other group of instance": (
        _other_group_of_instance,
        everyone(RanksDisagreeError, "param groups", "lr=0.5", "lr=0.1", "Start rank(s) 2"),
    ),
    "foreign group later": (
        _foreign_group_later,
        everyone(LayoutError, "2 params that the model has not", "Register their module in the model first"),
    ),
    "known group later": (
        _known_group_later,
        everyone(LayoutError, "a param that is in another one", "Edit the options of the group that it is in"),
    ),
    "other group later": (
        _other_group_later,
        everyone(RanksDisagreeError, "rank 2", "rank 0", "with the code and options of the others"),
    ),
    "bad variable": (
        _bad_variable,
        one_rank(2, ConfigError, "MEGATRON_DISTOPT_NONFINITE is 'ignore'", "one of raise, skip, log"),
    ),
    "other variable": (_other_variable, differing("options", "nonfinite='skip'", "nonfinite='raise'")),
    "shape in one data group": (
        _shape_in_one_data_group,
        [
            *[(RanksDisagreeError, ("rank 2 refused", *IN_ITS_PAIR))] * 2,
            *[(RanksDisagreeError, IN_ITS_PAIR)] * 2,
        ],
    ),
    "float64 in one data group": (
        _float64_in_one_data_group,
        one_rank(3, LayoutError, "'bias'", "float64", "float32, bfloat16, float16", "Convert or freeze the param"),
    ),
}

GOOD: dict[str, Callable[[int], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        forms_of_groups,
        instances,
        fp16_loss,
        starts_alike,
        state_with_stats_group,
        optimizers_in_turn,
    )
}


def raised(call: Callable[[], object]) -> Raised:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test says which one it must be
        return type(error), str(error)
    return None


def run_all(rank: int, size: int) -> dict[str, Any]:
    data_group(rank)
    results: dict[str, Any] = {name: function(rank) for name, function in GOOD.items()}
    results.update({name: raised(lambda make=make: make(rank)) for name, (make, _) in BAD.items()})  # type: ignore[misc]
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(run_all, SIZE, seconds=300.0)


def of_ranks(results: list[dict[str, Any]], name: str) -> list[Any]:
    return [result[name] for result in results]


def check_refusals(found: list[Raised], wanted: list[Refusal]) -> None:
    for each, (kind, parts) in zip(found, wanted, strict=True):
        assert each is not None
        assert each[0] is kind, each
        assert [part for part in parts if part not in each[1]] == [], each[1]


@pytest.mark.parametrize("name", BAD)
def test_distribute_when_input_is_bad_then_every_rank_says_what_to_write(
    name: str, results: list[dict[str, Any]]
) -> None:
    check_refusals(of_ranks(results, name), BAD[name][1])


@pytest.mark.parametrize("form", ["list", "generator", "tuple of groups", "single tensors"])
def test_param_groups_when_in_a_form_that_torch_takes_then_the_updates_are_the_same(
    form: str, results: list[dict[str, Any]]
) -> None:
    for found in of_ranks(results, "forms_of_groups"):
        assert torch.equal(found[form], found["none"])


@pytest.mark.parametrize("kind", ["Adagrad", "Adagrad with options", "NAdam"])
def test_instance_when_a_scheduler_holds_it_already_then_it_equals_itself_undistributed(
    kind: str, results: list[dict[str, Any]]
) -> None:
    wanted = {"equal": True, "moved": True}
    assert [found[kind] for found in of_ranks(results, "instances")] == [wanted] * SIZE


def test_scale_loss_when_the_loss_is_fp16_then_it_does_not_overflow(results: list[dict[str, Any]]) -> None:
    assert of_ranks(results, "fp16_loss") == [{"scaled": 3.0 * 65536, "dtype": "torch.float32"}] * SIZE


def test_distribute_when_ranks_start_apart_then_frozen_params_and_module_buffers_are_rank_zeros(
    results: list[dict[str, Any]],
) -> None:
    found = of_ranks(results, "starts_alike")
    wanted = found[0]["before"]
    assert {"1.running_mean", "1.running_var", "2.weight", "2.bias"} < wanted.keys()
    for rank in range(SIZE):
        assert found[rank]["after"].keys() == wanted.keys()
        assert all(torch.equal(value, wanted[name]) for name, value in found[rank]["after"].items())
    assert not torch.equal(found[1]["before"]["2.weight"], wanted["2.weight"])
    assert not torch.equal(found[1]["before"]["1.running_mean"], wanted["1.running_mean"])


def test_distribute_when_the_first_optimizer_has_gone_then_the_next_one_trains(results: list[dict[str, Any]]) -> None:
    for found in of_ranks(results, "optimizers_in_turn"):
        assert [each["moved"] for each in found.values()] == [True] * 3
        # The gradients are the same ones, and each is counted once.
        assert len({each["norm"] for each in found.values()}) == 1


def test_state_dict_when_loaded_with_a_stats_group_then_all_continue_bit_for_bit(
    results: list[dict[str, Any]],
) -> None:
    found = of_ranks(results, "state_with_stats_group")
    for each in found:
        assert each["params back"] and each["same later"]
        assert each["again"] == each["norms"][1:]
        # One norm for the whole model, although the two halves are different.
        assert each["norms"] == found[0]["norms"]


def test_state_dict_when_one_rank_of_another_data_group_cannot_take_it_then_all_refuse(
    results: list[dict[str, Any]],
) -> None:
    found = of_ranks(results, "state_with_stats_group")
    check_refusals(
        [each["refusal"] for each in found], one_rank(3, CheckpointError, "one with state", "hold param_groups")
    )
    assert all(each["unchanged"] for each in found)
