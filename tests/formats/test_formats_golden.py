"""Files that a real fork of 2023 wrote, Megatron-DeepSpeed on a CPU: read, and written again.

They are not in the repository. MEGATRON_FORK_GOLDEN names a folder with checkpoints/mds_*.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distopt.checkpoint.source import Source
from megatron_distopt.formats import convert, open_any

GOLDEN = os.environ.get("MEGATRON_FORK_GOLDEN", "")
pytestmark = pytest.mark.skipif(
    not GOLDEN,
    reason="MEGATRON_FORK_GOLDEN names no folder with checkpoints/ that a real fork wrote",
)
GATHERED = ("mds_distopt_fp32", "mds_distopt_bf16", "mds_distopt_bf16_dp5")
PLAIN = ("mds_plain_fp32", "mds_plain_bf16")
KINDS, PARAMS, NUMEL = ("main", "exp_avg", "exp_avg_sq"), 28, 169728


def _iteration(name: str) -> Path:
    return Path(GOLDEN) / "checkpoints" / name / "iter_0000010"


class ModelType(Enum):
    """In the place of megatron's, whose import this process does without."""

    encoder_or_decoder = 1


def _raw(path: Path) -> dict[str, Any]:
    """What torch says."""
    numpy = pytest.importorskip("numpy")
    allowed = [
        Namespace,
        numpy.ndarray,
        numpy.dtype,
        type(numpy.dtype("uint32")),
        numpy.zeros(1).__reduce__()[0],
    ]
    with torch.serialization.safe_globals([*allowed, (ModelType, "megatron.core.enums.ModelType")]):
        state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def _model(name: str) -> dict[str, Any]:
    return _raw(_iteration(name) / "mp_rank_00/model_optim_rng.pt")


def _named(model: Mapping[str, Any]) -> dict[str, Tensor]:
    """By the fork's names, in the order of its state dict."""
    language = model["model"]["language_model"]
    parts = {f"embedding.{name}": each for name, each in language["embedding"].items()} | {
        "encoder": language["encoder"]
    }
    return {
        f"language_model.{part}.{key}": value
        for part, each in parts.items()
        for key, value in each.items()
    }


def _check_head(source: Source, names: list[str]) -> None:
    assert {*source.tensors} == {f"{kind}/{name}" for kind in KINDS for name in names}
    assert [group.step for group in source.head.groups] == [10, 10]
    assert sorted(name for group in source.head.groups for name in group.names) == sorted(names)


@pytest.mark.parametrize("name", GATHERED)
def test_open_any_when_a_real_fork_gathered_then_values_are_those_of_the_file(name: str) -> None:
    source, params = open_any(_iteration(name)), _named(_model(name))
    assert (len(params), sum(each.numel() for each in params.values())) == (PARAMS, NUMEL)
    _check_head(source, [*params])
    flat = torch.load(_iteration(name) / "mp_rank_00/distrib_optim.pt", weights_only=True)[0][
        torch.float32
    ]
    for kind in KINDS:
        start = 0
        for each in reversed(params):
            tensor = source.read(f"{kind}/{each}")
            stop = start + params[each].numel()
            assert tensor.shape == params[each].shape
            assert torch.equal(
                tensor.view(-1), flat["param" if kind == "main" else kind][start:stop]
            )
            assert kind != "main" or torch.equal(tensor.to(params[each].dtype), params[each])
            start = stop
        assert start == NUMEL


@pytest.mark.parametrize("name", PLAIN)
def test_open_any_when_a_real_fork_was_not_distributed_then_values_are_those_of_the_file(
    name: str,
) -> None:
    source, model = open_any(_iteration(name)), _model(name)
    params, entry = _named(model), model["optimizer"]
    _check_head(source, [*params])
    inner = entry.get("optimizer", entry)
    order = [
        *(each for each in params if params[each].ndim > 1),
        *(each for each in params if params[each].ndim == 1),
    ]
    mains = [main for group in entry.get("fp32_from_fp16_params", []) for main in group] or [
        params[e] for e in order
    ]
    for number, each in enumerate(order):
        assert torch.equal(source.read(f"main/{each}"), mains[number])
        for kind in KINDS[1:]:
            assert torch.equal(source.read(f"{kind}/{each}"), inner["state"][number][kind])


@pytest.mark.parametrize("via", ["distopt", "plain", "per-rank"])
@pytest.mark.parametrize("name", GATHERED)
def test_convert_when_a_real_forks_file_goes_there_and_back_then_it_is_the_same(
    name: str, via: str, tmp_path: Path
) -> None:
    there = convert(_iteration(name), tmp_path / "there", via).path
    back = convert(there, tmp_path / "back", "gathered").path / "mp_rank_00"
    before = torch.load(_iteration(name) / "mp_rank_00/distrib_optim.pt", weights_only=True)
    after = torch.load(back / "distrib_optim.pt", weights_only=True)
    assert after.pop("megatron_distopt") == {"format": 1, "step": 10}
    assert [*after] == [*before] == [0]
    assert [*after[0]] == [*before[0]] == [torch.float32]
    for kind, tensor in before[0][torch.float32].items():
        assert (after[0][torch.float32][kind].shape, tensor.dtype) == (tensor.shape, torch.float32)
        assert torch.equal(after[0][torch.float32][kind][:NUMEL], tensor[:NUMEL])
    made, theirs = _raw(back / "model_optim_rng.pt"), _model(name)
    assert made.keys() == theirs.keys()
    assert made["args"].model_type is ModelType.encoder_or_decoder
    for key in ("args", "iteration", "optimizer", "opt_param_scheduler"):
        assert made[key] == theirs[key], key
    assert [*_named(made)] == [*_named(theirs)]
    assert all(torch.equal(value, _named(theirs)[key]) for key, value in _named(made).items())
    rng, saved = made["rng_state"][0], theirs["rng_state"][0]
    assert rng["random_rng_state"] == saved["random_rng_state"]
    assert all(
        (one == other).all()
        for one, other in zip(rng["np_rng_state"][1:2], saved["np_rng_state"][1:2], strict=True)
    )
    assert torch.equal(rng["torch_rng_state"], saved["torch_rng_state"])
