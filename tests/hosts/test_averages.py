"""Averages of params: to the bit those of torch's `AveragedModel`, in the model and out of it
again, in checkpoints.

Exercises optimizer/averages.py, session/session_calls.py, session/run_session.py,
session/shown_averages.py, hosts/torch/optimizer.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.nn import Module, Parameter, ParameterDict
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from megatron_distopt import DistOptConfig, TorchDistributedOptimizer, distribute
from megatron_distopt.errors import AccessError, ConfigError
from megatron_distopt.optimizer.inner_state import moments_of
from megatron_distopt.optimizer.low_precision.low_precision_tensor import as_plain
from tests.support.models import Params, exact_grads, stepped
from tests.support.refusals import assert_says, logged
from tests.support.spawn import run_ranks

STEPS, DECAY = 5, 0.75
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

Case = tuple[torch.dtype, dict[str, Any]]
#: By name: dtype of the params and options.
CASES: dict[str, Case] = {
    "fp32": (F32, {}),
    "fp32, decay of a half and less": (F32, {"ema_decay": 0.3}),
    "fp32, not in blocks": (F32, {"adam": "torch_foreach", "ema_decay": 0.999}),
    "bf16": (BF16, {"bucket_size": 128, "overlap_param_gather": True}),
    "bf16, one bucket": (BF16, {}),
    "fp16": (F16, {"loss_scale": "dynamic", "initial_loss_scale": 64.0, "hysteresis": 1}),
    "remainder": (BF16, {"main_params_dtype": "remainder", "exp_avg_dtype": "bfloat16"}),
    "bf16, bfloat16": (BF16, {"main_params_dtype": "bfloat16"}),
    "remainder, int8": (BF16, {"main_params_dtype": "remainder", "exp_avg_sq_dtype": "int8"}),
    "SGD": (F32, {"optimizer": "sgd", "lr": 2.0**-6}),
}


def _optimizer(
    model: Module, case: Case, group: Any, given: Any = None
) -> TorchDistributedOptimizer:
    options = {"accelerator": "torch", "ema_decay": DECAY, "nonfinite": "skip", **case[1]}
    return distribute(model, given, DistOptConfig(**options), process_group=group)


def _defer(optimizer: TorchDistributedOptimizer) -> None:
    optimizer.sharded.plan = replace(optimizer.sharded.plan, deferred_check=True)
    optimizer.sharded.show_flat_params()
    assert optimizer.sharded.defers_check


def _whole(optimizer: TorchDistributedOptimizer, kind: str) -> dict[str, Tensor]:
    """Collective: by param what ranks have of it in "main" or "average", whole and in fp32."""
    own = [
        (
            shard.name,
            shard.in_param,
            flat.cut(as_plain(getattr(flat, kind)).detach(), shard).clone(),
        )
        for flat in optimizer.sharded.flat_params
        for shard in flat.plan.shards
    ]
    group = optimizer._model.data.handle
    shared: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(shared, own, group=group)
    found: dict[str, dict[int, Tensor]] = {}
    for name, span, values in (each for of_rank in shared for each in of_rank):
        found.setdefault(name, {})[span.start] = values
    return {
        name: torch.cat([parts[start] for start in sorted(parts)]) for name, parts in found.items()
    }


class _Reference:
    """torch's average of what the main params are after each step."""

    def __init__(self, decay: float) -> None:
        self._decay, self._averaged = decay, AveragedModel(Module())

    def update(self, mains: dict[str, Tensor]) -> None:
        module = ParameterDict(
            {name.replace(".", "|"): Parameter(values.clone()) for name, values in mains.items()}
        )
        if not hasattr(self, "_of"):
            self._averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(self._decay))
            self._of = module
        self._averaged.update_parameters(module)

    def values(self) -> dict[str, Tensor]:
        return {
            name.replace("|", "."): param.detach() for name, param in self._averaged.module.items()
        }


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """To the bit, the sign of zero included."""
    bits = [
        {name: each.view(torch.uint8) for name, each in tensors.items()} for tensors in (one, other)
    ]
    return one.keys() == other.keys() and all(
        torch.equal(bits[0][name], bits[1][name]) for name in one
    )


def _params(model: Module) -> dict[str, Tensor]:
    return {name: param.detach().clone().flatten() for name, param in model.named_parameters()}


def _step(
    optimizer: TorchDistributedOptimizer, model: Params, number: int, *, is_bad: bool = False
) -> bool:
    """A step and whether it was taken."""
    grads = exact_grads(number, 0, dist.get_rank(optimizer._model.data.handle))
    if is_bad:
        grads["scale"] = torch.full((1,), torch.inf)
    optimizer.scale_loss(model(grads)).backward()
    decision = stepped(optimizer)
    optimizer.zero_grad()
    optimizer.finish_param_gather()
    return decision.updated


def _trained(
    case: Case,
    group: Any,
    *,
    is_deferred: bool = False,
    is_late: bool = False,
    is_shown: bool = True,
    given: Any = None,
) -> tuple[list[str], dict[str, Tensor]]:
    """Trains and compares after each step: what was wrong, and the params at the end."""
    wrong, reference = list[str](), _Reference(case[1].get("ema_decay", DECAY))
    model = Params(default=case[0])
    named = dict(model.named())
    named["norm.weight"].requires_grad_(not is_late)
    optimizer = _optimizer(model, case, group, None if given is None else given(model))
    if is_deferred:
        _defer(optimizer)
    for number in range(STEPS):
        named["norm.weight"].requires_grad_(number > 1 or not is_late)
        named["deep.weight"].requires_grad_(number < STEPS - 1)
        if _step(optimizer, model, number, is_bad=number in (0, 3)):
            reference.update(
                {name: each.float() for name, each in _params(model).items()}
                | _whole(optimizer, "main")
            )
        averages, mains = _whole(optimizer, "average"), _whole(optimizer, "main")
        expected = {name: reference.values()[name] if number else mains[name] for name in mains}
        if number and not _same(averages, expected):
            wrong.append(f"average after step {number}")
        if is_shown:
            before = _params(model)
            with optimizer.averaged_params():
                seen = _params(model)
                if not all(
                    torch.equal(seen[name], each.to(case[0])) for name, each in expected.items()
                ):
                    wrong.append(f"shown after step {number}")
            if not _same(before, _params(model)) or not _same(mains, _whole(optimizer, "main")):
                wrong.append(f"put back after step {number}")
    optimizer.release()
    return wrong, _params(model)


def _muon(model: Module) -> list[torch.optim.Optimizer]:
    matrices = [param for param in model.parameters() if param.ndim == 2]
    others = [param for param in model.parameters() if param.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def _adafactor(model: Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.01, weight_decay=0.1)


def _results(rank: int, size: int, folder: Path) -> dict[str, list[str]]:
    """By case what was wrong; 4 ranks go through all cases, at all numbers of ranks."""
    groups = [dist.new_group(range(number)) for number in range(1, size + 1)]
    found: dict[str, list[str]] = {}
    for group in groups[rank:]:
        number = dist.get_world_size(group)
        for name, case in CASES.items():
            if size == 4 or (number == 2 and "," not in name) or (number, name) == (3, "fp32"):
                found[f"{name}, {number} ranks"] = _trained(case, group)[0]
    if rank < 2:
        pair = groups[1]
        ends = [
            _trained(CASES["remainder"], pair, is_shown=is_shown)[1] for is_shown in (True, False)
        ]
        found["training goes on"] = [] if _same(*ends) else ["params differ"]
        for name in ("fp32", "bf16, one bucket"):
            found[f"{name}, deferred"] = _trained(CASES[name], pair, is_deferred=True)[0]
        found["a param is late"] = _trained(CASES["fp32"], pair, is_late=True)[0]
        found["Muon"] = _trained(CASES["bf16"], pair, given=_muon)[0]
        found["Adafactor"] = _trained(CASES["bf16"], pair, given=_adafactor)[0]
        found["refusals"] = _refusals(pair)
        found["torch's checkpoints"] = _torchs_checkpoints(pair, rank, folder / "torch's")
    for name, other in {"fp32": 1, "remainder": 2}.items():
        sizes = (1, 2, 4) if size == 4 else (other,)
        found[f"checkpoints, {name}"] = _checkpoints(
            CASES[name], groups, rank, folder / name, sizes
        )
    return found


def _refusals(group: Any) -> list[str]:
    """What was not refused, or not put back, in and around the context."""
    model = Params()
    optimizer, wrong = _optimizer(model, CASES["fp32"], group), list[str]()
    for number in range(2):
        _step(optimizer, model, number)
    before = _params(model)
    calls: dict[str, Callable[[], object]] = {
        "step": partial(_step, optimizer, model, 2),
        "save": partial(optimizer.save, "/nowhere"),
        "load": partial(optimizer.load, "/nowhere"),
        "state_dict": optimizer.state_dict,
        "load_state_dict": partial(optimizer.load_state_dict, {}),
        "full_state_dict": optimizer.full_state_dict,
        "protect": partial(optimizer.protect, 1),
        "resume": optimizer.resume,
        "reload_model_params": optimizer.reload_model_params,
        "averaged_params": lambda: optimizer.averaged_params().__enter__(),
    }
    with optimizer.averaged_params():
        for name, call in calls.items():
            try:
                call()
                wrong.append(f"{name} was not refused")
            except AccessError as error:
                assert_says(str(error), "within averaged_params(). Move it")
    optimizer.zero_grad()
    with suppress(ValueError), optimizer.averaged_params():
        raise ValueError(f"an error while {model} is evaluated")
    if not _same(before, _params(model)):
        wrong.append("not put back after errors")
    _step(optimizer, model, 2)
    optimizer.release()
    plain = _optimizer(model, (F32, {"ema_decay": None}), group)
    with pytest.raises(ConfigError, match="ema_decay"), plain.averaged_params():
        wrong.append("not refused without averages")
    plain.release()
    with pytest.raises(ConfigError, match="averaged_params"):
        _optimizer(model, (F32, {"ema_eval": True}), group)
    return wrong


def _torchs_checkpoints(group: Any, rank: int, folder: Path) -> list[str]:
    """torch.distributed.checkpoint refuses one without averages; asked for a part, a new optimizer
    begins them anew."""
    model, wrong = Params(), list[str]()
    without = _optimizer(model, (F32, {"ema_decay": None}), group)
    _step(without, model, 0)
    dcp.save({"optim": without.state_dict()}, checkpoint_id=folder, process_group=group)
    without.release()
    for num_steps in (2, 0):
        model = Params()
        optimizer = _optimizer(model, CASES["fp32"], group)
        for number in range(num_steps):
            _step(optimizer, model, number + 1)
        averages, state = _whole(optimizer, "average"), {"optim": optimizer.state_dict()}
        before = _moments(optimizer)
        with pytest.raises(dcp.CheckpointException, match=r"(?s)Missing key.*main_average"):
            dcp.load(state, checkpoint_id=folder, process_group=group)
        if not _same(averages, _whole(optimizer, "average")) or not _same(
            before, _moments(optimizer)
        ):
            wrong.append(f"a refused load changes something after {num_steps} steps")
        part = DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(state, checkpoint_id=folder, planner=part, process_group=group)
        said = _said(partial(optimizer.load_state_dict, state["optim"]))
        if said != (["start again"] if rank == 0 and not num_steps else []):
            wrong.append(f"said of a part after {num_steps} steps: {said}")
        _step(optimizer, model, 3)
        if _same(_whole(optimizer, "main"), _whole(optimizer, "average")) is not (not num_steps):
            wrong.append(f"averages of a part after {num_steps} steps")
        optimizer.release()
    return wrong


def _moments(optimizer: TorchDistributedOptimizer) -> dict[str, Tensor]:
    flat_params = enumerate(optimizer.sharded.flat_params)
    kept = (
        (number, moments_of(optimizer.sharded.inner, flat.main)) for number, flat in flat_params
    )
    return {
        f"{kind} {number}": as_plain(each).clone()
        for number, of in kept
        for kind, each in of.items()
    }


def _checkpoints(
    case: Case, groups: list[Any], rank: int, folder: Path, sizes: tuple[int, ...]
) -> list[str]:
    """Averages that are saved on 3 ranks and loaded on others, from disk, in torch's format and
    from memory."""
    saved, wrong = dict[str, Tensor](), list[str]()
    if rank < 3:
        model = Params(default=case[0])
        options = {"protect_every": 1, "protect_folder": str(folder / "memory")}
        optimizer = _optimizer(model, (case[0], {**case[1], **options}), groups[2])
        optimizer.resume()
        for number in range(3):
            _step(optimizer, model, number)
            optimizer.protect(number)
            optimizer.session.protection.finish()  # type: ignore[union-attr]
        saved = _whole(optimizer, "average")
        optimizer.save(folder / "disk")
        torch.save(optimizer.full_state_dict(), folder / f"torch{rank}")
        optimizer.release()
        without = _optimizer(
            Params(default=case[0]), (case[0], {**case[1], "ema_decay": None}), groups[2]
        )
        said = _said(partial(without.load, folder / "disk"))
        if said != (["ema_decay"] if rank == 0 else []):
            wrong.append(f"said without averages: {said}")
        without.save(folder / "none")
        without.release()
    dist.barrier()
    for number in (each for each in sizes if rank < each):
        told: list[Any] = [saved]
        dist.broadcast_object_list(told, src=0, group=groups[number - 1])
        calls: dict[str, Callable[[TorchDistributedOptimizer], object]] = {
            "disk": lambda optimizer: optimizer.load(folder / "disk"),
            "torch's format": lambda optimizer: optimizer.load_state_dict(
                torch.load(folder / "torch0")
            ),
            "memory": lambda optimizer: optimizer.resume(),
        }
        for name, load in calls.items():
            model = Params(default=case[0])
            options = (
                {"protect_every": 1, "protect_folder": str(folder / "memory")}
                if name == "memory"
                else {}
            )
            optimizer = _optimizer(model, (case[0], {**case[1], **options}), groups[number - 1])
            load(optimizer)
            if not _same(told[0], _whole(optimizer, "average")):
                wrong.append(f"{name} on {number} ranks")
            _step(optimizer, model, 3)
            moved = {
                key: each.clone().lerp_(_whole(optimizer, "main")[key], 1 - DECAY)
                for key, each in told[0].items()
            }
            if not _same(moved, _whole(optimizer, "average")):
                wrong.append(f"{name} on {number} ranks, a step later")
            said = _said(partial(optimizer.load, folder / "none"))
            _step(optimizer, model, 4)
            begins_anew = _same(_whole(optimizer, "main"), _whole(optimizer, "average"))
            if said != (["start again"] if rank == 0 else []) or not begins_anew:
                wrong.append(f"said of a checkpoint without averages: {said}")
            optimizer.release()
    return wrong


def _said(call: Callable[[], object]) -> list[str]:
    """Which of two lines a call logs."""
    with logged(logging.WARNING) as logged_lines:
        call()
    lines = [line for line in logged_lines if "averages" in line]
    return [
        next(word for word in ("start again", "ema_decay", line) if word in line) for line in lines
    ]


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.long)])
def test_averages_when_trained_saved_and_shown_then_those_of_torch_to_the_bit(
    size: int, tmp_path: Path
) -> None:
    for found in run_ranks(_results, size, tmp_path):
        assert {name: wrong for name, wrong in found.items() if wrong} == {}
