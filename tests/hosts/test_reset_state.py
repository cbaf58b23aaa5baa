"""State that begins anew: of every kind of inner optimizer, as torch's after `state.pop(param)`;
nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_distopt import DistOptConfig, TorchDistributedOptimizer, distribute
from megatron_distopt.errors import ConfigError
from megatron_distopt.hosts.torch.checkpoint import torch_params
from tests.support.facts import Facts, facts_of, outcomes
from tests.support.models import Params, train_params
from tests.support.values import from_first

#: Whose kernels are the same wherever a tensor ends.
SAME: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, foreach=True),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, foreach=True),
    # Its constructor makes its state.
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, initial_accumulator_value=0.5),
}
#: Whose state alone is looked at.
LOW: dict[str, dict[str, Any]] = {
    "bf16": {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"},
    "remainder": {"main_params_dtype": "remainder", "exp_avg_dtype": "int8"},
    "averages": {"ema_decay": 0.9},
}
POPPED, SCALED = "wide.weight", "deep.weight"


def _begin(optimizer: Optimizer, param: Tensor) -> None:
    state = optimizer.state.pop(param)
    if isinstance(optimizer, torch.optim.Adagrad):
        optimizer.state[param] = {
            "step": torch.zeros_like(state["step"]),
            "sum": torch.full_like(param, 0.5),
        }


def _goes_on_as_torchs(name: str, rank: int, size: int) -> None:
    model, theirs = Params(), Params()
    optimizer = distribute(model, SAME[name](model.groups()), bucket_size=300)
    reference = SAME[name](theirs.groups())
    moment = {"RMSprop": "square_avg", "SGD": "momentum_buffer", "Adagrad": "sum"}
    kind = moment.get(name, "exp_avg")
    for step in range(6):
        if step == 2:
            optimizer.reset_state([dict(model.named())[POPPED]])
            _begin(reference, dict(theirs.named())[POPPED])
        if step == 3:
            optimizer.reset_state([dict(model.named())[SCALED]], scale={kind: 0.5})
            reference.state[dict(theirs.named())[SCALED]][kind].mul_(0.5)
        if step == 4:
            optimizer.reset_state()
            for param in list(reference.state):
                _begin(reference, param)
        train_params(model, optimizer, [step], [rank])
        train_params(theirs, reference, [step], range(size))
        for (key, param), (_, other) in zip(model.named(), theirs.named(), strict=True):
            assert torch.equal(param, other), (step, key)


def _states(optimizer: TorchDistributedOptimizer) -> dict[str, dict[str, Tensor]]:
    """The whole state by name, on all ranks."""
    whole = from_first(copy.deepcopy(optimizer.full_state_dict()))
    params = torch_params(optimizer._model, optimizer.param_groups)
    names = [name for names in params.names for name in names]
    return {name.replace("held.", ""): whole["state"][n] for n, name in enumerate(names)}


def _keeps_all_else(name: str, rank: int, size: int) -> None:
    model = Params(default=torch.bfloat16)
    config = DistOptConfig(lr=0.01, bucket_size=300, **LOW[name])
    optimizer = distribute(model, config, param_groups=model.groups())
    train_params(model, optimizer, range(3), [rank])
    before, key = _states(optimizer), POPPED.replace(".", "_")
    del optimizer.state[dict(model.named())[POPPED]]
    after = _states(optimizer)
    assert after[key]["step"] == 0 and not after[key]["exp_avg"].any()
    assert not after[key]["exp_avg_sq"].any()
    for kind in before[key].keys() - {"step", "exp_avg", "exp_avg_sq"}:
        assert torch.equal(after[key][kind], before[key][kind]), kind
    for each in before.keys() - {key}:
        for kind, value in before[each].items():
            assert torch.equal(after[each][kind], value), (each, kind)
    train_params(model, optimizer, [3], [rank])
    assert {each: int(state["step"]) for each, state in _states(optimizer).items()} == {
        each: 1 if each == key else 4 for each in after
    }


def _saves_what_began(rank: int, size: int, folder: Path) -> None:
    made = []
    for _ in range(2):
        model = Params()
        made.append((model, distribute(model, SAME["AdamW"](model.groups()), bucket_size=300)))
    train_params(*made[0], range(2), [rank])
    made[0][1].reset_state([dict(made[0][0].named())[POPPED]])
    made[0][1].save(folder / "reset")
    made[1][1].load(folder / "reset")
    for model, optimizer in made:
        train_params(model, optimizer, [2], [rank])
    for (_, one), (_, other) in zip(made[0][0].named(), made[1][0].named(), strict=True):
        assert torch.equal(one, other)


class _Matrices(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.one, self.two = (
            torch.nn.Parameter(torch.randn(size, generator=generator)) for size in ((6, 4), (5, 4))
        )

    def forward(self, x: Tensor) -> Tensor:
        return (self.one @ x).square().mean() + (self.two @ x).square().mean()


def _owners_begin_anew(kind: str, rank: int, size: int) -> None:
    """As a new optimizer on the same weights, which are fp32."""
    builds: dict[str, Callable[[Any], Any]] = {
        "Muon": lambda m: [torch.optim.Muon([m.one]), SAME["AdamW"]([m.two])],
        "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1),
    }
    model = _Matrices()
    optimizer = distribute(model, builds[kind](model))
    x = torch.linspace(-1, 1, 12).view(4, 3) * (rank + 1)

    def step(model: _Matrices, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    for _ in range(3):
        step(model, optimizer)
    fresh = _Matrices()
    fresh.load_state_dict(model.state_dict())
    other = distribute(fresh, builds[kind](fresh))
    optimizer.state = {}
    for _ in range(2):
        step(model, optimizer)
        step(fresh, other)
    assert torch.equal(model.one, fresh.one) and torch.equal(model.two, fresh.two)
    if kind == "Adafactor":
        with pytest.raises(ConfigError, match="kept by the owners"):
            optimizer.reset_state(scale={"exp_avg": 0.1})


def _empty_is_read_and_popped() -> None:
    """Of a param without elements, which torch gives an entry with its shape."""
    model = torch.nn.Linear(4, 2)
    model.empty = torch.nn.Parameter(torch.empty(0, 8))
    optimizer = distribute(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert optimizer.state[model.empty]["exp_avg"].shape == (0, 8)
    optimizer.state.pop(model.empty)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


CASES = [
    *(f"{name}, as torch" for name in SAME),
    *(f"{name} alone" for name in LOW),
    "saved",
    "Muon",
    "Adafactor",
    "empty",
]


def collect_facts(rank: int, size: int, folder: Path) -> dict[str, str]:
    checks: dict[str, Callable[[], None]] = {
        "saved": lambda: _saves_what_began(rank, size, folder),
        "Muon": lambda: _owners_begin_anew("Muon", rank, size),
        "Adafactor": lambda: _owners_begin_anew("Adafactor", rank, size),
        "empty": _empty_is_read_and_popped,
    }
    checks |= {f"{n}, as torch": lambda n=n: _goes_on_as_torchs(n, rank, size) for n in SAME}  # type: ignore[misc]
    checks |= {f"{n} alone": lambda n=n: _keeps_all_else(n, rank, size) for n in LOW}  # type: ignore[misc]
    return outcomes(checks)


facts = facts_of(collect_facts, 2)


@pytest.mark.parametrize("case", CASES)
def test_state_when_it_was_reset_then_training_goes_on_as_in_torch(case: str, facts: Facts) -> None:
    facts.assert_passed(case)
