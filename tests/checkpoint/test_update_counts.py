"""Params of one group that were updated differently often, or never: saved at one layout, loaded at
another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from megatron_distopt import distribute
from megatron_distopt.checkpoint import read_manifest
from megatron_distopt.checkpoint.whole_model import owned_pieces
from megatron_distopt.cli import main as cli
from megatron_distopt.comm import Group
from megatron_distopt.errors import CheckpointError
from megatron_distopt.formats import convert
from megatron_distopt.formats.recognise import load_any
from megatron_distopt.optimizer.inner_state import moments_of
from megatron_distopt.optimizer.sharded import ShardedOptimizer
from tests.support.models import Params, exact_grads
from tests.support.simulated import KINDS, World, element_numbers, small_model
from tests.support.spawn import run_ranks

ALONE = Group(None, 0, 1)
MODEL = small_model(layers=2)
MIXED = {"wide.weight": torch.bfloat16, "norm.weight": torch.bfloat16, "scale": torch.bfloat16}
#: Neighbours of one group that differ, one in the other group, and two that never had a gradient.
COUNTS: dict[str, int | None] = {
    "decoder.layers.0.self_attention.linear_proj.weight": 7,
    "decoder.layers.0.mlp.linear_fc1.weight": 3,
    "decoder.layers.1.mlp.linear_fc1.bias": 4,
    "decoder.layers.1.mlp.linear_fc2.weight": None,
    "scale": None,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp1": {},
    "dp3 in buckets": {"dp": 3, "bucket_size": 50},
    "dp2 tp2": {"dp": 2, "tp": 2},
    "pp2 another adam": {"pp": 2, "adam": "torch_foreach"},
}


def _count_of(name: str) -> int | None:
    return COUNTS.get(name.removeprefix("module."), 10)


def _vary(optimizer: ShardedOptimizer) -> None:
    """Gives every param its own count of updates; those without have no state."""
    optimizer.separate(_count_of)
    for run in optimizer.flat_params:
        count = _count_of(run.plan.shards[0].name)
        if count is None:
            optimizer.inner.state.pop(run.main)
        else:
            optimizer.inner.state[run.main]["step"].fill_(count)


def _varied(**layout: Any) -> World:
    world = World.of(MODEL, **layout)
    for rank in world.ranks:
        _vary(rank.optimizer)
    return world


def _counts(world: World) -> dict[str, set[int | None]]:
    """By param, as all ranks have it."""
    found: dict[str, set[int | None]] = {}
    for rank in world.ranks:
        for piece in owned_pieces(rank.model):
            state = rank.optimizer.inner.state.get(piece.flat.main)
            found.setdefault(piece.placement.name, set()).add(int(state["step"]) if state else None)
    return found


def _check_same(world: World) -> None:
    """Counts, moments where there are any, and main params of all."""
    assert _counts(world) == {param.name: {_count_of(param.name)} for param in MODEL}
    for rank in world.ranks:
        for piece in owned_pieces(rank.model):
            param = next(each for each in MODEL if each.name == piece.placement.name)
            kinds = {"main": piece.flat.main, **moments_of(rank.optimizer.inner, piece.flat.main)}
            assert set(kinds) == ({"main"} if _count_of(param.name) is None else set(KINDS))
            for kind, tensor in kinds.items():
                wanted = element_numbers(param, kind, piece.placement.global_shape)[
                    piece.piece.in_global.as_slices()
                ]
                assert torch.equal(piece.view(tensor), wanted), f"{kind} of {param.name}"


@pytest.mark.parametrize(
    ("here", "there"), [*zip(LAYOUTS, [*LAYOUTS][2:] + [*LAYOUTS][:2], strict=True)]
)
def test_load_when_params_have_counts_of_their_own_then_each_gets_its_own(
    here: str, there: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _varied(**LAYOUTS[here]).save(tmp_path)
    assert cli.main(["verify", str(tmp_path)]) == 0, capsys.readouterr().out
    for is_filled in (False, True):
        world = World.of(MODEL, filled=is_filled, step=99, **LAYOUTS[there])
        world.load(tmp_path)
        _check_same(world)


def test_load_when_counts_are_alike_again_then_flat_params_stay_cut_and_right(
    tmp_path: Path,
) -> None:
    World.of(MODEL, dp=2).save(tmp_path)
    world = _varied(dp=3)
    world.load(tmp_path)
    assert _counts(world) == {param.name: {10} for param in MODEL}


def test_load_when_it_is_another_format_then_counts_travel(tmp_path: Path) -> None:
    _varied(dp=3).save(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "state.pt", "torch")
    convert(tmp_path / "state.pt", tmp_path / "back", "distopt")
    for name in ("state.pt", "back"):
        world = World.of(MODEL, filled=False)
        load_any(tmp_path / name, world.ranks[0].model, ALONE)
        _check_same(world)


def test_convert_when_the_other_format_has_one_count_then_refused_by_name(tmp_path: Path) -> None:
    to = "gathered"
    _varied(dp=2).save(tmp_path / "ours")
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "ours", tmp_path / "theirs", to)
    text = str(caught.value)
    assert to in text and "--to" not in text and "distopt or torch" in text
    assert any(repr(name) in text for name in COUNTS)
    assert not (tmp_path / "theirs").exists()


class CountsByGroup(Optimizer):
    """Adam's state, and one count for a group, as apex has it."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Not called."""


def _counting_by_group() -> World:
    world = World.of(MODEL, filled=False)
    optimizer = world.ranks[0].optimizer
    optimizer.inner = CountsByGroup(optimizer.inner.param_groups)
    return world


def test_load_when_the_inner_optimizer_counts_once_a_group_then_refused_with_both_names(
    tmp_path: Path,
) -> None:
    _varied().save(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        _counting_by_group().load(tmp_path)
    text = str(caught.value)
    assert "3 updates of 'decoder.layers.0.mlp.linear_fc1.weight'" in text and "torch_fused" in text


# With real processes and gradients that are missing.


def _grads_of(step: int) -> dict[str, torch.Tensor]:
    """One branch is used from step 2 on, one param never."""
    unused = {"norm.weight", *(("deep.weight",) if step < 2 else ())}
    return {name: grad for name, grad in exact_grads(step, 0, 0).items() if name not in unused}


def _train(model: Params, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        grads = _grads_of(step)
        params = [(name, param) for name, param in model.named() if name in grads]
        torch.stack(
            [(param.float() * grads[name]).sum() for name, param in params]
        ).sum().backward()
        optimizer.step()


def _resumed(rank: int, size: int, folder: Path) -> list[list[torch.Tensor]]:
    """The first two ranks train and save, then all of them resume: params at both ends, where there
    are any."""
    groups, found = [dist.new_group([0, 1]), dist.new_group([*range(size)])], []
    for is_first, group in zip((True, False), groups, strict=True):
        if rank < (2 if is_first else size):
            model = Params(MIXED)
            inner = torch.optim.AdamW(model.groups(), lr=0.01, foreach=True)  # type: ignore[arg-type]
            optimizer = distribute(model, inner, bucket_size=300, process_group=group)
            if is_first:
                _train(model, optimizer, range(3))
                optimizer.save(folder)
            else:
                optimizer.load(folder)
                _train(model, optimizer, range(3, 5))
            found.append([param.detach().clone() for _, param in model.named()])
        dist.barrier()
    return found


def _reference(steps: int) -> list[torch.Tensor]:
    """torch's own, on fp32 copies that are rounded into the model after each step."""
    model, masters = Params(MIXED), Params(MIXED).float()
    optimizer = torch.optim.AdamW(masters.groups(), lr=0.01, foreach=True)  # type: ignore[arg-type]
    for step in range(steps):
        _train(masters, optimizer, range(step, step + 1))
    with torch.no_grad():
        for (_, param), (_, master) in zip(model.named(), masters.named(), strict=True):
            param.copy_(master)
    return [param.detach() for _, param in model.named()]


def test_resume_when_params_had_no_gradient_then_another_number_of_ranks_goes_on_as_torch(
    tmp_path: Path,
) -> None:
    for rank, found in enumerate(run_ranks(_resumed, 3, tmp_path)):
        for params, steps in zip(found, (3, 5) if rank < 2 else (5,), strict=True):
            assert all(
                torch.equal(one, other)
                for one, other in zip(params, _reference(steps), strict=True)
            )
    counts = {name: group.step for group in read_manifest(tmp_path).groups for name in group.names}
    assert {name.removeprefix("held."): step for name, step in counts.items()} == {
        "wide_weight": 3, "wide_bias": 3, "deep_weight": 1, "scale": 3, "norm_weight": None,
    }  # fmt: skip
