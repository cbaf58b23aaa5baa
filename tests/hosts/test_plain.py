"""The plain host: its calls and its kinds of models; what a user brings along: groups, optimizers,
schedulers.

Refusals are in test_torch_refusals.py; tests/differential has other idioms of torch.

Exercises hosts/report.py, hosts/torch/get_in.py, hosts/torch/grads.py, hosts/torch/model.py,
hosts/torch/module_buffers.py, hosts/torch/params.py, checkpoint/gather_whole.py,
checkpoint/load_torch_state.py.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import math
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import (
    BatchNorm1d,
    Conv2d,
    Embedding,
    LayerNorm,
    Linear,
    Module,
    Parameter,
    Sequential,
)
from torch.optim.lr_scheduler import StepLR

from megatron_distopt import DistOptConfig, TorchDistributedOptimizer, distribute
from megatron_distopt.errors import CheckpointError, ConfigError, RanksDisagreeError
from tests.support.facts import Facts, facts_of, outcomes
from tests.support.models import Params, exact_grads, stepped
from tests.support.refusals import assert_says
from tests.support.values import from_ranks

SIZE, STEPS = 4, 4
# torch's for-each kernels are the same to the bit wherever a tensor ends
# (test_sharded_equals_undistributed.py, FUSED).
CONFIG = DistOptConfig(accelerator="torch", adam="torch_foreach", lr=0.01, weight_decay=0.1)


def _step(optimizer: Any, loss: Tensor) -> None:
    optimizer.scale_loss(loss).backward()
    assert stepped(optimizer).updated, "these gradients are finite"
    optimizer.zero_grad()


def _flat(model: Module) -> Tensor:
    return torch.cat([param.detach().float().flatten() for param in model.parameters()])


def _equal(first: Module, second: Module) -> bool:
    return torch.equal(_flat(first), _flat(second))


def _small() -> Sequential:
    torch.manual_seed(0)
    return Sequential(Linear(6, 8), Linear(8, 3))


def _with_adamw(model: Module, **options: Any) -> TorchDistributedOptimizer:
    return distribute(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), accelerator="torch", **options
    )


def _backward(model: Module) -> None:
    model(torch.full((2, 6), 1.0 + dist.get_rank())).square().sum().backward()


# --- kinds of models


class Tied(Module):
    """Input and output embedding are one param; a norm stays in fp32, and one param is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = Embedding(13, 8).bfloat16()
        self.norm = LayerNorm(8)
        self.frozen = Linear(8, 8, bias=False).bfloat16().requires_grad_(False)
        self.head = Linear(8, 13, bias=False).bfloat16()
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.frozen(self.norm(self.embedding(tokens).float()).bfloat16())
        return torch.nn.functional.cross_entropy(self.head(hidden).float(), tokens)


def tied_and_frozen_params_are_one_and_none(rank: int) -> None:
    model = Tied()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = distribute(model, CONFIG)
    for _ in range(3):
        _step(optimizer, model(torch.arange(13)))
    names = sorted(
        slot.name for buffer in optimizer.sharded.buffers for slot in buffer.layout.slots
    )
    assert names == ["embedding.weight", "norm.bias", "norm.weight"]
    assert model.head.weight is model.embedding.weight
    assert torch.equal(before["frozen.weight"], model.frozen.weight)
    assert not torch.equal(before["embedding.weight"], model.embedding.weight)
    # A norm weight that had been through bf16 would be a multiple of 2**-8 near 1.
    assert bool(((model.norm.weight.detach() * 256) % 1 != 0).any())
    assert all(torch.equal(_flat(model), other) for other in from_ranks(_flat(model)))


def list_of_chunks_trains_as_one_model(rank: int) -> None:
    whole, halves = Params(), [Params(), Params()]
    one, several = distribute(whole, CONFIG), distribute(halves, CONFIG)
    grads = exact_grads(0, 0, rank)
    _step(one, whole(grads))
    _step(several, halves[0](grads) + halves[1](grads))
    assert all(_equal(whole, half) for half in halves)
    assert several.sharded.buffers[0].layout.slots[0].name == "chunk1.held.wide_weight"
    shared = Linear(2, 2, bias=False)
    across = distribute([shared, Sequential(shared)], CONFIG)
    assert [slot.name for buffer in across.sharded.buffers for slot in buffer.layout.slots] == [
        "chunk0.weight"
    ]


def ranks_that_own_nothing_have_groups_of_the_same_form(rank: int) -> None:
    model = Linear(1, 1)
    groups = [
        {"params": [model.weight], "lr_mult": 2.0, "is_decoupled_lr": True},
        {"params": [model.bias], "weight_decay": 0.0, "default_config": True},
    ]
    optimizer = distribute(model, CONFIG, param_groups=groups)
    before = model.weight.item()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    _step(optimizer, model(torch.ones(1, 1)).sum())
    assert model.weight.item() == before
    optimizer.param_groups[0]["lr"] = 0.5
    _step(optimizer, model(torch.ones(1, 1)).sum())
    assert model.weight.item() != before
    # Two elements, 64 apart, over four ranks: those in the middle own neither.
    assert (
        from_ranks(sum(run.main.numel() for run in optimizer.sharded.flat_params)).count(0)
        == SIZE - 2
    )
    keys = from_ranks([sorted(set(group) - {"params"}) for group in optimizer.param_groups])
    assert all(each == keys[0] for each in keys) and {"lr_mult", "is_decoupled_lr"} <= set(
        keys[0][0]
    )
    assert (optimizer.param_groups[0]["lr_mult"], optimizer.param_groups[1]["weight_decay"]) == (
        2.0,
        0.0,
    )


def empty_param_with_a_gradient_is_left_aside_and_saved(rank: int) -> None:
    model = _small()
    model.register_parameter("nothing", Parameter(torch.empty(0, 3)))
    optimizer = _with_adamw(model)
    _backward(model)
    assert optimizer.full_grad(model.nothing) is None
    if rank == 1:
        model.nothing.sum().backward()
    gradient = optimizer.full_grad(model.nothing)
    assert gradient is not None and gradient.shape == (0, 3), "a rank has one"
    assert stepped(optimizer).updated
    state = get_optimizer_state_dict(model, optimizer)
    assert state["state"]["nothing"]["exp_avg"].shape == (0, 3), "torch refuses a state without it"
    set_optimizer_state_dict(model, optimizer, state)
    if full := optimizer.full_state_dict():
        torch.optim.AdamW(model.parameters()).load_state_dict(full)


def module_buffers_that_training_changes_are_those_of_the_first_rank(rank: int) -> None:
    torch.manual_seed(0)
    model = Sequential(Linear(6, 8), BatchNorm1d(8), Linear(8, 3))
    model.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    model.register_buffer("mask", torch.ones(5))
    optimizer = _with_adamw(model)
    means = []
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + rank)
        model(torch.randn(4, 6)).square().sum().backward()
        model.calls += rank + 1
        optimizer.step()
        assert model.calls.item() == step + 1
        of_ranks = from_ranks(dict(model.named_buffers()))
        assert all(torch.equal(each[name], of_ranks[0][name]) for each in of_ranks for name in each)
        means.append(of_ranks[0]["1.running_mean"])
    assert not torch.equal(means[0], means[2])


def params_that_differ_between_ranks_are_told_and_become_those_of_rank_0(rank: int) -> None:
    for seeds, told in ((rank, rank == 0), (0, False)):
        torch.manual_seed(seeds)
        model = Linear(6, 8)
        with mock.patch("megatron_distopt.hosts.torch.get_in.announce") as announce:
            _with_adamw(model)
        assert (
            any("values     of params differed" in str(call) for call in announce.mock_calls)
            == told
        )
        assert all(torch.equal(each, model.weight) for each in from_ranks(model.weight.detach()))


def module_buffers_are_left_alone_when_told_so(rank: int) -> None:
    torch.manual_seed(0)
    model = Sequential(Linear(6, 8), BatchNorm1d(8))
    optimizer = _with_adamw(model, broadcast_buffers=False)
    torch.manual_seed(rank)
    model(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()
    means = from_ranks(model[1].running_mean)
    assert not torch.equal(means[0], means[1])


def module_buffers_stay_apart_when_told_so(rank: int) -> None:
    """Of other values and shapes from the start, as in DDP; those on meta have no values."""
    model = Linear(6, 8)
    model.register_buffer("own", torch.full((1 + rank,), float(rank)))
    model.register_buffer("none", torch.ones(2, device="meta"))
    model.register_parameter("unused", Parameter(torch.ones(2, device="meta"), requires_grad=False))
    optimizer = _with_adamw(model, broadcast_buffers=False)
    model.own += 1
    _step(optimizer, model(torch.ones(4, 6)).square().sum())
    assert model.own.tolist() == [rank + 1.0] * (1 + rank)


def two_optimizers_share_a_model(rank: int) -> None:
    """Each with params of its own, as in a GAN; the one may end, and its params go to another."""

    def trained(distributed: Callable[[Module, Any], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = Sequential(Linear(6, 8), Linear(8, 1))
        one = distributed(model, torch.optim.AdamW(model[0].parameters(), lr=0.1))
        other = distributed(model, torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9))
        for step in range(4):
            for optimizer in (one, other):
                model.zero_grad()
                model(torch.full((2, 6), 0.25 * (step + 1))).sum().backward()
                optimizer.step()
        if one.__class__ is TorchDistributedOptimizer:
            model.zero_grad()
            one.release()
        again = distributed(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
        model.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        for optimizer in (again, other):
            optimizer.step()
        return [param.detach().clone() for param in model.parameters()]

    ours = trained(lambda model, given: distribute(model, given, accelerator="torch"))
    for mine, theirs in zip(ours, trained(lambda model, given: given), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def reload_takes_what_is_below_the_precision_of_params(rank: int) -> None:
    """It goes where a reload is asked for, and stays where nothing was changed."""
    model = Linear(8, 8, bias=False).bfloat16()
    optimizer = distribute(model, dataclasses.replace(CONFIG, lr=2.0**-12, weight_decay=0.0))
    torch.nn.init.constant_(model.weight, 0.5)
    _step(optimizer, model(torch.ones(1, 8, dtype=torch.bfloat16)).float().sum())
    # Adam's first step is 2**-12, an eighth of what lies between two bf16 numbers below 0.5, so
    # that 0.5 stays.
    assert model.weight.detach().float().unique().tolist() == [0.5]
    assert not any(
        torch.equal(run.main, run.model.float()) for run in optimizer.sharded.flat_params
    )
    optimizer.reload_model_params()
    assert all(torch.equal(run.main, run.model.float()) for run in optimizer.sharded.flat_params)


def params_that_are_saved_alone_are_small(rank: int) -> None:
    """They outlive the optimizer, too."""
    model = Sequential(Linear(64, 64), Linear(64, 3))
    optimizer = _with_adamw(model)
    buffer = io.BytesIO()
    torch.save(model[1].bias, buffer)
    # A file of torch.save has about 1.6 kB around these 12 bytes of values; the whole buffer has 17
    # kB.
    assert buffer.tell() < 4000
    assert len({param.untyped_storage().data_ptr() for param in model.parameters()}) == 4
    kept = model[0].weight.detach()
    values = kept.clone()
    optimizer.release()
    del model, optimizer
    gc.collect()
    torch.full((1000, 1000), 7.0)
    assert torch.equal(kept, values)


def _strided(is_strided: bool, dtype: torch.dtype) -> Sequential:
    """The second weight lies column by column and the convolution is channels_last, or neither."""
    torch.manual_seed(0)
    model = Sequential(Conv2d(3, 4, 3), Linear(16, 3)).to(dtype)
    if is_strided:
        model.to(memory_format=torch.channels_last)
        model[1].weight.data = model[1].weight.data.t().contiguous().t()
    return model


def _train_exactly(model: Module, optimizer: Any, *steps: int) -> None:
    """With gradients of 8 bits, whose sums are exact in any order."""
    for step in steps:
        optimizer.zero_grad()
        torch.manual_seed(10 * step + dist.get_rank())
        for param in model.parameters():
            grad = torch.randint(-128, 128, param.shape) / 256
            (param * grad.to(param.dtype)).sum().backward()
        optimizer.step()


def strides_stay_and_state_loads_whatever_they_are(rank: int) -> None:
    folder = from_ranks(tempfile.mkdtemp())[0]
    for dtype in (torch.float32, torch.bfloat16):
        models = {is_strided: _strided(is_strided, dtype) for is_strided in (True, False)}
        optimizers = {key: distribute(model, CONFIG) for key, model in models.items()}
        for is_strided, model in models.items():
            _train_exactly(model, optimizers[is_strided], 0, 1)
            optimizers[is_strided].save(f"{folder}/{dtype}/{is_strided}")
        strides = [param.stride() for param in models[True].parameters()]
        assert strides == [param.stride() for param in _strided(True, dtype).parameters()]
        assert strides != [param.stride() for param in models[False].parameters()]
        for one, other in zip(*(model.parameters() for model in models.values()), strict=True):
            grads = optimizers[True].full_grad(one), optimizers[False].full_grad(other)
            assert torch.equal(*grads) and grads[0].stride() == one.stride()
        full = [optimizer.full_state_dict() for optimizer in optimizers.values()]
        states = [each["state"] for each in full if each]  # on rank 0
        assert all(
            torch.equal(value, states[1][number][kind])
            for number, kinds in (states or [{}])[0].items()
            for kind, value in kinds.items()
        )
        again = copy.deepcopy(models[True])
        optimizer = distribute(again, CONFIG)
        state = get_optimizer_state_dict(models[True], optimizers[True])
        set_optimizer_state_dict(again, optimizer, state)
        _train_exactly(again, optimizer, 2, 3)
        for is_strided, model in models.items():  # each goes on from what the other has saved
            optimizers[is_strided].load(f"{folder}/{dtype}/{not is_strided}")
            _train_exactly(model, optimizers[is_strided], 2, 3)
        assert _equal(*models.values()) and _equal(again, models[True])


def optimizers_of_whole_params_take_them_row_by_row(rank: int) -> None:
    found = []
    for is_strided in (True, False):
        model = _strided(is_strided, torch.float32)
        optimizer = distribute(model, torch.optim.Adafactor(model.parameters()))
        _train_exactly(model, optimizer, 0, 1)
        assert model[0].weight.is_contiguous()
        found.append(_flat(model))
    assert torch.equal(*found)


# --- what a user brings along


def train(model: Params, optimizer: Any, rank: int) -> Tensor:
    for step in range(STEPS):
        optimizer.zero_grad()
        optimizer.scale_loss(model(exact_grads(step, 0, rank))).backward()
        assert stepped(optimizer).updated
    return _flat(model)


def given_optimizer_steps_ours(rank: int) -> None:
    """For a scheduler, and whoever else holds the optimizer that was given."""
    model = _small()
    given = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = StepLR(given, step_size=1, gamma=0.5)
    optimizer = distribute(model, given, accelerator="torch")
    before = model[0].weight.detach().clone()
    _backward(model)
    given.step()
    scheduler.step()
    assert not torch.equal(model[0].weight, before)
    assert optimizer.last_step is not None
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


def next_optimizer_trains_when_the_first_one_has_gone(rank: int) -> None:
    """One after the other for the same model: the first one released, or forgotten."""
    model, norms = Params(), []
    for name in ("first", "released", "forgotten"):
        optimizer = distribute(model, CONFIG)
        before = _flat(model)
        assert not torch.equal(before, train(model, optimizer, rank))
        assert optimizer.last_step is not None
        norms.append(optimizer.last_step.grad_norm)
        if name == "first":
            optimizer.release()
        del optimizer
    assert len(set(norms)) == 1, "the gradients are the same ones, and each is counted once"


def memory_is_free_when_an_optimizer_has_gone(rank: int) -> None:
    for how in ("released", "forgotten"):
        model = _small()
        optimizer = _with_adamw(model)
        _backward(model)
        optimizer.step()
        grads = [ref(buffer.grad) for buffer in optimizer.sharded.buffers]
        if how == "released":
            optimizer.release()
            assert model[0].weight.grad is None
            _backward(model)
            assert type(model[0].weight.grad) is Tensor
        del model, optimizer
        gc.collect()
        gc.collect()  # the first one ends the optimizer
        assert [grad() for grad in grads] == [None], how


def norms_and_sums_that_the_docs_write_out_are_those_of_torch(rank: int) -> None:
    model, theirs = _small(), _small()
    optimizer = _with_adamw(model)
    (SIZE * model(torch.full((2, 6), 1.0 + rank)).square().sum()).backward()
    sum(theirs(torch.full((2, 6), 1.0 + each)).square().sum() for each in range(SIZE)).backward()
    wanted = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5, norm_type=math.inf)
    largest = max(
        grad.abs().max().item()
        for p in model.parameters()
        if (grad := optimizer.full_grad(p)) is not None
    )
    l2 = optimizer.clip_grad_norm_(float("inf"))
    optimizer.clip_grad_norm_(l2 * min(1.0, 0.5 / largest))
    close = {"rtol": 1e-5, "atol": 1e-6}  # the order of sums over ranks, and two divisions
    torch.testing.assert_close(torch.tensor(largest), wanted, **close)
    for ours, param in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(optimizer.full_grad(ours), param.grad, **close)


def folder_is_of_one_process_group(rank: int) -> None:
    group, _ = dist.new_subgroups(1)
    folder = from_ranks(tempfile.mkdtemp())[0]
    optimizer = distribute(_small(), CONFIG, process_group=group)
    for each in range(SIZE):
        if rank == each:
            with (
                pytest.raises(CheckpointError, match=r"first rank is 0.*a folder of its own")
                if rank
                else nullcontext()
            ):
                optimizer.save(folder)
        dist.barrier()


# --- loss scale and state


def loss_in_fp16_does_not_overflow_when_it_is_scaled(rank: int) -> None:
    model = Params(default=torch.float16)
    config = dataclasses.replace(CONFIG, loss_scale="dynamic", initial_loss_scale=65536.0)
    scaled = distribute(model, config).scale_loss(torch.tensor(3.0, dtype=torch.float16))
    assert (scaled.item(), scaled.dtype) == (3.0 * 65536, torch.float32)


def state_dict_with_a_stats_group_continues_bit_for_bit(rank: int) -> None:
    """Ranks 0 and 1 hold one half of the model, ranks 2 and 3 the other, which has other names and
    shapes."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(rank // 2)
    model = Linear(5, 3) if rank < 2 else Sequential(Linear(7, 2))
    optimizer = distribute(
        model, CONFIG, process_group=pairs[rank // 2], stats_process_group=dist.group.WORLD
    )
    width = next(model.parameters()).shape[1]

    def step() -> Any:
        optimizer.zero_grad()
        model(torch.full((1, width), 1.0 + rank)).square().sum().backward()
        return stepped(optimizer).grad_norm

    norms = [step()]
    saved, weights, kept = (
        copy.deepcopy(optimizer.state_dict()),
        copy.deepcopy(model.state_dict()),
        _flat(model),
    )
    norms += [step(), step()]
    assert from_ranks(norms) == [norms] * SIZE, (
        "one norm for the whole model, although the two halves are different"
    )
    later = _flat(model)
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    assert torch.equal(_flat(model), kept)
    assert [step(), step()] == norms[1:]
    assert torch.equal(_flat(model), later)
    # What one rank cannot take all refuse.
    with pytest.raises(CheckpointError if rank == 3 else RanksDisagreeError) as caught:
        optimizer.load_state_dict({"state": {}} if rank == 3 else saved)
    parts = ["has state", "no param_groups"]
    if rank != 3:
        parts.append("rank 3 raised")
    assert all(part in str(caught.value) for part in parts), caught.value
    assert torch.equal(_flat(model), later)


CASES: dict[str, Callable[[int], None]] = {
    case.__name__: case
    for case in (
        tied_and_frozen_params_are_one_and_none,
        list_of_chunks_trains_as_one_model,
        ranks_that_own_nothing_have_groups_of_the_same_form,
        empty_param_with_a_gradient_is_left_aside_and_saved,
        params_that_differ_between_ranks_are_told_and_become_those_of_rank_0,
        memory_is_free_when_an_optimizer_has_gone,
        folder_is_of_one_process_group,
        norms_and_sums_that_the_docs_write_out_are_those_of_torch,
        module_buffers_that_training_changes_are_those_of_the_first_rank,
        module_buffers_are_left_alone_when_told_so,
        module_buffers_stay_apart_when_told_so,
        two_optimizers_share_a_model,
        reload_takes_what_is_below_the_precision_of_params,
        params_that_are_saved_alone_are_small,
        strides_stay_and_state_loads_whatever_they_are,
        optimizers_of_whole_params_take_them_row_by_row,
        given_optimizer_steps_ours,
        next_optimizer_trains_when_the_first_one_has_gone,
        loss_in_fp16_does_not_overflow_when_it_is_scaled,
        state_dict_with_a_stats_group_continues_bit_for_bit,
    )
}


def collect_facts(rank: int, size: int) -> dict[str, str]:
    return outcomes({name: partial(case, rank) for name, case in CASES.items()})


facts = facts_of(collect_facts, SIZE, seconds=300.0)


@pytest.mark.parametrize("name", CASES)
def test_plain_host_when_it_is_used_then_as_in_torch(name: str, facts: Facts) -> None:
    facts.assert_passed(name)


def test_distribute_when_process_group_is_missing_then_says_how_to_start() -> None:
    with pytest.raises(ConfigError) as caught:
        distribute(Linear(2, 2), CONFIG)
    assert_says(
        str(caught.value),
        "torch.distributed is not initialised. "
        "Call torch.distributed.init_process_group first, or start with torchrun or deepspeed.",
    )
