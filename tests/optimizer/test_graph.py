"""The captured step: with a stand-in for the device's graphs on a CPU, and with real ones where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_distopt import DistOptConfig, TorchDistributedOptimizer, distribute
from megatron_distopt.comm import Group
from megatron_distopt.errors import ConfigError, NonFiniteGradError
from megatron_distopt.optimizer.graph import CapturedStep, Output
from megatron_distopt.optimizer.sharded import ShardedOptimizer
from megatron_distopt.optimizer.step import make_step
from megatron_distopt.optimizer.sync_check import find_synchronisations
from tests.support.models import Params, exact_grads
from tests.support.refusals import assert_says

STEPS, BAD = 7, 4
#: Powers of two, which an fp32 tensor holds exactly.
RATES = [2.0**-power for power in (7, 7, 8, 6, 7, 9, 7)]


class Tape(TorchDispatchMode):
    """Notes the operations that are carried out while it is entered, and carries them out again."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[tuple[Any, tuple[Any, ...], Mapping[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero"), "the CPU reads a number"
        self.note(func, args, kwargs or {}, out)
        return out

    def note(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Notes an operation that was carried out."""
        self._noted.append((func, args, kwargs, out))

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self._noted:
            again = func(*args, **kwargs)
            for place, value in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():
                    place.copy_(value)


class StandIn:
    """Records operations on the CPU as a graph of a device does.

    While it records nothing is carried out. A replay calls no Python of the step: it carries out the same operations on
    the same memory, and writes its output to the same place every time.
    """

    def __init__(self, sharded: ShardedOptimizer) -> None:
        self.sharded = sharded
        self.times = 0
        #: What is noted now; None where nothing is recorded.
        self.tape: Tape | None = None

    def __call__(self, work: Callable[[], Output]) -> tuple[Callable[[], None], Output]:
        self.times += 1
        tensors = _tensors(self.sharded)
        before = [tensor.clone() for tensor in tensors]
        with Tape() as tape:
            self.tape = tape
            output = work()
            self.tape = None
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)
        return tape.replay, output


def _tensors(sharded: ShardedOptimizer) -> list[Tensor]:
    """All that a step changes."""
    tensors = [each for buffer in sharded.buffers for each in (buffer.param, buffer.grad)]
    tensors += [run.main for run in sharded.flat_params]
    return tensors + [each for state in sharded.inner.state.values() for each in state.values()]


def _same_bits(left: Tensor, right: Tensor) -> bool:
    """Nan is nan here: the gradient of the bad step is compared, too."""
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def _built(device: str = "cpu", **options: Any) -> tuple[Params, TorchDistributedOptimizer]:
    model = Params(default=torch.bfloat16).to(device)
    config = DistOptConfig(accelerator="torch", adam="torch_fused", **options)
    optimizer = distribute(model, config, param_groups=model.groups())
    optimizer.sharded.plan = replace(optimizer.sharded.plan, deferred_check=True)
    return model, optimizer


def _reduced(model: Params, optimizer: TorchDistributedOptimizer, step: int, *, bad: int = BAD) -> None:
    """Leaves gradients as they are before `make_step`, and the rate of the step."""
    optimizer.zero_grad()
    device = optimizer.sharded.device
    grads = {name: grad.to(device) for name, grad in exact_grads(step, 0, 0).items()}
    if step == bad:
        grads["scale"][0] = float("nan")
    optimizer.scale_loss(model(grads)).backward()
    # The user's groups, and those that a step of `sharded` alone reads.
    for group in (*optimizer.param_groups, *optimizer.sharded.inner.param_groups):
        group["lr"] = RATES[step]


def _train(
    captured: bool, *, device: str = "cpu", record: bool = True, **options: Any
) -> tuple[list[list[Tensor]], list[str], TorchDistributedOptimizer]:
    """States and results after every step."""
    model, optimizer = _built(device, **options)
    stand_in = StandIn(optimizer.sharded) if record else None
    captured_step = CapturedStep(optimizer.sharded, stand_in) if captured else None
    states, results = [], []
    for step in range(STEPS):
        _reduced(model, optimizer, step)
        decision = captured_step.step() if captured_step else make_step([optimizer.sharded], Group.of())[0]
        results.append(repr(decision))
        states.append([tensor.clone().cpu() for tensor in _tensors(optimizer.sharded)[1:]])
    if captured and stand_in is not None:
        assert stand_in.times == 1
    return states, results, optimizer


OPTIONS: dict[str, dict[str, Any]] = {
    "skip": {"nonfinite": "skip"},
    "clipped": {"nonfinite": "skip", "clip_grad": 0.25},
    "16-bit grads": {"nonfinite": "skip", "grads_in_fp32": False, "clip_grad": 0.25},
    "scaled": {"nonfinite": "skip", "loss_scale": 8.0, "count_zeros": True},
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", OPTIONS)
def test_captured_step_when_recorded_once_then_every_step_is_bit_for_bit_the_ordinary_one(name: str) -> None:
    plain, plain_results, _ = _train(False, **OPTIONS[name])
    captured, results, optimizer = _train(True, **OPTIONS[name])
    assert results == plain_results
    for left, right in zip(captured, plain, strict=True):
        assert all(map(_same_bits, left, right))
    assert optimizer.sharded.num_skipped == 1
    assert [group["lr"] for group in optimizer.sharded.inner.param_groups] == [RATES[-1]] * 2
    assert not any(group["capturable"] for group in optimizer.sharded.inner.param_groups)


@pytest.mark.usefixtures("one_rank")
def test_captured_step_when_it_is_steady_then_the_cpu_waits_for_nothing_and_the_state_stays_where_it_is() -> None:
    model, optimizer = _built(clip_grad=1.0)
    captured = CapturedStep(optimizer.sharded, StandIn(optimizer.sharded))
    for step in range(3):
        _reduced(model, optimizer, step)
        captured.step()
    places = [tensor.data_ptr() for tensor in _tensors(optimizer.sharded)]
    _reduced(model, optimizer, 3)
    with find_synchronisations() as found:
        captured.step()
    assert found == []
    assert places == [tensor.data_ptr() for tensor in _tensors(optimizer.sharded)]


@pytest.mark.usefixtures("one_rank")
def test_captured_step_when_something_that_was_baked_in_changes_then_it_is_recorded_anew() -> None:
    model, optimizer = _built()
    stand_in = StandIn(optimizer.sharded)
    optimizer.capture_step(stand_in)
    times = []
    for step in range(6):
        _reduced(model, optimizer, step, bad=-1)
        if step == 3:
            optimizer.param_groups[0]["weight_decay"] = 0.5
        if step == 5:  # as loading does
            for state in optimizer.sharded.inner.state.values():
                state["step"] = state["step"].clone()
        optimizer.step()
        times.append(stand_in.times)
    assert times == [0, 1, 1, 2, 2, 3]


@pytest.mark.usefixtures("one_rank")
def test_captured_step_when_the_policy_is_raise_then_the_next_one_raises() -> None:
    model, optimizer = _built()
    captured = CapturedStep(optimizer.sharded, StandIn(optimizer.sharded))
    for step in range(BAD + 1):
        _reduced(model, optimizer, step)
        captured.step()
    before = [tensor.clone() for tensor in _tensors(optimizer.sharded)[2:]]
    _reduced(model, optimizer, BAD + 1)
    with pytest.raises(NonFiniteGradError, match=r"^Invalid gradient: inf or nan on rank 0: .*, in the step before\. "):
        captured.step()
    assert all(map(torch.equal, _tensors(optimizer.sharded)[2:], before))
    assert captured.step().updated


@pytest.mark.usefixtures("one_rank")
def test_captured_step_when_the_cpu_has_to_decide_then_refused() -> None:
    _, optimizer = _built(loss_scale="dynamic")
    with pytest.raises(ConfigError) as error:
        CapturedStep(optimizer.sharded)
    assert_says(
        str(error.value),
        "Invalid captured step: torch_fused with DynamicLossScale on cpu. Must leave no decision to the CPU. "
        "Write adam='torch_fused', train on a GPU, and leave loss_scale='dynamic' out.",
    )


@pytest.mark.usefixtures("one_rank")
def test_captured_step_when_the_device_records_nothing_then_refused() -> None:
    _, optimizer = _built()
    with pytest.raises(ConfigError) as error:
        CapturedStep(optimizer.sharded)
    assert_says(
        str(error.value),
        "Invalid captured step: on cpu. Must be made on a device that records. Call optimizer.step() there.",
    )


@pytest.mark.usefixtures("one_rank")
def test_capture_step_when_called_then_the_optimizers_own_step_is_the_recorded_one() -> None:
    found = []
    for is_captured in (False, True):
        model, optimizer = _built(nonfinite="skip", clip_grad=0.25)
        stand_in = StandIn(optimizer.sharded)
        if is_captured:
            optimizer.capture_step(stand_in)
        for step in range(STEPS):
            _reduced(model, optimizer, step)
            optimizer.step()
        found.append([param.detach().clone() for param in model.parameters()])
        assert stand_in.times == int(is_captured)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that records graphs")
@pytest.mark.parametrize("name", OPTIONS)
def test_captured_step_when_on_a_gpu_then_bit_for_bit_as_without_a_graph(name: str, one_rank: None) -> None:
    plain, plain_results, _ = _train(False, device="cuda", **OPTIONS[name])
    captured, results, _ = _train(True, device="cuda", record=False, **OPTIONS[name])
    assert results == plain_results
    for left, right in zip(captured, plain, strict=True):
        assert all(map(_same_bits, left, right))
