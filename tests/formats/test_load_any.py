"""Loading what other software wrote straight into a run, through `open_any`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron_distopt.comm import Group
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats import convert
from megatron_distopt.formats.load_any import load_any
from tests.support.simulated import KINDS, World, element_numbers, small_model

MODEL = small_model(layers=2)
ALONE = Group(None, 0, 1)


@pytest.fixture(scope="module")
def torch_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of `convert --to torch`, which is none of our folders."""
    folder = tmp_path_factory.mktemp("any")
    World.of(MODEL, dp=3, pp=2).save(folder / "ours")
    convert(folder / "ours", folder / "state.pt", "torch")
    return folder / "state.pt"


@pytest.mark.parametrize("place", ["state.pt", "ours"])
def test_load_when_it_is_any_format_then_every_element_is_in_its_place(torch_file: Path, place: str) -> None:
    world = World.of(MODEL, filled=False, lr=5.0)
    load_any(torch_file.parent / place, world.ranks[0].model, ALONE)
    for kind in KINDS:
        whole = world.whole(kind)
        for param in MODEL:
            assert torch.equal(whole[param.name], element_numbers(param, kind, param.padded_shape(1))), param.name
    inner = world.ranks[0].optimizer.inner
    assert {float(state["step"]) for state in inner.state.values()} == {10.0}
    assert [group["lr"] for group in inner.param_groups] == [1e-3, 1e-3]


def test_load_when_the_step_is_said_and_known_then_refused_where_they_differ(torch_file: Path) -> None:
    world = World.of(MODEL, filled=False)
    load_any(torch_file, world.ranks[0].model, ALONE, resume_step=10)
    with pytest.raises(CheckpointError, match=re.escape("10. Must be the 7 of --resume-step. Drop --resume-step")):
        load_any(torch_file, world.ranks[0].model, ALONE, resume_step=7)


def test_load_when_a_tensor_is_damaged_then_refused_and_nothing_is_changed(torch_file: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "state.pt"
    state = torch.load(torch_file, weights_only=True)
    state["tensors"]["main/scale"] = torch.zeros(2)
    torch.save(state, damaged)
    world = World.of(MODEL)
    before = {kind: world.whole(kind) for kind in KINDS}
    with pytest.raises(CheckpointError, match="scale"):
        load_any(damaged, world.ranks[0].model, ALONE)
    after = {kind: world.whole(kind) for kind in KINDS}
    assert all(torch.equal(before[kind][name], after[kind][name]) for kind in KINDS for name in before[kind])


def test_load_when_nothing_is_there_then_refused_with_the_path(tmp_path: Path) -> None:
    world = World.of(MODEL)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        load_any(tmp_path / "nowhere", world.ranks[0].model, ALONE)
