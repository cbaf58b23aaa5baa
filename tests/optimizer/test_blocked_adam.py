"""torch's fused Adam in blocks: bit for bit as torch's own, wherever the blocks end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from megatron_distopt import DistOptConfig
from megatron_distopt.optimizer import blocked_adam
from megatron_distopt.optimizer.choice import choose_inner
from megatron_distopt.optimizer.inner import rounds_itself, skips_by_itself, step_divided

#: Several blocks and a rest that fills no vector, several params in a block, exactly two blocks,
#: one element.
NUMELS = (1000, 37, 90, 128, 1)
BLOCK = 64
STEPS = 5


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(blocked_adam, "_BLOCK_NUMEL", BLOCK)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def _mains() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(numel, generator=generator) for numel in NUMELS]


def _built(kind: type[Optimizer], mains: list[Tensor], **options: Any) -> Any:
    groups = [
        {"params": mains[:3], "weight_decay": 0.1},
        {"params": mains[3:], "lr": 5e-3},
        {"params": []},
    ]
    return kind(groups, lr=1e-2, weight_decay=0.0, fused=True, **options)  # type: ignore[call-arg]


def _train(
    kind: type[Optimizer], *, divisor: float, bad: int = -1, **options: Any
) -> tuple[Any, list[Tensor], Any]:
    """The optimizer, its main params, and model params as they are rounded; the last param is its
    own model param."""
    mains = _mains()
    inner = _built(kind, mains, **options)
    models = {main: main.bfloat16() for main in mains[:-1]}
    rounds = rounds_itself(inner)
    if rounds:
        inner.round_into(models)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        for main in mains:
            main.grad = torch.randn(main.shape, generator=generator)
        found_inf = torch.tensor(float(step == bad)) if bad >= 0 else None
        step_divided(
            inner, [main.grad for main in mains if main.grad is not None], divisor, found_inf
        )
        for main, model in models.items() if not rounds else ():
            model.copy_(main)
    return inner, mains, models


def _held(trained: tuple[Any, list[Tensor], Any]) -> list[Tensor]:
    inner, mains, models = trained
    states = [inner.state[main][key] for main in mains for key in ("step", "exp_avg", "exp_avg_sq")]
    grads = [main.grad for main in mains if main.grad is not None]
    return [*mains, *models.values(), *states, *grads]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("ours", "theirs"), [(blocked_adam.AdamW, AdamW), (blocked_adam.Adam, Adam)]
)
@pytest.mark.parametrize(("divisor", "bad"), [(1.0, -1), (3.7, -1), (3.7, 3), (1.0, 0)])
def test_step_when_in_blocks_then_every_bit_is_torchs(
    ours: Any, theirs: Any, divisor: float, bad: int
) -> None:
    found, wanted = (_held(_train(kind, divisor=divisor, bad=bad)) for kind in (ours, theirs))
    assert len(found) == len(wanted) == 5 * len(NUMELS) + len(NUMELS) - 1
    assert all(map(torch.equal, found, wanted))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("options", [{"amsgrad": True}, {"maximize": True}])
def test_step_when_a_group_is_unusual_then_torch_updates_and_it_is_rounded_all_the_same(
    options: Any,
) -> None:
    found, wanted = (
        _held(_train(kind, divisor=2.0, **options)) for kind in (blocked_adam.AdamW, AdamW)
    )
    assert all(map(torch.equal, found, wanted))


def test_choose_inner_when_fused_on_a_cpu_then_in_blocks_and_elsewhere_torchs_own() -> None:
    for decay, kind, own in (
        ("decoupled", blocked_adam.AdamW, AdamW),
        ("l2", blocked_adam.Adam, Adam),
    ):
        choice = choose_inner(DistOptConfig(adam="torch_fused", decay=decay), "cpu")
        assert type(choice.build([{"params": [torch.zeros(2)]}])) is kind
        assert type(choice.build([{"params": [torch.zeros(2, device="meta")]}])) is own
        assert skips_by_itself(choice.build([{"params": []}]))
