"""Classes of torch.optim and pytorch_optimizer in `distribute`: each trains, and resumes in any way
at other numbers of ranks, as it does undistributed; or it is refused before the first step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as in_dcp
from torch import Tensor, nn
from torch.optim import Optimizer

from megatron_distopt import TorchDistributedOptimizer, distribute
from megatron_distopt.hosts.torch.group_options import GroupOptions
from megatron_distopt.optimizer.inner import InnerChoice
from megatron_distopt.optimizer.inner_options import IMPLEMENTATION
from tests.support.facts import Facts, facts_of
from tests.support.published import pytorch_optimizer
from tests.support.values import from_first

#: Before torch 2.10 a 16-bit param has no fp32 gradient.
SHORT = torch.bfloat16 if hasattr(Tensor, "grad_dtype") else torch.float32
#: The vector is of bf16, and has no gradient in one step. The last one has a group, of which most
#: ranks have nothing.
SHAPES = {"matrix": (12, 10), "vector": (7,), "one": (1,)}
STEPS, SAVED_AT = 8, 4
WAYS = ("folder", "DCP", "full", "consolidated")
Build = Callable[..., Optimizer]


class WarmingUp(torch.optim.SGD):
    """Counts in its groups and writes its rate there."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = group.setdefault("base", group["lr"]) * min(1.0, group["count"] / 6)
        return super().step(closure)


SOME: dict[str, Build] = {
    **{name: getattr(torch.optim, name) for name in ("NAdam", "ASGD", "Rprop", "Adafactor", "SGD")},
    **{
        name: getattr(pytorch_optimizer, name)
        for name in ("AdaBelief", "ScheduleFreeAdamW", "QHAdam", "MADGRAD", "Adan", "Lion")
    },
    "SGD, momentum": partial(torch.optim.SGD, momentum=0.9, dampening=0.1),
    "RMSprop, centered": partial(torch.optim.RMSprop, centered=True, momentum=0.5),
    "a rate in its group": WarmingUp,
}
#: Those that do not go by elements.
OTHERS = {"Adafactor": "params", "QHAdam": "params", "MADGRAD": "refused"}
#: What is said of those that are not torch's.
SAID = dict.fromkeys(
    ("AdaBelief", "ScheduleFreeAdamW", "Adan", "Lion", "a rate in its group"), "elements"
) | dict.fromkeys(("QHAdam", "MADGRAD"), "params")


class Held(nn.Module):
    """Steps with the mean of the gradients of ranks, which is exact."""

    def __init__(self, build: Build, short: torch.dtype = SHORT) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=generator)
            self.register_parameter(
                name, nn.Parameter(value.bfloat16().to(short) if name == "vector" else value)
            )
        groups = [{"params": [self.matrix, self.vector]}, {"params": [self.one], "lr": 0.03125}]
        self.optimizer = [build(groups, lr=0.0625)]  # no module

    def train_with(self, optimizer: Optimizer, steps: Iterable[int], ranks: Sequence[int]) -> None:
        for step in steps:
            for group in optimizer.param_groups if step in (3, 5) else ():
                group["lr"] = group.get("lr", 1.0) * 0.5  # A2Grad has none
            optimizer.zero_grad()
            losses = list[Tensor]()
            for name, param in self.named_parameters():
                drawn = [torch.Generator().manual_seed(100 * step + rank) for rank in ranks]
                grads = [
                    torch.randint(-3, 4, param.shape, generator=each) * (12 / 256) + 3 / 256
                    for each in drawn
                ]
                losses += (
                    [(param.float() * sum(grads) / len(ranks)).sum()]
                    if (name, step) != ("vector", 2)
                    else []
                )
            torch.stack(losses).sum().backward()
            optimizer.step()

    def end_of(self, optimizer: Optimizer) -> tuple[list[Tensor], list[dict[str, Any]]]:
        """Params in the dtype of the model, and options as the user sees them."""
        hidden = ("params", *IMPLEMENTATION)
        options = [
            {key: each for key, each in group.items() if key not in hidden}
            for group in optimizer.param_groups
        ]
        return [self.matrix.detach(), self.vector.detach().bfloat16(), self.one.detach()], options


def _saved(way: str, model: Held, optimizer: TorchDistributedOptimizer, to: str, group: Any) -> Any:
    if way == "DCP":
        state = {"o": in_dcp.get_optimizer_state_dict(model, optimizer)}
        return dcp.save(state, checkpoint_id=to, process_group=group) and None
    if way == "consolidated":
        optimizer.consolidate_state_dict()
        return optimizer.state_dict() if dist.get_rank() == 0 else None
    return optimizer.full_state_dict() if way == "full" else optimizer.save(to)  # type: ignore[func-returns-value]


def _load(
    way: str, model: Held, optimizer: TorchDistributedOptimizer, at: str, group: Any, saved: Any
) -> None:
    if way == "folder":
        return optimizer.load(at)
    model.load_state_dict(saved["weights"])
    if way != "DCP":
        return optimizer.load_state_dict(saved[way])
    state = {"o": in_dcp.get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=at, process_group=group)
    return in_dcp.set_optimizer_state_dict(model, optimizer, state["o"])


def _run(rank: int, name: str, groups: Mapping[int, Any], root: str) -> dict[str, Any]:
    """Trained by two ranks, and resumed by one and three: what it goes by, and what it comes to, by
    way and size."""
    found, saved = dict[str, Any](), dict[str, Any]()
    options = {"accelerator": "torch", "updates": SAID.get(name)}

    def begun(size: int) -> tuple[Held, TorchDistributedOptimizer]:
        model = Held(SOME[name])
        given = model.optimizer.pop()
        return model, distribute(model, given, process_group=groups[size], **options)

    try:
        model, optimizer = begun(2) if rank < 2 else (None, None)
    except Exception as error:  # noqa: BLE001 -- of any kind; nothing was begun
        found["refused"] = str(error)
    if from_first(found):
        return found
    if model is not None and optimizer is not None:
        found["goes by"] = (
            "params" if optimizer.sharded.plan.choice.updates_whole_params else "elements"
        )
        model.train_with(optimizer, range(SAVED_AT), [rank])
        # the others are refused when they are called
        for way in WAYS if found["goes by"] == "elements" else WAYS[:1]:
            saved[way] = _saved(way, model, optimizer, f"{root}/{way}", groups[2])
        weights = {name: param.detach().clone() for name, param in model.named_parameters()}
        model.train_with(optimizer, range(SAVED_AT, STEPS), [rank])
        found["on"] = model.end_of(optimizer)
        optimizer.release()
        saved["weights"] = weights
    saved = from_first(saved)
    for size, way in (
        (size, way) for size in (1, 3) for way in WAYS if rank < size and way in saved
    ):
        model, optimizer = begun(size)
        _load(way, model, optimizer, f"{root}/{way}", groups[size], saved)
        model.train_with(optimizer, range(SAVED_AT, STEPS), (0, 1))
        found[f"{way} {size}"] = model.end_of(optimizer)
        optimizer.release()
    return found


Ran = list[dict[str, dict[str, Any]]]


def collect_facts(rank: int, size: int, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    groups, root = (
        {each: dist.new_group(range(each)) for each in (1, 2, 3)},
        from_first(tempfile.mkdtemp()),
    )
    return {name: _run(rank, name, groups, str(Path(root, name))) for name in names}


def check(name: str, ran: Ran) -> None:
    model = Held(SOME[name], torch.float32)
    (optimizer,) = model.optimizer
    model.train_with(optimizer, range(STEPS), (0, 1))
    wanted, options = model.end_of(optimizer)
    for how, end in (
        each for of_rank in ran for each in of_rank[name].items() if each[0] != "goes by"
    ):
        for mine, param in zip(end[0], wanted, strict=True):
            # A piece of a param ends elsewhere, and kernels round the last elements of a tensor in
            # another way.
            assert torch.allclose(mine.float(), param.float(), rtol=1e-5, atol=1e-6), how
        assert ran[0][name]["goes by"] == "params" or end[1] == options, how


facts = facts_of(collect_facts, 3, [*SOME], seconds=300.0)


@pytest.mark.parametrize("name", SOME)
def test_class_when_it_trains_and_resumes_in_any_way_then_as_undistributed(
    name: str, facts: Facts
) -> None:
    found, wanted = facts.first[name], OTHERS.get(name, "elements")
    assert [*found] == ["refused"] if wanted == "refused" else found["goes by"] == wanted
    if wanted != "refused":
        assert len(found) == 2 + 2 * (len(WAYS) if wanted == "elements" else 1)
        check(name, facts.by_rank)


def test_options_when_some_change_in_place_then_only_those_cost_a_new_checksum() -> None:
    rate, decay, ramp = torch.tensor(0.5), torch.tensor(0.9), [1.0]
    groups = [{"params": [], "lr": rate, "betas": (decay, 0.99), "ramp": ramp}]
    inner = torch.optim.SGD([{**groups[0], "params": []}])
    options = GroupOptions(groups, inner, InnerChoice("SGD", torch.optim.SGD))
    options.learn()
    seen, marks = list[int](), list[int]()
    with mock.patch.object(options, "described", wraps=options.described) as made:
        for write in (
            lambda: None,
            lambda: rate.mul_(0.5),
            lambda: decay.fill_(0.8),
            lambda: ramp.append(2.0),
        ):
            for act in (write, lambda: None):
                act()
                options.sync()
                seen.append(options.checksum(0, 2**20))
                marks.append(made.call_count)
    assert marks == [1, 1, 2, 2, 3, 3, 4, 4] and len({*seen}) == 4
