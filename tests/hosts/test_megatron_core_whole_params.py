"""Optimizers that update whole params in megatron-core, against the host's own optimizer without sharding.

Both have the same class: named by our option, or in place of the host's Adam. Tensor-parallel ranks have parts of
weights, which the class takes for params of their own there as here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.cases import Case
from tests.support.core_version import core_mentions
from tests.support.exact_core import (
    BF16,
    EXACT,
    OVERLAPPED,
    PLAIN,
    TIED,
    assert_equal,
    assert_learns,
    compared,
    crossed,
    exact_training,
    in_worlds_of_two_and_four,
    refusals,
    train_exactly,
)
from tests.support.whole_classes import Adafactor, Soap, tried_once

NAMED = {"OPTIMIZER": "torch.optim:Adafactor"}


@dataclass(frozen=True)
class Both:
    """One training with the reference and with ours.

    Args:
        case: of ours.
        options: of ours, by name; with a class in them the host's Adam is replaced in the reference alone.
        optimizer: in place of the host's Adam.
    """

    case: Case
    options: dict[str, str] = field(default_factory=dict)
    optimizer: type[torch.optim.Optimizer] = Soap


CASES = {
    "fp32 dp2": Both(EXACT.of(dp=2)),
    "bf16 dp2, named": Both(BF16.of(dp=2), NAMED, Adafactor),
    "bf16 dp2, overlapped": Both(BF16.of(dp=2, **OVERLAPPED)),
    "fp16 dp2": Both(EXACT.of(dp=2, precision="fp16")),
    "bf16 pp2": Both(BF16.of(pp=2, tied=TIED)),
    "tp2, gates": Both(EXACT.of(tp=2, gated=True)),
    "bf16 tp2 dp2": Both(BF16.of(tp=2, dp=2)),
    "bf16 experts ep2": Both(BF16.of(dp=4, num_experts=4, ep=2)),
}
if core_mentions("transformer/torch_norm.py", "class WrappedTorchNorm"):  # see tests/support/gpt.py
    CASES["experts tp2 ep2"] = Both(EXACT.of(tp=2, dp=2, num_experts=4, ep=2))


@contextlib.contextmanager
def _in_place_of_adam(optimizer: type[torch.optim.Optimizer]) -> Iterator[None]:
    from megatron.core import optimizer as host

    with (
        mock.patch.object(host, "Adam", optimizer),
        mock.patch.object(host, "USING_PYTORCH_OPTIMIZER", False, create=True),
    ):
        yield


@tried_once()
def collect(rank: int, size: int, folder: str) -> dict[str, Any]:
    """In a rank: every case of this many ranks with the reference and with ours."""
    found: dict[str, Any] = {}
    for name, both in CASES.items():
        if both.case.ranks == size:
            with _in_place_of_adam(both.optimizer):
                whole = train_exactly(both.case.of(optimizer="host-plain", **PLAIN))
            with contextlib.nullcontext() if both.options else _in_place_of_adam(both.optimizer):
                ours = train_exactly(both.case, **both.options)
            found[name] = compared(ours, whole)
    if size == 2:
        from_adam = crossed(SAVED, NAMED, folder, with_head=True)
        found |= {"resumed": _resumed(folder), "crossed": from_adam, "refused": refusals(REFUSED)}
    return found


SAVED = BF16.of(dp=2)
#: How it goes on; tensor-parallel ranks have the global batch in as many microbatches.
AGAIN = {"dp2": SAVED, "tp2": BF16.of(tp=2, num_microbatches=4)}


def _resumed(folder: str) -> dict[str, Any]:
    """Collective: losses of a run that was saved and of what went on from it, and which params began anew there."""
    from tests.support.gpt import parts_of

    found: dict[str, Any] = {}
    with _in_place_of_adam(Soap):
        with exact_training(SAVED) as training:
            for _ in range(2):
                training.step()
            training.optimizer.save(f"{folder}/saved")
            found["whole"] = [training.step().loss for _ in range(2)]
        for name, case in AGAIN.items():
            with exact_training(case) as training:
                training.optimizer.load(f"{folder}/saved")
                inners = [each.sharded.inner for each in parts_of(training.optimizer)]
                new = {each for inner in inners for each, owned in inner.owned.items() if not owned.has_state}
                training.steps_taken = 2
                found[name] = [training.step().loss for _ in range(2)], new
    return found


def _call(call: Callable[[Any], object]) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A call on the optimizer of a run that updates whole params."""

    @contextlib.contextmanager
    def start() -> Iterator[None]:
        with exact_training(SAVED, **NAMED) as training:
            call(training.optimizer)
            yield

    return start


REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "state in low precision": ("float32", lambda: exact_training(SAVED, **NAMED, EXP_AVG_DTYPE="int8")),
    "state on the host": ("offload_fraction", lambda: exact_training(SAVED, **NAMED, OFFLOAD_FRACTION="0.5")),
    "digests": ("log_digests", lambda: exact_training(SAVED, **NAMED, LOG_DIGESTS="1")),
    "between phases": ("offload_to_cpu", _call(lambda optimizer: optimizer.offload_to_cpu())),
    "dist_checkpointing": ("--ckpt-format torch", _call(lambda optimizer: optimizer.sharded_state_dict({}))),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return in_worlds_of_two_and_four(collect, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("name", CASES)
def test_training_when_whole_params_are_updated_then_it_is_that_of_the_class_without_sharding(
    name: str, found: dict[str, Any]
) -> None:
    assert_equal(found[name], CASES[name].case.ranks)


def test_load_when_whole_params_were_saved_then_the_run_goes_on(found: dict[str, Any]) -> None:
    for of_rank in found["resumed"]:
        losses, new = of_rank["dp2"]
        assert losses == of_rank["whole"]
        assert not new


def test_load_when_parts_of_params_are_others_then_their_state_begins_anew(found: dict[str, Any]) -> None:
    for of_rank in found["resumed"]:
        losses, new = of_rank["tp2"]
        assert all("linear" in name or "embedding" in name for name in new), new
        assert any("linear_qkv.weight" in name for each in found["resumed"] for name in each["tp2"][1])
        # The update of those is that of a first step, so losses are near and not equal.
        assert losses == pytest.approx(of_rank["whole"], abs=0.5)


def test_load_when_the_optimizer_is_another_then_params_stay_and_it_learns(found: dict[str, Any]) -> None:
    assert_learns(found["crossed"])


@pytest.mark.parametrize("name", REFUSED)
def test_start_when_whole_params_cannot_be_served_then_refused_on_all_ranks(name: str, found: dict[str, Any]) -> None:
    for messages in found["refused"]:
        assert REFUSED[name][0] in messages[name]
