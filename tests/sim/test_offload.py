"""State on the host of the simulated accelerator: resumes from any place into any, bytes, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distopt import TorchDistributedOptimizer, distribute
from megatron_distopt.errors import DistOptError
from megatron_distopt.optimizer.low_precision.low_precision_tensor import memory_of
from megatron_distopt.optimizer.main_params import FlatParam
from megatron_distopt.optimizer.sharded import measure_memory
from tests.sim.trial import begin
from tests.support.models import Params, exact_grads
from tests.support.sim import machine
from tests.support.sim.collectives import take_over_world
from tests.support.spawn import run_ranks

_BF16 = torch.bfloat16
#: Of the part on the device; that on the host is in fp32, so that bits stay where the form is exact.
_FORMS: Mapping[str, Mapping[str, Any]] = {"fp32": {}, "remainder": {"main_params_dtype": "remainder"}}
_LOW = {"main_params_dtype": "remainder", "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"}
#: What is not long.
_SHORT = ("remainder",)
#: Fractions of one resume after the other: from each to each.
_PLACES = (0.0, 1.0, 0.5, 0.0, 0.5, 1.0, 0.0)
Facts = dict[str, Any]


class _Run:
    """A model that trains, one step after the other."""

    def __init__(self, device: str, rank: int, **options: Any) -> None:
        self.device, self.rank = device, rank
        self.model = Params(default=options.pop("dtype", _BF16)).to(device)
        given = torch.optim.AdamW(self.model.groups(), lr=2.0**-6)
        options = {"accelerator": "torch", "bucket_size": 128, "clip_grad": 1.0, **options}
        self.optimizer: TorchDistributedOptimizer = distribute(self.model, given, **options)

    def step(self, number: int) -> None:
        grads = {name: grad.to(self.device) for name, grad in exact_grads(number, 0, self.rank).items()}
        self.model(grads).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end(self) -> list[Tensor]:
        params = [param.detach().cpu() for param in self.model.parameters()]
        self.optimizer.release()
        return params

    @property
    def flat_params(self) -> tuple[FlatParam, ...]:
        return self.optimizer._model.sharded.flat_params


def _uninterrupted(rank: int, options: Mapping[str, Any]) -> list[Tensor]:
    run = _Run("cpu", rank, **options)
    for number in range(len(_PLACES)):
        run.step(number)
    return run.end()


def _resumed(rank: int, folder: Path, options: Mapping[str, Any]) -> list[Tensor]:
    """A step at each place, with a checkpoint between two of them."""
    params: list[Tensor] = []
    for number, fraction in enumerate(_PLACES):
        run = _Run("sim", rank, offload_fraction=fraction, **options)
        if number:
            run.optimizer.load(folder / str(number - 1))
        run.step(number)
        run.optimizer.save(folder / str(number))
        params = run.end()
    return params


def _text_of(rank: int, **options: Any) -> str:
    try:
        run = _Run("sim", rank, **options)
    except DistOptError as error:
        return str(error)
    run.end()
    return "accepted"


@dataclass(frozen=True)
class _Held:
    """What a rank holds: bytes by place, and where its main params, moments and pinned memory are."""

    host_nbytes: int
    state_nbytes: int
    staging_nbytes: int
    places: set[str]
    numels: tuple[int, int]


def _held(rank: int, fraction: float, options: Mapping[str, Any]) -> _Held:
    run = _Run("sim", rank, offload_fraction=fraction, **options)
    run.step(0)
    memory, inner = measure_memory(run.optimizer._model.sharded), run.optimizer._model.sharded.inner
    places = set()
    for flat in run.flat_params if fraction == 1.0 else ():
        state = [flat.main, *(each for each in inner.state[flat.main].values() if each.dim())]
        places |= {part.device.type for each in state for part in memory_of(each)}
    on_host = sum(flat.main.numel() for flat in run.flat_params if flat.on_host is not None)
    numels = on_host, sum(flat.main.numel() for flat in run.flat_params)
    run.end()
    return _Held(memory.host_nbytes, memory.state_nbytes, memory.staging_nbytes, places, numels)


def collect(rank: int, size: int, folder: str, forms: Sequence[str]) -> Facts:
    begin()
    take_over_world()
    machine.seed(1)
    facts: Facts = {}
    for name in forms:
        options = _FORMS[name]
        pair = _uninterrupted(rank, options), _resumed(rank, Path(folder) / name, options)
        facts[name] = [torch.equal(*each) for each in zip(*pair, strict=True)]
        digests = {"log_digests": 1, "digest_file": str(Path(folder) / "digests")}
        held = [(0.0, options), (0.5, {**options, **digests}), (1.0, options)]
        facts[f"{name} held"] = {fraction: _held(rank, fraction, given) for fraction, given in held}
    facts["low precision"] = _held(rank, 1.0, _LOW)
    facts["fp32 params"] = _text_of(rank, offload_fraction=1.0, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_distopt.optimizer.offload._available_nbytes", lambda: 3000)
        facts["too small"] = _text_of(rank, offload_fraction=1.0)
    return facts


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    return run_ranks(collect, 2, str(tmp_path_factory.mktemp("offload")), _SHORT, seconds=300)


def test_places_when_listed_then_they_go_from_each_to_each() -> None:
    assert set(pairwise(_PLACES)) == set(permutations((0.0, 0.5, 1.0), 2))


@pytest.mark.parametrize("form", _SHORT)
def test_training_when_every_step_resumes_in_another_place_then_every_bit_is_that_of_an_uninterrupted_one(
    found: list[Facts], form: str
) -> None:
    assert all(all(facts[form]) for facts in found)


@pytest.mark.parametrize("form", _SHORT)
def test_state_when_a_fraction_is_on_the_host_then_so_many_bytes_are(found: list[Facts], form: str) -> None:
    for facts in found:
        _check_bytes(facts, form)


def _check_bytes(facts: Facts, form: str) -> None:
    none, half, whole = (facts[f"{form} held"][fraction] for fraction in (0.0, 0.5, 1.0))
    assert none.host_nbytes == none.staging_nbytes == 0
    assert whole.numels[0] == whole.numels[1]
    assert 0.5 * half.numels[1] <= half.numels[0] < half.numels[1]
    assert 0 < half.host_nbytes < whole.host_nbytes
    counts = whole.host_nbytes - 12 * whole.numels[0]  # of updates, which are on the host, too
    assert whole.host_nbytes == whole.state_nbytes and 0 < counts < 100
    assert whole.staging_nbytes == 6 * whole.numels[0]
    assert whole.places == {"cpu"}


@pytest.mark.long
def test_training_when_it_resumes_in_other_places_then_the_same_holds_in_every_precision(tmp_path: Path) -> None:
    for facts in run_ranks(collect, 2, str(tmp_path), tuple(_FORMS), seconds=600):
        for form in _FORMS:
            assert all(facts[form]), form
            _check_bytes(facts, form)


def test_state_when_low_precision_is_asked_for_then_what_is_on_the_host_is_in_fp32(found: list[Facts]) -> None:
    for facts in found:
        assert facts["low precision"] == facts["remainder held"][1.0]


def test_offload_when_it_cannot_be_then_refused_with_what_is_needed(found: list[Facts]) -> None:
    for facts in found:
        assert "offload_fraction=1.0" in facts["fp32 params"]
        assert "leave offload_fraction out" in facts["fp32 params"]
        assert "3,000 bytes are available" in facts["too small"]
        assert "Write offload_fraction=0." in facts["too small"]
