"""Collectives in whose place other code has put its own: what works is used, what does not is
refused at the start.

One spawn of two ranks trains plain torch modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.comm import Group, collectives, try_collectives
from megatron_distopt.errors import DistOptError
from megatron_distopt.stand_ins import code_of
from tests.support.facts import Facts, facts_of
from tests.support.refusals import assert_mentions
from tests.support.stand_ins import Wrapper, around, dropping_float64, type_remedy, zeroing_float64

SIZE = 2
CPU = torch.device("cpu")


def _rounding(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Sums in fp32 and copies that back."""

    @functools.wraps(all_reduce)
    def reduced(tensor: Tensor, *args: Any, **options: Any) -> None:
        short = tensor.float()
        all_reduce(short, *args, **options)
        tensor.copy_(short)

    return reduced


def _averaging(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(all_reduce)
    def reduced(tensor: Tensor, *args: Any, **options: Any) -> None:
        all_reduce(tensor, *args, **options)
        tensor.div_(SIZE)

    return reduced


def _all_as_mine(_: Callable[..., Any]) -> Callable[..., Any]:
    def gathered(received: list[Any], value: Any, group: Any = None) -> None:
        received[:] = [value] * len(received)

    return gathered


def _nothing(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **options: None


def _nothing_in_bf16(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def carried(into: Tensor, *args: Any, **options: Any) -> Any:
        return None if into.dtype is torch.bfloat16 else own(into, *args, **options)

    return carried


def _distributed(model: torch.nn.Module) -> str:
    try:
        distribute(model, DistOptConfig(grads_in_fp32=False))
    except DistOptError as error:
        return f"{type(error).__name__}: {error}"
    return "trains"


#: By name: the function, what takes its place, and what the error has beside its name and file.
WRONG: dict[str, tuple[str, Wrapper, tuple[str, ...]]] = {
    "float64 dropped": ("all_reduce", dropping_float64, ("float64", ".all_reduce.__wrapped__")),
    "float64 zeroed": ("all_reduce", zeroing_float64, ("float64", "[0.0]", "c10d.all_reduce")),
    "float64 rounded": ("all_reduce", _rounding, ("float64", ".all_reduce.__wrapped__")),
    "average for sum": ("all_reduce", _averaging, ("float64", ".all_reduce.__wrapped__")),
    "objects of one rank": ("all_gather_object", _all_as_mine, ("objects", "c10d.all_gather_obj")),
    "no broadcast": ("broadcast", _nothing, ("c10d.broadcast",)),
    "no sum in bf16": (collectives.REDUCE_SCATTER, _nothing_in_bf16, ("bfloat16", "__wrapped__")),
    "no gather in bf16": (collectives.ALL_GATHER, _nothing_in_bf16, ("bfloat16", "__wrapped__")),
}
_BACKENDS_OWN = (collectives.REDUCE_SCATTER, collectives.ALL_GATHER)


def _tried(rank: int) -> dict[str, tuple[str, str]]:
    found = {}
    for name, (function, wrapper, _) in WRONG.items():
        model = torch.nn.Linear(4, 4).to(torch.bfloat16 if "bf16" in name else torch.float32)
        with pytest.MonkeyPatch.context() as patch:
            if function in _BACKENDS_OWN:
                patch.setattr(collectives, "_PAIRWISE_OVER", "nobody")
            patch.setattr(dist, function, wrapper(getattr(dist, function)))
            text = _distributed(model)
            type_remedy(text)
            found[name] = text, _distributed(model)
    return found


def collect_facts(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"tried": _tried(rank)}
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(dist, "all_reduce", zeroing_float64(dist.all_reduce))
        found["on rank 1"] = _distributed(torch.nn.Linear(4, 4))
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        for name in {function for function, *_ in WRONG.values()}:
            counted = around("adaptor", getattr(dist, name))
            patch.setattr(
                dist, name, lambda *a, _f=counted, _n=name, **o: calls.append(_n) or _f(*a, **o)
            )
        patch.setattr(collectives, "_PAIRWISE_OVER", "nobody")
        found["working"] = _distributed(torch.nn.Linear(4, 4))
    found["called"] = set(calls)
    return found


facts = facts_of(collect_facts, SIZE)


@pytest.mark.parametrize("name", WRONG)
def test_collective_when_what_replaced_it_is_wrong_then_refused_with_who_and_what_to_type(
    facts: Facts, name: str
) -> None:
    function, _, mentions = WRONG[name]
    texts, after = zip(*(each[name] for each in facts["tried"]), strict=True)
    # What is right on one rank, as the broadcast on the one that gives, that rank has from others.
    assert any(text.startswith("ConfigError") for text in texts)
    for text in texts:
        assert_mentions(text, f"torch.distributed.{function}", "stand_ins.py", *mentions)
    assert after == ("trains",) * SIZE


def test_collective_when_it_is_replaced_on_one_rank_then_the_other_says_which(facts: Facts) -> None:
    other, own = facts["on rank 1"]
    assert own.startswith("ConfigError") and "replaced" in own
    assert_mentions(other, "RanksDisagreeError", "rank 1", own.partition(": ")[2])


def test_collective_when_what_replaced_it_works_then_it_is_used(facts: Facts) -> None:
    for each in facts.by_rank:
        assert each["working"] == "trains"
        assert each["called"] == {function for function, *_ in WRONG.values()}


def test_code_when_decorators_are_around_it_then_every_module_is_named() -> None:
    """A decorator gives its function the name and module of what it wraps, and torch has some."""
    inner = around("adaptor.inner", dist.all_reduce)
    outer = around("adaptor.outer", torch.no_grad()(inner))
    modules = [module for module, _ in code_of(outer)]
    assert outer.__module__ == dist.all_reduce.__module__
    assert modules[0] == "adaptor.outer" and modules[2] == "adaptor.inner"
    assert {module.split(".")[0] for module in (modules[1], *modules[3:])} == {"torch"}
    assert list(code_of(None)) == []
    assert [module for module, _ in code_of(functools.partial(print))] == ["functools"]


def test_trial_when_the_group_has_one_rank_then_nothing_is_called() -> None:
    try_collectives(CPU, Group(None, 0, 1), dtypes=[torch.float32], sums=[torch.float64])
