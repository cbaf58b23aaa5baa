"""Which params of a checkpoint are which of the model: frozen ones, and names that wrappers have
changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_distopt.checkpoint import WholeModel, load_checkpoint
from megatron_distopt.comm import Group
from megatron_distopt.errors import CheckpointError
from tests.support.simulated import KINDS, Param, World, element_numbers

ALONE = Group(None, 0, 1)
MODEL = (
    Param("layers.0.weight", (5, 3)),
    Param("layers.1.weight", (4, 2)),
    Param("scale", (3,), decays=False),
)

#: What wrappers make of a name.
WRAPPED = {
    "DDP": lambda name: f"module.{name}",
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "DDP around torch.compile": lambda name: f"module._orig_mod.{name}",
    "a compiled layer": lambda name: name.replace("layers.0.", "layers.0._orig_mod."),
    "FSDP": lambda name: f"_fsdp_wrapped_module.{name}",
}


def _as(wrapper: str) -> tuple[Param, ...]:
    return tuple(replace(param, name=WRAPPED[wrapper](param.name)) for param in MODEL)


def _load(folder: Path, world: World, **how: object) -> None:
    rank = world.ranks[0]
    load_checkpoint(folder, WholeModel(rank.model.shares, **how), ALONE)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_load_when_one_of_the_two_is_wrapped_then_every_param_is_found(
    wrapper: str, tmp_path: Path
) -> None:
    is_saved = wrapper != "DDP around torch.compile"
    saved, running = (_as(wrapper), MODEL) if is_saved else (MODEL, _as(wrapper))
    World.of(saved, dp=2).save(tmp_path)
    world = World.of(running, filled=False)
    _load(tmp_path, world)
    for kind in KINDS:
        whole = world.whole(kind)
        for one, other in zip(saved, running, strict=True):
            assert torch.equal(whole[other.name], element_numbers(one, kind, one.shape))


def test_load_when_a_model_has_both_names_then_each_gets_its_own(tmp_path: Path) -> None:
    both = (Param("weight", (5, 3)), Param("module.weight", (5, 3)))
    World.of(both, dp=2).save(tmp_path)
    world = World.of(both, filled=False)
    _load(tmp_path, world)
    assert all(
        torch.equal(world.whole("main")[p.name], element_numbers(p, "main", p.shape)) for p in both
    )


def test_load_when_layers_are_frozen_then_their_state_is_left_in_the_file(tmp_path: Path) -> None:
    World.of(_as("DDP"), dp=2).save(tmp_path)
    world = World.of(MODEL[1:], filled=False)
    _load(tmp_path, world, frozen=frozenset({"layers.0.weight"}))
    assert all(
        torch.equal(
            world.whole(kind)[param.name][...], element_numbers(_wrapped(param), kind, param.shape)
        )
        for kind in KINDS
        for param in MODEL[1:]
    )


def _wrapped(param: Param) -> Param:
    return replace(param, name=WRAPPED["DDP"](param.name))


@pytest.mark.parametrize("running", [MODEL[1:], (*MODEL, Param("head", (3,)))])
def test_load_when_names_are_missing_or_foreign_then_a_plain_user_is_told_no_flag(
    running: tuple[Param, ...], tmp_path: Path
) -> None:
    World.of(MODEL).save(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        _load(tmp_path, World.of(running))
    text = str(caught.value)
    assert ("layers.0.weight" in text) != ("head" in text)
    assert "--" not in text and "start from its weights with a new optimizer" in text
