"""A checkpoint written at one layout and read at another, all ranks in one process: the state as
global tensors is the same to the bit.

The state says of every element which one it is (tests/support/simulated.py), so that one that lands
elsewhere is seen. With real processes and training: test_megatron_2023_reshard.py and
test_megatron_core_checkpoints.py in tests/hosts.

Exercises checkpoint/load_plan.py, checkpoint/boxes.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatron_distopt.errors import CheckpointError
from megatron_distopt.layout import Placement
from tests.support.simulated import KINDS, World, element_numbers, small_model

MODEL = small_model()
Layout = dict[str, Any]
#: What a run may look like.
LAYOUTS: dict[str, Layout] = {
    "dp1": {},
    "dp6 in buckets": {"dp": 6, "bucket_size": 100},
    "dp2 tp2": {"dp": 2, "tp": 2},
    "dp3 tp2 in buckets": {"dp": 3, "tp": 2, "bucket_size": 64},
    "dp2 tp2 pp2": {"dp": 2, "tp": 2, "pp": 2},
    "dp2 fp32 model": {"dp": 2, "plain_dtype": torch.float32},
    "dp2 another adam": {"dp": 2, "adam": "torch_foreach"},
}


#: Every layout is written once and read at one other.
PAIRS = list(zip(LAYOUTS, [*list(LAYOUTS)[3:], *list(LAYOUTS)[:3]], strict=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A checkpoint of each layout."""
    folder = tmp_path_factory.mktemp("saved")
    for name, layout in LAYOUTS.items():
        World.of(MODEL, **layout).save(folder / name)
    return {name: folder / name for name in LAYOUTS}


def _is_same_as_saved(world: World) -> bool:
    whole = {kind: world.whole(kind) for kind in KINDS}
    return all(
        torch.equal(
            whole[kind][param.name], element_numbers(param, kind, param.padded_shape(world.tp))
        )
        for kind in KINDS
        for param in world.params
    )


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_load_when_the_layout_is_another_then_every_element_is_in_its_place(
    here: str, there: str, saved: Mapping[str, Path]
) -> None:
    world = World.of(MODEL, **LAYOUTS[there], filled=False, lr=5.0)
    world.load(saved[here])
    assert _is_same_as_saved(world)
    for rank in world.ranks:
        optimizer = rank.optimizer
        assert {float(state["step"]) for state in optimizer.inner.state.values()} == {10.0}
        groups = zip(optimizer.inner.param_groups, optimizer.plan.groups, strict=True)
        assert all(group["lr"] == 1e-3 for group, plan in groups if plan.names)
        assert all(
            torch.equal(run.model, run.main.to(run.model.dtype)) for run in optimizer.flat_params
        )


def test_checkpoint_when_read_by_torch_alone_then_it_holds_the_whole_tensors(
    saved: Mapping[str, Path], tmp_path: Path
) -> None:
    name = "dp2 tp2 pp2"
    dcp_to_torch_save(saved[name], tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    tp = LAYOUTS[name]["tp"]
    wanted = {
        f"{kind}/{p.name}": element_numbers(p, kind, p.padded_shape(tp))
        for kind in KINDS
        for p in MODEL
    }
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


def test_load_when_the_vocabulary_has_more_padding_then_the_new_rows_keep_their_values(
    tmp_path: Path,
) -> None:
    """37 rows are 40 on one tensor-parallel rank and 48 on four."""
    World.of(MODEL, dp=2).save(tmp_path)
    world = World.of(MODEL, tp=4)
    name = MODEL[0].name
    for rank in world.ranks:
        for run in rank.optimizer.flat_params:
            run.main.fill_(7.0)
    world.load(tmp_path)
    main, moment = world.whole("main")[name], world.whole("exp_avg")[name]
    assert main.shape == (48, 6)
    assert torch.equal(main[:37], element_numbers(MODEL[0], "main", (37, 6)))
    assert torch.equal(main[40:], torch.full((8, 6), 7.0))
    assert torch.equal(moment[37:], torch.zeros(11, 6))


def test_save_when_two_params_have_one_name_then_refused(tmp_path: Path) -> None:
    world = World.of(MODEL, dp=2)
    for rank in world.ranks:
        placements: dict[str, Placement] = dict(rank.model.shares[0].placements)
        scale = placements["module.scale"]
        placements["module.decoder.layers.0.input_layernorm.weight"] = replace(scale, shape=(6,))
        object.__setattr__(rank.model.shares[0], "placements", placements)
    with pytest.raises(CheckpointError, match=r"Tensor '.*/scale'"):
        world.save(tmp_path)
    assert not (tmp_path / "manifest.json").exists()


def test_loss_scale_when_the_run_has_one_then_its_counters_travel(tmp_path: Path) -> None:
    world = World.of(MODEL, dp=2)
    for rank in world.ranks:
        rank.optimizer.loss_scale.load_state_dict({"scale": 32.0, "good_steps": 7, "tolerated": 1})
        rank.optimizer.num_skipped = 3
    world.save(tmp_path)
    other = World.of(MODEL, dp=3, tp=2, filled=False)
    other.load(tmp_path)
    scales = [rank.optimizer.loss_scale.state_dict() for rank in other.ranks]
    assert scales == [{"scale": 32.0, "good_steps": 7, "tolerated": 1}] * 6
    assert [rank.optimizer.num_skipped for rank in other.ranks] == [3] * 6
