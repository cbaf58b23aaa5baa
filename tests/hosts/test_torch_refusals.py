"""What cannot have the effect of torch with a sharded optimizer is an error of ours on every rank."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.errors import AccessError, ConfigError, LayoutError, RanksDisagreeError
from tests.support.spawn import run_ranks

SIZE = 2


def _model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)).to(dtype)


def _built(**options: Any) -> tuple[Any, Any]:
    model = _model(options.pop("dtype", torch.float32))
    return model, distribute(model, torch.optim.AdamW(model.parameters(), lr=0.1), accelerator="torch", **options)


def _backward(model: nn.Module) -> None:
    first = next(model.parameters())
    model(torch.full((2, 6), 1.0 + dist.get_rank(), dtype=first.dtype)).float().square().sum().backward()


def clip_by_torch() -> None:
    model, _ = _built()
    _backward(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clip_values_by_torch() -> None:
    model, _ = _built()
    _backward(model)
    nn.utils.clip_grad_value_(model.parameters(), 1.0)


def grad_read() -> None:
    model, _ = _built()
    _backward(model)
    model[0].weight.grad.norm()


def grad_divided() -> None:
    model, _ = _built()
    _backward(model)
    for param in model.parameters():
        param.grad /= 2


def grad_read_after_step() -> None:
    model, optimizer = _built()
    _backward(model)
    optimizer.step()
    float(model[0].weight.grad[0, 0])


def grad_scaler() -> None:
    model, optimizer = _built()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(2, 6)).sum()).backward()
    scaler.step(optimizer)


def another_optimizer_steps() -> None:
    model, _ = _built()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    _backward(model)
    other.step()


def optimizer_stepped_before() -> None:
    model = _model()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.1)
    _backward(model)
    adamw.step()
    distribute(model, adamw, accelerator="torch")


def unscaled_loss() -> None:
    model, optimizer = _built(dtype=torch.float16, loss_scale="dynamic")
    _backward(model)
    optimizer.step()


def grads_kept_under_a_loss_scale() -> None:
    model, optimizer = _built(loss_scale=8.0)
    for _ in range(2):
        optimizer.scale_loss(model(torch.ones(2, 6)).sum()).backward()
        optimizer.step()


def optimizer_copied() -> None:
    copy.deepcopy(_built()[1])


def optimizer_pickled() -> None:
    pickle.dumps(_built()[1])


def rank_leaves_out_a_step() -> None:
    model, optimizer = _built()
    for number in range(3):
        optimizer.zero_grad()
        _backward(model)
        if number == 1 and dist.get_rank() == 1:
            continue
        optimizer.step()


def rank_leaves_out_a_step_with_overlap() -> None:
    model, optimizer = _built(overlap_grad_reduce=True)
    for number in range(4):
        optimizer.zero_grad()
        _backward(model)
        if number == 2 and dist.get_rank() == 1:
            continue
        optimizer.step()


def param_converted() -> None:
    model, optimizer = _built()
    model.double()
    _backward_double(model)
    optimizer.step()


def _backward_double(model: nn.Module) -> None:
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()


def param_replaced() -> None:
    model, optimizer = _built()
    model[0].weight = nn.Parameter(torch.ones(8, 6))
    _backward(model)
    optimizer.step()


def state_dict_assigned() -> None:
    model, optimizer = _built()
    model.load_state_dict({name: value.clone() for name, value in _model().state_dict().items()}, assign=True)
    _backward(model)
    optimizer.step()


class _Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, values: Tensor) -> Tensor:
        return self.other(self.one(values))


def tied_by_data_before() -> None:
    model = _Twins()
    model.other.weight.data = model.one.weight.data
    distribute(model, torch.optim.AdamW(model.parameters()))


def tied_by_data_afterwards() -> None:
    model = _Twins()
    optimizer = distribute(model, torch.optim.AdamW(model.parameters()))
    model.other.weight.data = model.one.weight.data
    _backward(model)
    optimizer.step()


def replaced_on_one_rank() -> None:
    model, optimizer = _built()
    if dist.get_rank() == 1:
        model[0].weight = nn.Parameter(torch.ones(8, 6))
    _backward(model)
    optimizer.step()


def members_edited() -> None:
    model, optimizer = _built()
    optimizer.param_groups[0]["params"].pop()
    _backward(model)
    optimizer.step()


def lazy_module() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    distribute(model, DistOptConfig())


def tensor_parallel_param() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    model = _model()
    mesh = init_device_mesh("cpu", (SIZE,))
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Replicate()]))
    distribute(model, torch.optim.AdamW(model.parameters()))


def frozen_params_differ() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3 + dist.get_rank()).requires_grad_(False))
    distribute(model, torch.optim.AdamW(model.parameters()))


def module_buffers_differ() -> None:
    model = _model()
    model.register_buffer("mask", torch.ones(3 + dist.get_rank()))
    distribute(model, torch.optim.AdamW(model.parameters()))


def begun_anew_on_one_rank_after_clipping() -> None:
    model, optimizer = _built()
    _backward(model)
    optimizer.clip_grad_norm_(1.0)
    if dist.get_rank() == 1:
        optimizer.zero_grad()
    _backward(model)
    optimizer.step()


def cleared_on_one_rank_after_clipping() -> None:
    model, optimizer = _built()
    _backward(model)
    optimizer.clip_grad_norm_(1.0)
    if dist.get_rank() == 1:
        model[0].weight.grad = None
    optimizer.step()


def cleared_on_one_rank_after_the_step() -> None:
    model, optimizer = _built()
    _backward(model)
    optimizer.step()
    if dist.get_rank() == 1:
        model.zero_grad()
    _backward(model)
    optimizer.step()


def assigned_after_clipping() -> None:
    model, optimizer = _built()
    _backward(model)
    optimizer.clip_grad_norm_(1.0)
    model[0].weight.grad = torch.ones(8, 6)
    optimizer.step()


def second_backward_with_overlap() -> None:
    model, optimizer = _built(overlap_grad_reduce=True)
    for _ in range(2):
        optimizer.zero_grad()
        _backward(model)
        optimizer.step()
    optimizer.zero_grad()
    _backward(model)
    _backward(model)


def other_norm() -> None:
    model, optimizer = _built()
    _backward(model)
    optimizer.clip_grad_norm_(1.0, norm_type=1.0)


#: By case, the class on rank 0 and on rank 1, and words that name the place or the remedy.
CASES: dict[Callable[[], None], tuple[type[Exception], type[Exception], tuple[str, ...]]] = {
    clip_by_torch: (AccessError, AccessError, ("optimizer.clip_grad_norm_(max_norm)",)),
    clip_values_by_torch: (AccessError, AccessError, ("optimizer.full_grad(param)",)),
    grad_read: (AccessError, AccessError, ("'0.weight'", "optimizer.full_grad(param)")),
    grad_divided: (AccessError, AccessError, ("'0.weight'",)),
    grad_read_after_step: (AccessError, AccessError, ("'0.weight'",)),
    grad_scaler: (AccessError, AccessError, ("loss_scale",)),
    another_optimizer_steps: (AccessError, AccessError, ("'0.weight'",)),
    optimizer_stepped_before: (ConfigError, ConfigError, ("has state", "before the first step")),
    unscaled_loss: (ConfigError, ConfigError, ("optimizer.scale_loss(loss).backward()",)),
    grads_kept_under_a_loss_scale: (ConfigError, ConfigError, ("optimizer.zero_grad()",)),
    optimizer_copied: (AccessError, AccessError, ("distribute(...)",)),
    optimizer_pickled: (AccessError, AccessError, ("state_dict()",)),
    rank_leaves_out_a_step: (RanksDisagreeError, RanksDisagreeError, ("rank 1", "rank 0", "3", "2")),
    rank_leaves_out_a_step_with_overlap: (RanksDisagreeError, RanksDisagreeError, ("rank 1", "round 3", "zero_grad()")),
    param_converted: (LayoutError, LayoutError, ("float64", "before distribute(...)")),
    param_replaced: (LayoutError, LayoutError, ("'0.weight'", "param.copy_(...)")),
    state_dict_assigned: (LayoutError, LayoutError, ("without assign=True",)),
    tied_by_data_before: (LayoutError, LayoutError, ("'one.weight'", "'other.weight'", "b.weight = a.weight")),
    tied_by_data_afterwards: (LayoutError, LayoutError, ("'other.weight'", "b.weight = a.weight")),
    replaced_on_one_rank: (RanksDisagreeError, LayoutError, ("'0.weight'",)),
    members_edited: (LayoutError, LayoutError, ("add_param_group", "requires_grad_(False)")),
    lazy_module: (LayoutError, LayoutError, ("'0.bias'", "one batch")),
    tensor_parallel_param: (LayoutError, LayoutError, ("DTensor", "'0.weight'")),
    frozen_params_differ: (RanksDisagreeError, RanksDisagreeError, ("1.bias", "float32[3]", "float32[4]")),
    module_buffers_differ: (RanksDisagreeError, RanksDisagreeError, ("mask", "[3]", "[4]")),
    begun_anew_on_one_rank_after_clipping: (RanksDisagreeError, RanksDisagreeError, ("on all ranks",)),
    cleared_on_one_rank_after_clipping: (LayoutError, LayoutError, ("clip_grad_norm_",)),
    cleared_on_one_rank_after_the_step: (RanksDisagreeError, RanksDisagreeError, ("optimizer.zero_grad()",)),
    assigned_after_clipping: (LayoutError, LayoutError, ("'0.weight'", "optimizer.zero_grad()")),
    second_backward_with_overlap: (LayoutError, LayoutError, ("no_sync()",)),
    other_norm: (ConfigError, ConfigError, ("norm_type",)),
}


def _raised(case: Callable[[], None]) -> tuple[type[Exception], str] | None:
    try:
        case()
    except Exception as error:  # noqa: BLE001 - a raw error is not what was wanted, and is shown
        return type(error), str(error)
    return None


def run_all(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in CASES:
        found[case.__name__] = _raised(case)
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(run_all, SIZE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_optimizer_when_there_is_no_equal_result_then_every_rank_is_told(
    case: Callable[[], None], results: list[dict[str, Any]]
) -> None:
    first, second, words = CASES[case]
    for found, wanted in zip((result[case.__name__] for result in results), (first, second), strict=True):
        assert found is not None
        assert found[0] is wanted, found
        assert all(word in found[1] for word in words), found[1]
