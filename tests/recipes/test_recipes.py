"""The recipes, each with our optimizer and with torch's AdamW, whose losses have to be the same.

With AdamW a recipe is the same program: `megatron_distopt.distribute` is replaced by one that
returns the AdamW it is given, which in the plain loop averages the gradients as
DistributedDataParallel does.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import megatron_distopt
from tests.support.spawn import run_ranks

#: fp32: flat params are cut elsewhere than torch's, so that a few elements go through other lanes
#: of the same kernel. A unit in the last place of a param grows with the steps; a step with another
#: gradient or lr is off by 1e-2.
TOLERANCE = {"rel": 1e-4}


class Averaged(torch.optim.AdamW):
    """AdamW of the plain loop, with the calls that `distribute` adds.

    Args:
        model: whose gradients are averaged.
        given: its groups are used.
    """

    def __init__(self, model: nn.Module, given: torch.optim.Optimizer) -> None:
        super().__init__(given.param_groups)
        self.model = model

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        for param in self.model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        return clip_grad_norm_(self.model.parameters(), max_norm)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)


def as_torch(model: nn.Module, adamw: torch.optim.AdamW, **options: Any) -> Any:
    if options:
        return Averaged(model, adamw)
    adamw.consolidate_state_dict = lambda to=0: None  # type: ignore[attr-defined]
    return adamw


@contextlib.contextmanager
def distribute_is(replacement: Callable[..., Any]) -> Iterator[None]:
    before = megatron_distopt.distribute
    megatron_distopt.distribute = replacement
    try:
        yield
    finally:
        megatron_distopt.distribute = before


def torch_loop(folder: Path) -> list[float]:
    from recipes import torch_loop

    return torch_loop.train(4, folder / "loop")


def accelerate_loop(folder: Path) -> list[float]:
    from recipes import accelerate_loop

    return accelerate_loop.train(folder / "accelerate")


def huggingface_trainer(folder: Path) -> list[float]:
    from recipes import huggingface_trainer

    return huggingface_trainer.train(folder / "trainer")


def lightning_module(folder: Path) -> list[float]:
    from recipes import lightning_module

    return lightning_module.train(folder / "lightning")


def resumed_trainer(folder: Path) -> list[float]:
    from recipes import huggingface_trainer

    return huggingface_trainer.train(
        folder / "again", resume=str(folder / "trainer" / "checkpoint-4")
    )


def resumed_lightning(folder: Path) -> list[float]:
    from recipes import lightning_module

    lightning_module.train(folder / "first", epochs=1)
    return lightning_module.train(
        folder / "second", epochs=2, resume=folder / "first" / "last.ckpt"
    )


RECIPES = {
    each.__name__: each
    for each in (torch_loop, accelerate_loop, huggingface_trainer, lightning_module)
}
RESUMED = {each.__name__: each for each in (resumed_trainer, resumed_lightning)}


def losses(rank: int, size: int, folder: str) -> dict[str, list[float]]:
    """By recipe and optimizer; in one process, because the frameworks take many seconds to
    import."""
    os.environ["TORCHELASTIC_RUN_ID"] = "of the tests"  # by which Lightning knows torchrun
    found = {}
    for name, recipe in (RECIPES | RESUMED).items():
        found[name] = recipe(Path(folder))
    with distribute_is(as_torch):
        for name, recipe in RECIPES.items():
            found[f"{name} with AdamW"] = recipe(Path(folder) / "torch")
        found["uninterrupted"] = uninterrupted()
    return found


def uninterrupted() -> list[float]:
    from recipes import torch_loop

    with tempfile.TemporaryDirectory() as unused:
        return torch_loop.train(8, Path(unused) / "none")


def goes_on_alone(rank: int, size: int, folder: str) -> list[float]:
    from recipes import torch_loop

    return torch_loop.train(8, Path(folder) / "loop")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[float]]]:
    folder = str(tmp_path_factory.mktemp("recipes"))
    found = run_ranks(losses, 2, folder, seconds=400)
    found[0]["on one rank"] = run_ranks(goes_on_alone, 1, folder, seconds=100)[0]
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_when_trained_then_its_losses_are_those_of_adamw(
    results: list[dict[str, list[float]]], name: str
) -> None:
    for each in results:
        assert each[name] == pytest.approx(each[f"{name} with AdamW"], **TOLERANCE)


def test_loop_when_resumed_on_one_rank_then_it_goes_on_as_if_uninterrupted(
    results: list[dict[str, list[float]]],
) -> None:
    both = results[0]["torch_loop"] + results[0]["on one rank"]
    assert both == pytest.approx(results[0]["uninterrupted"], **TOLERANCE)


def test_accelerate_when_its_state_is_loaded_then_it_repeats_what_came_after_the_save(
    results: list[dict[str, list[float]]],
) -> None:
    for each in results:
        epoch = len(each["accelerate_loop"]) // 3
        second, third = (
            each["accelerate_loop"][epoch : 2 * epoch],
            each["accelerate_loop"][2 * epoch :],
        )
        assert third == pytest.approx(second, **TOLERANCE)
        assert second != pytest.approx(each["accelerate_loop"][:epoch], **TOLERANCE)


def test_trainer_when_resumed_from_its_checkpoint_then_it_goes_on_as_if_uninterrupted(
    results: list[dict[str, list[float]]],
) -> None:
    assert results[0]["resumed_trainer"] == pytest.approx(
        results[0]["huggingface_trainer"], **TOLERANCE
    )


def test_lightning_when_resumed_from_its_checkpoint_then_it_goes_on_as_if_uninterrupted(
    results: list[dict[str, list[float]]],
) -> None:
    for each in results:
        epoch = len(each["lightning_module"]) // 2
        assert each["resumed_lightning"] == pytest.approx(
            each["lightning_module"][epoch:], **TOLERANCE
        )
