"""Optimizer state in every precision, in every kind of host, against the same training with fp32
state."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import GELU, Linear, Sequential

from megatron_distopt import distribute
from megatron_distopt.optimizer.low_precision.low_precision_tensor import Precision
from tests.support.cases import Case
from tests.support.mini_fork import MiniFork
from tests.support.models import fitted
from tests.support.spawn import run_ranks

#: Those of one spawn each.
HOSTS = (("torch", "megatron_2023"), ("megatron_core",))
FULL = Precision()
IN_A_MEGATRON = (
    FULL,
    Precision("remainder", "bfloat16", "int8"),
    Precision("float32", "bfloat16", "int8"),
)
#: In plain torch each form and each dtype of a moment at least once, and the two moments in
#: different ones.
SOME = {
    "torch": (*IN_A_MEGATRON, Precision("remainder"), Precision("bfloat16", "int8", "bfloat16")),
    "megatron_2023": IN_A_MEGATRON[:3],
    "megatron_core": IN_A_MEGATRON[:3],  # or those of its own fields
}
STEPS = 5
#: Of the last losses, which are about 4 in the Megatrons and 1 here: what rounding of the state by
#: 2**-3 at most leaves after five steps. A state that is lost, or in another's place, gives several
#: times as much.
TOLERANCE = 0.02


@dataclass(frozen=True, eq=False)
class Trained:
    """What a training left on this rank."""

    losses: tuple[float, ...]
    params: Mapping[str, Tensor]


def asked_for(precision: Precision) -> AbstractContextManager[object]:
    """In the block the environment asks for a precision of the state."""
    names = {f"MEGATRON_DISTOPT_{name.upper()}": value for name, value in vars(precision).items()}
    return mock.patch.dict(os.environ, names)


def _train_torch() -> Trained:
    torch.manual_seed(0)
    model = Sequential(Linear(48, 100), GELU(), Linear(100, 70), GELU(), Linear(70, 8)).bfloat16()
    optimizer = distribute(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), accelerator="torch", clip_grad=1.0
    )
    losses = tuple(fitted(model, optimizer, seed) for seed in range(STEPS))
    return Trained(
        losses, {name: param.detach().clone() for name, param in model.named_parameters()}
    )


def _train_fork(fork: MiniFork) -> Trained:
    run = fork.train("--bf16", "--use-distributed-optimizer", f"--train-iters={STEPS}", ours=True)
    return Trained(tuple(each.loss for each in run.iterations), run.params)


def _train_core(fields: tuple[tuple[str, object], ...] = ()) -> Trained:
    from tests.support.gpt import train

    curve = train(Case("distopt", dp=2, steps=STEPS, precision="bf16", fields=fields))
    return Trained(tuple(curve.losses), curve.params)


def _trainer(host: str) -> Callable[[], Trained]:
    if host == "megatron_2023":
        return partial(_train_fork, MiniFork.imported(file_layout="gathered"))
    return {"torch": _train_torch, "megatron_core": _train_core}[host]


def train_all(host: str, precisions: tuple[Precision, ...]) -> dict[Precision, Trained]:
    """Collective: a training in each precision."""
    train = _trainer(host)
    found = {}
    for precision in precisions:
        with asked_for(precision):
            found[precision] = train()
    return found


def _are_equal(one: Trained, other: Trained) -> bool:
    are_params = all(torch.equal(one.params[name], other.params[name]) for name in one.params)
    return one.losses == other.losses and are_params


#: The second is what its config makes of the first.
AWARE = dict.fromkeys(
    ("use_precision_aware_optimizer", "use_precision_aware_optimizer_no_fp8_or_ds_fp8"), True
)
#: By megatron-core's own fields, what they mean. Before 0.13 it has plain main params in the place
#: of remainders.
OWN_FIELDS = {
    Precision("remainder"): {},
    Precision("float32", "bfloat16", "bfloat16"): {
        "store_param_remainders": False,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
    },
}


@dataclass(frozen=True)
class Found:
    """What the trainings of a host left: in some precisions, and with its own fields for them,
    where it has those."""

    trained: dict[Precision, Trained]
    with_own_fields: dict[Precision, Trained]


def _train_some(rank: int, size: int, hosts: tuple[str, ...]) -> dict[str, Found]:
    """Collective: by host."""
    if hosts == ("megatron_core",) and hasattr(
        import_module("tests.support.gpt").OptimizerConfig, "use_precision_aware_optimizer"
    ):
        own = {
            each: _train_core(tuple({**AWARE, **fields}.items()))
            for each, fields in OWN_FIELDS.items()
        }
        return {"megatron_core": Found(train_all("megatron_core", (FULL, *OWN_FIELDS)), own)}
    return {host: Found(train_all(host, SOME[host]), {}) for host in hosts}


@cache
def _found(hosts: tuple[str, ...]) -> dict[str, Found]:
    return run_ranks(_train_some, 2, hosts, seconds=300, core="megatron_core" in hosts)[0]


def test_megatron_core_when_its_own_fields_ask_for_a_precision_then_it_is_ours() -> None:
    found = _found(("megatron_core",))["megatron_core"]
    if not found.with_own_fields:
        pytest.skip("this megatron-core has no precision-aware optimizer")
    for precision, theirs in found.with_own_fields.items():
        assert _are_equal(theirs, found.trained[precision]), precision
    assert len({theirs.losses for theirs in found.with_own_fields.values()}) == len(OWN_FIELDS)


@pytest.mark.parametrize(("host", "hosts"), [(host, hosts) for hosts in HOSTS for host in hosts])
def test_training_when_state_is_kept_in_low_precision_then_it_follows_that_of_fp32(
    host: str, hosts: tuple[str, ...]
) -> None:
    trained = _found(hosts)[host].trained
    last = trained[FULL].losses[-1]
    assert {each: trained[each].losses[-1] for each in trained} == {
        each: pytest.approx(last, abs=TOLERANCE) for each in trained
    }
    remainders = [each for each in trained if each.main_params_dtype == "remainder"]
    for precision in remainders:  # equal to the bit
        assert _are_equal(
            trained[precision], trained[replace(precision, main_params_dtype="float32")]
        ), precision
    assert len({each.losses for each in trained.values()}) == len(trained) - len(remainders)
