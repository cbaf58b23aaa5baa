"""What a training script does to a model and its optimizer, with ours and with torch's AdamW on averaged gradients.

Each idiom is a function of a `Side`, which is called twice: once with our optimizer, once with the reference. Both see
the same data; the params are compared after every step of either.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from torch.optim.lr_scheduler import LambdaLR

from megatron_distopt import distribute
from megatron_distopt.errors import DistOptError
from tests.support.spawn import run_ranks

#: Our flat params are cut elsewhere than torch's, so that a few elements go through other lanes of the same kernel, and
#: sums over three ranks are rounded once more: some units in the last place of a change of size lr, over ten steps.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped": {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 64},
}


class Net(nn.Module):
    """Branches, a tied head, a param that the top module reads, batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.branch = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 11, bias=False)
        self.uses_branch = False

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layers(self.embedding(tokens)) * self.scale
        if self.uses_branch:
            hidden = hidden + self.branch(hidden)
        return self.head(hidden).float().square().mean()

    def loss(self, tokens: Tensor) -> Tensor:
        return self.forward(tokens)


class Side:
    """One of the two: a model and an optimizer with the calls that a script makes."""

    is_ours = False

    def __init__(
        self, dtype: torch.dtype, options: dict[str, Any], build: Callable[[nn.Module], Any] | None = None
    ) -> None:
        torch.manual_seed(3)
        self.dtype, self.options = dtype, options
        self.model: Any = Net().to(dtype)
        # With this eps the rounding of a gradient near zero is not a step of lr: torch sums microbatches in 16 bits.
        self.build = build or (
            lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-2, fused=True)
        )
        self.trace: list[Tensor] = []
        self.number = 0
        self.prepare()

    def prepare(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        raise NotImplementedError

    def tokens(self) -> Tensor:
        self.number += 1
        generator = torch.Generator().manual_seed(1000 * self.number + dist.get_rank())
        return torch.randint(0, 11, (5, 3), generator=generator)

    def backward(self) -> None:
        self.model(self.tokens()).backward()

    def step(self) -> None:
        raise NotImplementedError

    def record(self) -> None:
        state = {name: value.detach().float().flatten() for name, value in self.model.named_parameters()}
        self.trace.append(torch.cat([state[name] for name in sorted(state)]).clone())

    def round(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.step()

    def clip(self, max_norm: float) -> float:
        raise NotImplementedError

    def look(self) -> None:
        """At a gradient, which changes nothing."""


class Ours(Side):
    is_ours = True

    def prepare(self) -> None:
        self.optimizer: Any = None

    def start(self) -> None:
        self.optimizer = distribute(self.model, self.build(self.model), accelerator="torch", **self.options)

    def step(self) -> None:
        self.optimizer.step()
        self.record()

    def clip(self, max_norm: float) -> float:
        return float(self.optimizer.clip_grad_norm_(max_norm))

    def look(self) -> None:
        self.optimizer.full_grad(self.model.scale)


class Reference(Side):
    """torch's optimizer on fp32 copies of the params, with gradients averaged over ranks."""

    def prepare(self) -> None:
        self.optimizer: Any = None

    def start(self) -> None:
        self.main = self.model
        if self.dtype is not torch.float32:
            self.main = copy.deepcopy(self.model).float()
        self.optimizer = self.build(self.model)
        self.inner = self.optimizer if self.main is self.model else self.build(self.main)
        if self.main is not self.model:
            for ours, theirs in zip(self.inner.param_groups, self.optimizer.param_groups, strict=True):
                theirs_params, ours_params = theirs["params"], ours["params"]
                assert len(theirs_params) == len(ours_params)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for model_group, main_group in zip(self.optimizer.param_groups, self.inner.param_groups, strict=True):
            yield from zip(model_group["params"], main_group["params"], strict=True)

    @torch.no_grad()
    def average(self) -> None:
        grads = [torch.zeros(p.shape) if p.grad is None else p.grad.float() for p, _ in self.pairs()]
        present = torch.tensor([float(param.grad is not None) for param, _ in self.pairs()])
        flat = torch.cat([present, *(grad.flatten() for grad in grads)])
        of_ranks = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, flat)
        counts, *sums = sum(of_ranks).split([len(grads), *(grad.numel() for grad in grads)])
        for (param, main), count, total in zip(self.pairs(), counts, sums, strict=True):
            main.grad = (total / dist.get_world_size()).to(main.dtype).view(param.shape) if count else None

    @torch.no_grad()
    def step(self) -> None:
        if not getattr(self, "is_averaged", False):
            self.average()
        self.is_averaged = False
        if self.main is not self.model:
            for param, main in self.pairs():
                main.copy_(torch.where(main.to(param.dtype) == param, main, param.float()))
            for ours, theirs in zip(self.inner.param_groups, self.optimizer.param_groups, strict=True):
                ours.update({key: value for key, value in theirs.items() if key != "params"})
        self.inner.step()
        if self.main is not self.model:
            for param, main in self.pairs():
                param.copy_(main)
        self.record()

    def clip(self, max_norm: float) -> float:
        self.average()
        self.is_averaged = True
        return float(nn.utils.clip_grad_norm_([main for _, main in self.pairs()], max_norm))


Idiom = Callable[[Side], None]
IDIOMS: dict[str, Idiom] = {}


def idiom(function: Idiom) -> Idiom:
    IDIOMS[function.__name__] = function
    return function


def rounds(side: Side, number: int = 3) -> None:
    for _ in range(number):
        side.round()


@idiom
def nothing_special(side: Side) -> None:
    side.start()
    rounds(side, 6)


@idiom
def weights_loaded_midway(side: Side) -> None:
    side.start()
    rounds(side, 2)
    torch.manual_seed(5)
    side.model.load_state_dict(Net().to(side.dtype).state_dict())
    rounds(side)


@idiom
def weights_initialized_midway(side: Side) -> None:
    side.start()
    rounds(side, 2)
    torch.manual_seed(5)
    nn.init.xavier_uniform_(side.model.layers[0].weight)
    rounds(side)


@idiom
def data_clamped_after_every_step(side: Side) -> None:
    side.start()
    for _ in range(4):
        side.round()
        for param in side.model.parameters():
            param.data.clamp_(-0.1, 0.1)


@idiom
def kept_alias_of_data_written_to(side: Side) -> None:
    side.start()
    aliases = [param.data for param in side.model.parameters()]
    for _ in range(4):
        side.round()
        torch._foreach_mul_(aliases, 0.5)


@idiom
def data_replaced(side: Side) -> None:
    side.start()
    rounds(side, 2)
    side.model.head.weight.data = side.model.head.weight.data * 0.5
    side.model.scale.data = torch.full((8,), 0.5, dtype=side.dtype)
    rounds(side)


@idiom
def vector_to_params(side: Side) -> None:
    side.start()
    rounds(side, 2)
    params = list(side.model.parameters())
    vector_to_parameters(nn.utils.parameters_to_vector(params).detach() * 0.5, params)
    rounds(side)


@idiom
def converted_there_and_back(side: Side) -> None:
    side.start()
    rounds(side, 2)
    side.optimizer.zero_grad()
    side.model.half().to(side.dtype)
    rounds(side)


@idiom
def converted_with_gradients(side: Side) -> None:
    side.start()
    rounds(side, 2)
    side.optimizer.zero_grad(set_to_none=False)
    side.model.half().to(side.dtype)
    side.backward()
    side.step()
    rounds(side, 2)


@idiom
def frozen_midway(side: Side) -> None:
    side.start()
    rounds(side, 2)
    side.model.layers.requires_grad_(False)
    rounds(side)
    side.model.layers.requires_grad_(True)
    rounds(side, 2)


@idiom
def frozen_at_first(side: Side) -> None:
    side.model.layers.requires_grad_(False)
    side.start()
    rounds(side, 2)
    side.model.layers[0].requires_grad_(True)
    rounds(side)
    side.model.layers.requires_grad_(True)
    rounds(side)


@idiom
def model_zero_grad(side: Side) -> None:
    side.start()
    for _ in range(4):
        side.model.zero_grad()
        side.backward()
        side.step()


@idiom
def grads_set_to_none_one_by_one(side: Side) -> None:
    side.start()
    for _ in range(4):
        for param in side.model.parameters():
            param.grad = None
        side.backward()
        side.step()


@idiom
def zeros_instead_of_none(side: Side) -> None:
    side.start()
    for _ in range(4):
        side.optimizer.zero_grad(set_to_none=False)
        side.backward()
        side.step()


@idiom
def model_zeros_instead_of_none(side: Side) -> None:
    side.start()
    for _ in range(4):
        side.model.zero_grad(set_to_none=False)
        side.backward()
        side.step()


@idiom
def grads_never_cleared(side: Side) -> None:
    side.start()
    for _ in range(4):
        side.backward()
        side.step()
        if not side.is_ours:  # what all ranks have after the step is the average
            for param, main in side.pairs():  # type: ignore[attr-defined]
                param.grad = None if main.grad is None else main.grad.to(param.dtype)


@idiom
def grad_from_before(side: Side) -> None:
    side.backward()
    side.start()
    side.backward()
    side.step()
    rounds(side, 2)


@idiom
def grad_from_before_cleared(side: Side) -> None:
    side.backward()
    side.start()
    rounds(side)


@idiom
def clipped(side: Side) -> None:
    side.start()
    for _ in range(4):
        side.optimizer.zero_grad()
        side.backward()
        norm = side.clip(0.01)
        side.trace.append(torch.tensor([norm]))
        side.step()


@idiom
def gradients_looked_at(side: Side) -> None:
    side.start()
    for number in range(4):
        side.optimizer.zero_grad()
        tokens = side.tokens()
        if number % 2 == 0 or dist.get_rank() != 1:
            side.model(tokens).backward()
        side.look()
        side.step()
        side.look()


@idiom
def gradients_looked_at_between_microbatches(side: Side) -> None:
    side.start()
    for number in range(3):
        side.optimizer.zero_grad()
        side.backward()
        side.look()
        tokens = side.tokens()
        if number % 2 == 0 or dist.get_rank() != 1:
            side.model(tokens).backward()
        side.look()
        side.step()


@idiom
def gradients_looked_at_and_dropped(side: Side) -> None:
    side.start()
    for _ in range(3):
        side.model.zero_grad()
        side.backward()
        side.look()
        side.model.zero_grad()
        side.backward()
        side.step()


@idiom
def branch_used_later(side: Side) -> None:
    side.start()
    rounds(side)
    side.model.uses_branch = True
    rounds(side)
    side.model.uses_branch = False
    rounds(side, 2)


@idiom
def branch_used_on_one_rank(side: Side) -> None:
    side.start()
    for number in range(6):
        side.model.uses_branch = number >= 2 and dist.get_rank() == number % 2
        side.round()


@idiom
def rank_without_data(side: Side) -> None:
    side.start()
    for number in range(5):
        side.optimizer.zero_grad()
        tokens = side.tokens()
        if number % 2 == 0 or dist.get_rank() != 1:
            side.model(tokens).backward()
        side.step()


@idiom
def step_without_any_grad(side: Side) -> None:
    side.start()
    rounds(side, 2)
    side.optimizer.zero_grad()
    side.step()
    rounds(side, 2)


@idiom
def methods_instead_of_call(side: Side) -> None:
    side.start()
    for number in range(5):
        side.optimizer.zero_grad()
        (side.model.loss if number % 2 else side.model.forward)(side.tokens()).backward()
        side.step()


@idiom
def averages_of_weights(side: Side) -> None:
    side.start()
    params = list(side.model.parameters())
    average = [param.detach().clone().float() for param in params]
    for _ in range(4):
        side.round()
        for mean, param in zip(average, params, strict=True):
            mean.lerp_(param.detach().float(), 0.5)
    side.trace.append(torch.cat([mean.flatten() for mean in average]))


@idiom
def swa_model(side: Side) -> None:
    side.start()
    swa = torch.optim.swa_utils.AveragedModel(side.model)
    for _ in range(4):
        side.round()
        swa.update_parameters(side.model)
    side.trace.append(torch.cat([param.detach().float().flatten() for param in swa.parameters()]))


@idiom
def schedule_and_edited_groups(side: Side) -> None:
    side.start()
    scheduler = LambdaLR(side.optimizer, lambda step: 1.0 / (step + 1))
    for number in range(5):
        side.round()
        scheduler.step()
        side.optimizer.param_groups[0]["weight_decay"] = 0.05 * number
        side.optimizer.param_groups[0]["betas"] = (0.8, 0.95)


@idiom
def group_added(side: Side) -> None:
    side.build = lambda model: torch.optim.AdamW(
        [param for name, param in model.named_parameters() if "head" not in name], lr=0.01, fused=True
    )
    side.start()
    rounds(side, 2)
    side.optimizer.add_param_group({"params": [side.model.head.weight], "lr": 0.002})
    if not side.is_ours and side.main is not side.model:  # type: ignore[attr-defined]
        side.inner.add_param_group({"params": [side.main.head.weight], "lr": 0.002})  # type: ignore[attr-defined]
        with torch.no_grad():
            side.main.head.weight.copy_(side.model.head.weight)  # type: ignore[attr-defined]
    rounds(side)


@idiom
def assigned_grad(side: Side) -> None:
    side.start()
    for number in range(4):
        side.optimizer.zero_grad()
        side.backward()
        side.model.scale.grad = torch.full((8,), 0.25 * (number + dist.get_rank()), dtype=side.dtype)
        side.step()


@idiom
def grads_assigned_only(side: Side) -> None:
    side.start()
    for number in range(4):
        for param in side.model.parameters():
            param.grad = torch.full(param.shape, 0.25 * (number + dist.get_rank()), dtype=side.dtype)
        side.step()


@idiom
def activation_checkpointing(side: Side) -> None:
    from torch.utils.checkpoint import checkpoint

    forward = side.model.layers.forward
    side.model.layers.forward = lambda hidden: checkpoint(forward, hidden, use_reentrant=False)
    side.start()
    rounds(side)


@idiom
def copied_model(side: Side) -> None:
    side.start()
    rounds(side, 2)
    teacher = copy.deepcopy(side.model)
    rounds(side, 2)
    side.trace.append(torch.cat([param.detach().float().flatten() for param in teacher.parameters()]))
    buffer = io.BytesIO()
    torch.save(side.model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    side.trace.append(torch.cat([param.detach().float().flatten() for param in loaded.parameters()]))


@idiom
def parametrization_removed(side: Side) -> None:
    register_parametrization(side.model.branch, "weight", nn.Identity())
    side.start()
    side.model.uses_branch = True
    rounds(side, 2)
    side.optimizer.zero_grad()
    remove_parametrizations(side.model.branch, "weight")
    rounds(side)


@idiom
def params_of_a_part_only(side: Side) -> None:
    side.build = lambda model: torch.optim.AdamW(model.head.parameters(), lr=0.01, fused=True)
    side.start()
    rounds(side)


@idiom
def module_deleted(side: Side) -> None:
    side.start()
    side.model.uses_branch = True
    rounds(side, 2)
    side.model.uses_branch = False
    side.optimizer.zero_grad()
    del side.model.branch
    rounds(side)


@idiom
def closure(side: Side) -> None:
    side.start()
    for _ in range(3):
        tokens = side.tokens()

        def evaluate(tokens: Tensor = tokens) -> Tensor:
            side.optimizer.zero_grad()
            loss: Tensor = side.model(tokens)
            loss.backward()
            return loss

        if side.is_ours:
            loss = side.optimizer.step(evaluate)
            side.record()
        else:
            loss = evaluate()
            side.step()
        side.trace.append(loss.detach().reshape(1))


@idiom
def compiled(side: Side) -> None:
    torch.compiler.reset()
    side.start()
    model = torch.compile(side.model, backend="eager")
    for _ in range(5):
        side.optimizer.zero_grad()
        model(side.tokens()).backward()
        side.step()


@idiom
def compiled_before(side: Side) -> None:
    torch.compiler.reset()
    model = torch.compile(side.model, backend="aot_eager")
    model(side.tokens())
    side.start()
    for _ in range(5):
        side.optimizer.zero_grad()
        model(side.tokens()).backward()
        side.step()


@idiom
def second_optimizer(side: Side) -> None:
    side.start()
    rounds(side, 2)
    if side.is_ours:
        side.optimizer.release()
    side.optimizer.zero_grad()
    side.build = lambda model: torch.optim.AdamW(model.parameters(), lr=0.002, fused=True)
    side.start()
    rounds(side)


#: An error of ours where there is no equal result: by idiom and option, words of it.
REFUSED = {("assigned_grad", "overlapped"): "overlap_grad_reduce=False"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Case = tuple[str, str, str]
#: Overlap and 16-bit params change different files: the two come together here, and all four pairs in the long tests.
PAIRS = {("plain", "float32"), ("overlapped", "bfloat16")}
ALL: list[Case] = [(name, option, dtype) for name in IDIOMS for option in OPTIONS for dtype in DTYPES]
#: A graph takes seconds to trace: here once for each way to compile.
TRACED = {"compiled": ("overlapped", "bfloat16"), "compiled_before": ("plain", "float32")}
EACH: list[Case] = [case for case in ALL if case[1:] in ({TRACED[case[0]]} if case[0] in TRACED else PAIRS)]


def outcome(case: Case) -> str:
    """ "equal", or what is not; an error of ours as its class and text."""
    name, option, dtype = case
    ours = Ours(DTYPES[dtype], OPTIONS[option])
    try:
        IDIOMS[name](ours)
    except DistOptError as error:
        return f"{type(error).__name__}: {error}"
    theirs = Reference(DTYPES[dtype], OPTIONS[option])
    IDIOMS[name](theirs)
    # Of 16-bit params a unit in the last place, where the main params differ in their last bits.
    tolerance = TOLERANCE if dtype == "float32" else {"rtol": 0.02, "atol": 1e-3}
    for number, (left, right) in enumerate(zip(ours.trace, theirs.trace, strict=True)):
        if not torch.allclose(left, right, **tolerance):
            worst = (left - right).abs().max().item()
            return f"record {number} differs by {worst:.3g} of {right.abs().max().item():.3g}"
    return "equal"


def run_all(rank: int, size: int, cases: list[Case]) -> dict[Case, str]:
    warnings.simplefilter("ignore")
    return {case: outcome(case) for case in cases}


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[Case, str]]:
    return run_ranks(run_all, 2, EACH, seconds=300)


def _check(case: Case, results: list[dict[Case, str]]) -> None:
    expected = REFUSED.get(case[:2])
    for result in results:
        assert result[case] == "equal" if expected is None else expected in result[case]


@pytest.mark.parametrize("case", EACH, ids="-".join)
def test_idiom_when_used_on_two_ranks_then_is_equal_or_refused(case: Case, on_two_ranks: Any) -> None:
    _check(case, on_two_ranks)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_idioms_when_used_on_any_number_of_ranks_then_are_equal_or_refused(size: int) -> None:
    results = run_ranks(run_all, size, ALL, seconds=600)
    for case in ALL:
        if size > 1 or case[:2] not in REFUSED:
            _check(case, results)
