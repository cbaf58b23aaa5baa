"""The state of one rank: training goes on from it bit for bit, whatever the optimizer keeps."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.comm import Group
from megatron_distopt.errors import CheckpointError
from tests.support.models import Params, exact_grads, stepped

CONFIG = DistOptConfig(accelerator="torch", adam="torch_foreach", lr=0.01, weight_decay=0.1)
DTYPES = (torch.float32, torch.bfloat16)
ONE_RANK = Group(None, 0, 1)


pytestmark = pytest.mark.usefixtures("one_rank")


class Trained:
    """A model of `Params` with its optimizer."""

    def __init__(self, config: DistOptConfig = CONFIG, dtype: torch.dtype = torch.float32, **how: Any) -> None:
        self.model = Params(default=dtype)
        self.optimizer = distribute(self.model, config, **how)
        self.steps_taken = 0

    def train(self, steps: int) -> Trained:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(exact_grads(self.steps_taken, 0, 0))
            self.optimizer.scale_loss(loss).backward()
            assert stepped(self.optimizer).updated
            self.steps_taken += 1
        return self

    def save(self, folder: Path) -> Trained:
        self.optimizer.save(folder)
        return self

    def take(self, other: Trained) -> Trained:
        """Params and state of another one, through torch's format."""
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        self.steps_taken = other.steps_taken
        return self

    def load(self, folder: Path, steps_taken: int) -> Trained:
        self.optimizer.load(folder)
        self.steps_taken = steps_taken
        return self

    def held(self) -> dict[str, Any]:
        """Model and whole state, as copies."""
        params = {name: param.detach().clone() for name, param in self.model.named()}
        return {"params": params, "state": copy.deepcopy(self.optimizer.state_dict())}


def same(left: Any, right: Any) -> bool:
    """Bit for bit, through dicts, lists and tuples."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, optimizer="torch.optim:Adagrad")], ids=["adam", "adagrad"])
def test_load_when_saved_before_the_first_step_then_it_trains_as_a_fresh_optimizer(
    config: DistOptConfig, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Adagrad has a state from the start."""
    trained = Trained(config, dtype).save(tmp_path).train(3)
    assert trained.optimizer.sharded.inner.state
    trained.load(tmp_path, steps_taken=0)
    assert same(trained.held(), Trained(config, dtype).held())
    assert same(trained.train(2).held(), Trained(config, dtype).train(2).held())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [("torch_foreach", "torch_fused"), ("torch_fused", "torch_foreach"), ("torch_foreach", "torch_foreach")],
)
def test_load_when_another_kernel_of_torchs_saved_it_then_it_trains_on(
    saved_by: str, loaded_by: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    first = Trained(replace(CONFIG, adam=saved_by), dtype).train(3).save(tmp_path)
    second = Trained(replace(CONFIG, adam=loaded_by), dtype).load(tmp_path, steps_taken=3)
    assert same(
        {name: param.detach() for name, param in second.model.named()},
        {name: param.detach() for name, param in first.model.named()},
    )
    for group in second.optimizer.param_groups:
        assert (bool(group["fused"]), bool(group["foreach"])) == (loaded_by == "torch_fused", not group["fused"])
    first.train(3)
    second.train(3)
    for (_, left), (_, right) in zip(first.model.named(), second.model.named(), strict=True):
        # The two kernels round differently: some ulps of a value near 1, which a bf16 param can turn into one of its.
        tolerance = 0.0 if saved_by == loaded_by else 1e-5 if dtype is torch.float32 else 2.0**-6
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)
    assert all(float(state["step"]) == 6 for state in second.optimizer.state.values())


def test_load_when_saved_by_another_kind_of_optimizer_then_refused_and_nothing_changes(tmp_path: Path) -> None:
    Trained(replace(CONFIG, optimizer="sgd")).train(2).save(tmp_path)
    trained = Trained().train(1)
    before = trained.held()
    with pytest.raises(CheckpointError, match=r"Must hold exp_avg, exp_avg_sq, .* for torch_foreach"):
        trained.load(tmp_path, 0)
    assert same(trained.held(), before)


class Peculiar(Optimizer):
    """Its step is a tensor of one element, as large as a main param of one element, and its keys are our words."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(step=torch.zeros(1), main=torch.zeros_like(param), cut=0, whole="a text")
                state["step"] += 1
                state["cut"] += 2
                state["main"].mul_(0.5).add_(param.grad)
                param.add_(state["main"], alpha=-group["lr"] / float(state["step"]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_load_when_the_users_optimizer_has_our_words_as_keys_then_it_round_trips(dtype: torch.dtype) -> None:
    def build() -> Trained:
        model = Params(default=dtype)
        trained = Trained.__new__(Trained)
        trained.model, trained.steps_taken = model, 0
        trained.optimizer = distribute(model, Peculiar(model.groups()), CONFIG)
        return trained

    first = build().train(3)
    second = build().take(first)
    assert same(second.held(), first.held())
    assert same(second.train(3).held(), first.train(3).held())


class Alone(torch.nn.Module):
    """One param of one element: its main param is as large as a step that is a tensor of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.only = Parameter(torch.ones(1))

    def forward(self) -> Tensor:
        return self.only.square().sum()


def test_load_when_a_param_has_one_element_then_a_step_of_one_element_round_trips() -> None:
    def build() -> tuple[Alone, Any]:
        model = Alone()
        return model, distribute(model, Peculiar(model.parameters()), CONFIG)

    def train(model: Alone, optimizer: Any) -> float:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        return model.only.item()

    model, optimizer = build()
    for _ in range(2):
        train(model, optimizer)
    other, other_optimizer = build()
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [train(other, other_optimizer) for _ in range(3)] == [train(model, optimizer) for _ in range(3)]
