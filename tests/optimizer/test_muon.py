"""Muon against torch's at zero tolerance: whole and in params of several matrices;
test_flat_muon.py cuts them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_distopt.errors import ConfigError, LayoutError
from megatron_distopt.layout import MatrixSpec
from megatron_distopt.optimizer.owners.muon import Muon

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")

NUM_STEPS = 3
SHAPES = [(7, 24), (24, 7), (16, 16), (1, 9), (9, 1), (33, 65), (130, 70)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.9, "nesterov": False},
    {"lr": 0.3, "weight_decay": 0.01, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
    {"adjust_lr_fn": "original", "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-2, "ns_steps": 0},
    {"lr": torch.tensor([0.05]), "momentum": 0.3},
]


def values(shapes: Sequence[Sequence[int]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def trained(
    optimizer: torch.optim.Optimizer, params: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]
) -> None:
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        optimizer.step()


def matrices_in(tensor: Tensor, spec: MatrixSpec) -> list[Tensor]:
    """The matrices of a param, made by index and not by the code that is tested."""
    whole = tensor.reshape(spec.rows, spec.cols)
    length, sizes = (
        (spec.rows, spec.cols)[spec.dim],
        spec.sizes or ((spec.rows, spec.cols)[spec.dim],),
    )
    owner = [
        number
        for _ in range(spec.repeats)
        for number, size in enumerate(sizes)
        for _ in range(size)
    ]
    picked = [
        torch.tensor([at for at in range(length) if owner[at] == number])
        for number in range(len(sizes))
    ]
    return [whole.index_select(spec.dim, each).contiguous() for each in picked]


SPECS = {
    "one": MatrixSpec(12, 20),
    "tall": MatrixSpec(20, 6),
    "gate_up": MatrixSpec(30, 8, sizes=(15, 15)),
    "qkv": MatrixSpec(24, 8, sizes=(4, 1, 1), repeats=4),
    "qkv of other ratios": MatrixSpec(48, 3, sizes=(10, 1, 1), repeats=4),
    "columns": MatrixSpec(10, 21, dim=1, sizes=(2, 4, 1), repeats=3),
    "columns side by side": MatrixSpec(40, 75, dim=1, sizes=(35, 40)),
    "experts": MatrixSpec(28, 5, sizes=(7,) * 4),
}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_muon_when_params_are_matrices_then_equal_to_torchs(options: dict[str, Any]) -> None:
    starts, grads = values(SHAPES, 0), [values(SHAPES, step) for step in range(1, 1 + NUM_STEPS)]
    ours, torchs = ([Parameter(start.clone()) for start in starts] for _ in range(2))
    mine, reference = Muon(ours, **options), torch.optim.Muon(torchs, **options)
    trained(mine, ours, grads)
    trained(reference, torchs, grads)
    for own, other, start in zip(ours, torchs, starts, strict=True):
        assert torch.equal(own, other)
        assert not torch.equal(own, start)
        assert torch.equal(
            mine.state[own]["momentum_buffer"], reference.state[other]["momentum_buffer"]
        )


def reference_of(
    specs: Mapping[str, MatrixSpec], options: dict[str, Any], seed: int = 0
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], dict[str, list[Tensor]]]:
    """Params, their grads by step, and their matrices after torch's Muon has trained each as a
    param of its own."""
    shapes = [(spec.rows, spec.cols) for spec in specs.values()]
    starts = dict(zip(specs, values(shapes, seed), strict=True))
    grads = [
        dict(zip(specs, values(shapes, seed + step), strict=True))
        for step in range(1, 1 + NUM_STEPS)
    ]
    expected = {}
    for name, spec in specs.items():
        parts = [Parameter(part) for part in matrices_in(starts[name], spec)]
        trained(
            torch.optim.Muon(parts, **options),
            parts,
            [matrices_in(step[name], spec) for step in grads],
        )
        expected[name] = [part.detach() for part in parts]
    return starts, grads, expected


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_muon_when_a_param_has_several_matrices_then_each_is_updated_as_one_of_torchs(
    options: dict[str, Any],
) -> None:
    starts, grads, expected = reference_of(SPECS, options)
    params = {name: Parameter(start.clone()) for name, start in starts.items()}
    optimizer = Muon(
        params.values(), {params[name]: spec for name, spec in SPECS.items()}, **options
    )
    trained(optimizer, list(params.values()), [list(step.values()) for step in grads])
    for name, spec in SPECS.items():
        for own, other in zip(
            matrices_in(params[name].detach(), spec), expected[name], strict=True
        ):
            assert torch.equal(own, other), name


def test_muon_when_a_param_has_three_dimensions_then_a_stack_of_matrices() -> None:
    [start], [grad] = values([(3, 4, 6)], 0), values([(3, 4, 6)], 1)
    stack, parts = Parameter(start.clone()), [Parameter(part.clone()) for part in start]
    trained(Muon([stack]), [stack], [[grad]])
    trained(torch.optim.Muon(parts), parts, [list(grad)])
    assert torch.equal(stack, torch.stack([part.detach() for part in parts]))


# --- as an optimizer of torch


def test_state_when_torchs_is_loaded_then_training_goes_on_as_with_torchs() -> None:
    [start], grads = values([(9, 5)], 0), [values([(9, 5)], step) for step in range(1, 5)]
    ours, torchs = Parameter(start.clone()), Parameter(start.clone())
    reference = torch.optim.Muon([torchs], lr=0.1, momentum=0.8)
    trained(reference, [torchs], grads[:2])
    ours.data.copy_(torchs.data)
    mine = Muon([ours])
    mine.load_state_dict(copy.deepcopy(reference.state_dict()))  # which shares its tensors
    trained(mine, [ours], grads[2:])
    trained(reference, [torchs], grads[2:])
    assert torch.equal(ours, torchs)
    torch.optim.Muon([torchs]).load_state_dict(mine.state_dict())


def test_muon_when_copied_then_the_copy_knows_its_matrices() -> None:
    [start], [grad] = values([(8, 3)], 0), values([(8, 3)], 1)
    param = Parameter(start.clone())
    optimizer = Muon([param], {param: MatrixSpec(8, 3, sizes=(4, 4))})
    other = copy.deepcopy(optimizer)
    [copied] = other.param_groups[0]["params"]
    assert copied is not param
    trained(optimizer, [param], [[grad]])
    trained(other, [copied], [[grad]])
    assert torch.equal(param, copied)


def test_muon_when_a_param_has_no_gradient_then_left_alone() -> None:
    still, moved = Parameter(torch.ones(2, 3)), Parameter(torch.ones(2, 3))
    optimizer = Muon([{"params": [still]}, {"params": [moved], "lr": 0.5}])
    moved.grad = torch.ones(2, 3)
    assert optimizer.step(lambda: 7.0) == 7.0
    assert torch.equal(still, torch.ones(2, 3)) and still not in optimizer.state
    assert not torch.equal(moved, torch.ones(2, 3))


def test_step_when_gradients_are_read_afterwards_then_they_are_as_before() -> None:
    for dtype, nesterov in ((torch.float32, True), (torch.bfloat16, False)):
        param = Parameter(torch.ones(3, 4, dtype=dtype))
        param.grad = torch.full((3, 4), 2.0, dtype=dtype)
        optimizer = Muon([param], nesterov=nesterov, momentum=0.5)
        optimizer.step()
        assert torch.equal(param.grad, torch.full((3, 4), 2.0, dtype=dtype))
        # The direction has memory of its own: orthogonalizing it leaves the momentum alone.
        assert torch.equal(
            optimizer.state[param]["momentum_buffer"], torch.full((3, 4), 1.0, dtype=dtype)
        )


WRONG: list[dict[str, Any]] = [
    *({"lr": wrong} for wrong in (-0.1, math.nan, torch.ones(2))),
    *({"weight_decay": -1.0}, {"momentum": -0.5}, {"ns_steps": 100}, {"ns_steps": -1}),
    *({"ns_coefficients": (1.0, 2.0)}, {"adjust_lr_fn": "new"}),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_muon_when_an_option_cannot_work_then_refused_in_the_call_and_in_a_group(
    wrong: dict[str, Any],
) -> None:
    [name] = wrong
    with pytest.raises(ConfigError, match=name):
        Muon([Parameter(torch.ones(2, 2))], **wrong)
    with pytest.raises(ConfigError, match=name):
        Muon([{"params": [Parameter(torch.ones(2, 2))], **wrong}])


def test_muon_when_a_param_is_not_its_matrices_then_refused() -> None:
    vector, param = Parameter(torch.ones(4)), Parameter(torch.ones(2, 2))
    with pytest.raises(LayoutError, match=r"\(4,\)"):
        Muon([vector])
    with pytest.raises(LayoutError, match="contiguous"):
        Muon([Parameter(torch.ones(2, 3).T)])
    with pytest.raises(LayoutError, match="its matrices have 6"):
        Muon([param], {param: MatrixSpec(2, 3)})
    param.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(LayoutError, match="dense"):
        Muon([param]).step()
