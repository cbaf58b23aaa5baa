"""The sharded step against torch's optimizers on whole params in one process, at zero tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.optimizer.low_precision import low_precision_adam
from tests.support.facts import Facts, facts_of
from tests.support.models import Params, exact_grads, stepped, summed

STEPS = 4
MICROBATCHES = 2
SIZES = (1, 3)
BF16_WITH_FP32_NORM = {
    "wide.weight": torch.bfloat16,
    "wide.bias": torch.bfloat16,
    "deep.weight": torch.bfloat16,
}


@dataclass(frozen=True)
class Case:
    """One model and one configuration."""

    config: DistOptConfig
    dtypes: Mapping[str, torch.dtype] | None = None
    default: torch.dtype = torch.float32


@dataclass(frozen=True)
class Run:
    """The params after the last step and the gradient norm of every step."""

    params: dict[str, Tensor]
    norms: list[float | None]


def _config(**changes: object) -> DistOptConfig:
    """With torch's for-each kernels: they compute an element the same wherever its tensor ends (see
    FUSED)."""
    options = {
        "accelerator": "torch",
        "adam": "torch_foreach",
        "lr": 0.01,
        "weight_decay": 0.1,
        **changes,
    }
    return DistOptConfig(**options)  # type: ignore[arg-type]


CASES = {
    "fp32": Case(_config()),
    "fp32 clipped": Case(_config(clip_grad=0.5)),
    "fp32 small buckets": Case(_config(clip_grad=0.5, bucket_size=100)),
    "fp32 scaled loss": Case(_config(clip_grad=0.5, loss_scale=1024.0)),
    "bf16": Case(_config(clip_grad=0.5), default=torch.bfloat16),
    "bf16 with 16-bit grads": Case(
        _config(clip_grad=0.5, grads_in_fp32=False), default=torch.bfloat16
    ),
    "bf16 with fp32 norm": Case(_config(clip_grad=0.5), dtypes=BF16_WITH_FP32_NORM),
    "fp16": Case(
        _config(clip_grad=0.5, loss_scale="dynamic", initial_loss_scale=64.0), default=torch.float16
    ),
    "sgd by name": Case(_config(optimizer="torch.optim:SGD", clip_grad=0.5)),
    "adagrad by name": Case(_config(optimizer="torch.optim:Adagrad")),
    "fused adam": Case(_config(adam="torch_fused", clip_grad=0.5)),
    "fused sgd": Case(_config(optimizer="sgd", clip_grad=0.5)),
}

#: torch's fused CPU kernels round an element in the scalar tail of a tensor now and then
#: differently from the same element in the vectorised middle (about 1 in 1,000 of those that
#: changed sides), and sharding moves the tails.
FUSED = {"fused adam": 1e-6, "fused sgd": 1e-6}


def collect_facts(rank: int, world_size: int) -> dict[tuple[str, int], Run]:
    """All cases at all sizes in one spawn: the first ranks form the data-parallel group of each
    size."""
    groups = {size: dist.new_group(range(size)) for size in SIZES}
    trained = {
        (name, size): _train_sharded(case, rank, group)
        for size, group in groups.items()
        for name, case in CASES.items()
        if rank < size
    }
    # see FUSED
    with mock.patch.object(low_precision_adam, "has_torch_fused", lambda device_type: False):
        for size, group in groups.items():
            for name, options in IN_LOW_PRECISION.items() if rank < size else ():
                case = Case(
                    _config(adam="auto", bucket_size=BUCKET_SIZE[size], **options),
                    default=torch.bfloat16,
                )
                trained[name, size] = _train_sharded(case, 0, group)
    return trained


#: State whose blocks and random bits are those of an element's place in its param; all ranks have
#: the same gradients.
IN_LOW_PRECISION: dict[str, dict[str, Any]] = {
    "bf16 state": {
        "main_params_dtype": "bfloat16",
        "exp_avg_dtype": "bfloat16",
        "exp_avg_sq_dtype": "bfloat16",
    },
    "8-bit moments": {
        "main_params_dtype": "remainder",
        "exp_avg_dtype": "int8",
        "exp_avg_sq_dtype": "int8",
    },
}
BUCKET_SIZE = {1: None, 3: 300}


def _train_sharded(case: Case, rank: int, group: dist.ProcessGroup) -> Run:
    model = Params(case.dtypes, case.default)
    optimizer = distribute(model, case.config, param_groups=model.groups(), process_group=group)
    norms: list[float | None] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for microbatch in range(MICROBATCHES):
            loss = model(exact_grads(step, microbatch, rank)) / MICROBATCHES
            optimizer.scale_loss(loss).backward()
        _halve_lr_at_step_two(optimizer.param_groups, step)
        norms.append(stepped(optimizer).grad_norm)
    return Run({name: param.detach().clone() for name, param in model.named()}, norms)


def _train_whole(case: Case, size: int) -> Run:
    """The same on main params that nobody cut, with torch's own optimizer."""
    model = Params(case.dtypes, case.default)
    # The values that 16-bit params start from, in fp32.
    main = Params()
    with torch.no_grad():
        for (_, ours), (_, theirs) in zip(main.named(), model.named(), strict=True):
            ours.copy_(theirs)
    optimizer = _torch_optimizer(case.config, main)
    norms: list[float | None] = []
    for step in range(STEPS):
        parts = [exact_grads(step, m, rank) for rank in range(size) for m in range(MICROBATCHES)]
        _halve_lr_at_step_two(optimizer.param_groups, step)
        norms.append(_step_whole(case.config, main, optimizer, summed(parts), size))
    dtypes = {name: param.dtype for name, param in model.named()}
    return Run({name: param.detach().to(dtypes[name]) for name, param in main.named()}, norms)


def _step_whole(
    config: DistOptConfig,
    main: Params,
    optimizer: torch.optim.Optimizer,
    total: Mapping[str, Tensor],
    size: int,
) -> float:
    """Average and clipping are one division by their product, which is rounded to fp32 once, as in
    the sharded step."""
    total = {name: grad / MICROBATCHES for name, grad in total.items()}
    norm = float(torch.cat([grad.double().flatten() for grad in total.values()]).norm()) / size
    clip = max((norm + 1e-6) / config.clip_grad, 1.0) if config.clip_grad else 1.0
    for name, param in main.named():
        param.grad = total[name] / torch.tensor(size * clip, dtype=torch.float32)
    optimizer.step()
    return norm


def _torch_optimizer(config: DistOptConfig, model: Params) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    if config.optimizer in ("sgd", "torch.optim:SGD"):
        return torch.optim.SGD(
            model.groups(), momentum=0.9, fused=config.optimizer == "sgd", **options
        )
    if config.optimizer == "torch.optim:Adagrad":
        return torch.optim.Adagrad(model.groups(), eps=1e-8, **options)
    is_fused = config.adam == "torch_fused"
    return torch.optim.AdamW(model.groups(), fused=is_fused, foreach=not is_fused, **options)


def _halve_lr_at_step_two(param_groups: list[dict[str, object]], step: int) -> None:
    if step == 2:
        for group in param_groups:
            group["lr"] = 0.005


facts = facts_of(collect_facts, max(SIZES))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_sharded_step_when_sums_are_exact_then_equals_undistributed(
    facts: Facts, name: str, size: int
) -> None:
    wanted = _train_whole(CASES[name], size)
    for rank in range(size):
        found = facts.by_rank[rank][name, size]
        for param_name, value in wanted.params.items():
            assert found.params[param_name].dtype == value.dtype, param_name
            torch.testing.assert_close(
                found.params[param_name], value, rtol=FUSED.get(name, 0.0), atol=0.0
            )
        # The sums of squares are equal to the bit; one square root and one division in float64
        # follow in two orders.
        assert found.norms == pytest.approx(wanted.norms, rel=1e-15, abs=0.0)


@pytest.mark.parametrize("name", IN_LOW_PRECISION)
def test_state_in_low_precision_when_there_are_other_ranks_and_buckets_then_every_bit_is_the_same(
    facts: Facts, name: str
) -> None:
    (one, many) = (facts.first[name, size].params for size in SIZES)
    assert all(torch.equal(one[param], many[param]) for param in one)
