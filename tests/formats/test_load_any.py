"""Loading what other software wrote straight into a run, through `open_any`."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distopt import TorchDistributedOptimizer, distribute
from megatron_distopt.checkpoint.whole_model import owned_pieces
from megatron_distopt.comm import Group
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats import convert, open_any
from megatron_distopt.formats.recognise import load_any
from megatron_distopt.layout import Box
from tests.support.simulated import KINDS, World, element_numbers, small_model

module: Any = import_module("megatron_distopt.formats.recognise")
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
def test_load_when_it_is_any_format_then_every_element_is_in_its_place(
    torch_file: Path, place: str
) -> None:
    world = World.of(MODEL, filled=False, lr=5.0)
    load_any(torch_file.parent / place, world.ranks[0].model, ALONE)
    for kind in KINDS:
        whole = world.whole(kind)
        for param in MODEL:
            assert torch.equal(
                whole[param.name], element_numbers(param, kind, param.padded_shape(1))
            ), param.name
    inner = world.ranks[0].optimizer.inner
    assert {float(state["step"]) for state in inner.state.values()} == {10.0}
    assert [group["lr"] for group in inner.param_groups] == [1e-3, 1e-3]


@pytest.mark.parametrize("dp", [1, 3])
def test_load_when_ranks_share_the_model_then_each_reads_its_part_and_reads_it_once(
    torch_file: Path, dp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[tuple[str, Box]] = []
    source = open_any(torch_file)

    def read_box(key: str, box: Box) -> Tensor:
        reads.append((key, box))
        return source.read_box(key, box)

    world = World.of(MODEL, dp=dp, filled=False)
    names = {param.name for param in MODEL}
    monkeypatch.setattr(
        module, "open_any", lambda path, resume_step: replace(source, read_box=read_box)
    )
    monkeypatch.setattr(
        "megatron_distopt.checkpoint.load.names_of_all", lambda model, everyone: names
    )
    for rank in world.ranks:
        reads.clear()
        load_any(torch_file, rank.model, ALONE)
        wanted = {
            (piece.placement.name, kind) for piece in owned_pieces(rank.model) for kind in KINDS
        }
        assert sorted(key for key, _ in reads) == sorted(f"{kind}/{name}" for name, kind in wanted)
        # A stretch of a flat param begins and ends within rows of the param, which are read whole.
        owned = sum(piece.piece.in_global.numel for piece in owned_pieces(rank.model)) * len(KINDS)
        rows = sum(2 * box.numel // box.sizes[0] for _, box in reads if box.sizes)
        assert owned <= sum(box.numel for _, box in reads) <= owned + rows
    for kind in KINDS:
        whole = world.whole(kind)
        assert all(
            torch.equal(whole[each.name], source.read(f"{kind}/{each.name}")) for each in MODEL
        )


@pytest.mark.usefixtures("one_rank")
def test_load_when_the_update_count_was_lost_then_plain_torch_takes_it_from_resume_step(
    tmp_path: Path,
) -> None:
    def distributed(**options: Any) -> TorchDistributedOptimizer:
        model = torch.nn.Linear(4, 2)
        optimizer = distribute(model, torch.optim.AdamW(model.parameters()), **options)
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        return optimizer

    distributed().save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "state.pt", "torch")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    state["inner"] = "adam"  # as of other software
    for group in state["groups"]:
        group["step"] = None
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match="resume-step"):
        distributed().load(tmp_path / "state.pt")
    optimizer = distributed(resume_step=7)
    optimizer.load(tmp_path / "state.pt")
    assert [int(state["step"]) for state in optimizer.state.values()] == [7, 7]


def test_load_when_a_tensor_is_damaged_then_refused_and_nothing_is_changed(
    torch_file: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "state.pt"
    state = torch.load(torch_file, weights_only=True)
    state["tensors"]["main/scale"] = torch.zeros(2)
    torch.save(state, damaged)
    world = World.of(MODEL)
    before = {kind: world.whole(kind) for kind in KINDS}
    with pytest.raises(CheckpointError, match="scale"):
        load_any(damaged, world.ranks[0].model, ALONE)
    after = {kind: world.whole(kind) for kind in KINDS}
    assert all(
        torch.equal(before[kind][name], after[kind][name])
        for kind in KINDS
        for name in before[kind]
    )
