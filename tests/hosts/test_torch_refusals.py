"""What cannot have the effect of torch with a sharded optimizer is an error of ours on every
rank.

Exercises hosts/start.py, hosts/torch/get_in.py, hosts/torch/grads.py, hosts/torch/ddp.py,
hosts/torch/optimizer.py.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn import Linear, Module, Parameter, Sequential
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, AdamW, RMSprop

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.comm import Group
from megatron_distopt.errors import (
    AccessError,
    ConfigError,
    LayoutError,
    NonFiniteGradError,
    RanksDisagreeError,
)
from megatron_distopt.hosts.torch.step import _raise_rounds
from tests.support.facts import Facts, facts_of

#: Ranks at start-up, where two pairs may differ, and in training.
SIZE, SIZE_TRAINED = 4, 2
CONFIG = DistOptConfig(accelerator="torch", adam="torch_foreach", lr=0.01, weight_decay=0.1)

#: The class of an error, and what its text has to contain: the values, and the way out.
Refusal = tuple[type[Exception], tuple[str, ...]]
Case = tuple[Callable[[int], object], list[Refusal]]


def one_rank(rank: int, kind: type[Exception], *parts: str) -> list[Refusal]:
    """That rank has its own, the others say which rank it was and repeat it."""
    others = (RanksDisagreeError, (f"rank {rank} raised", *parts, "Fix what that rank reports"))
    return [(kind, parts) if each == rank else others for each in range(SIZE)]


def everyone(kind: type[Exception], *parts: str) -> list[Refusal]:
    return [(kind, parts)] * SIZE


def differing(what: str, theirs: str, ours: str) -> list[Refusal]:
    """Rank 2 differs."""
    parts = (
        what,
        f"rank 2 has {theirs}",
        f"rank 0 has {ours}",
        "Start rank(s) 2 with the code and options",
    )
    return everyone(RanksDisagreeError, *parts)


# --- at start-up


def linear(rank: int = 0, **options: Any) -> Any:
    return distribute(Linear(2, 2), dataclasses.replace(CONFIG, **options))


def grouped(*groups: Any) -> object:
    """Of a layer, from the names of its params and other options."""
    model = Linear(2, 2)
    named = [
        {**group, "params": [getattr(model, name) for name in group["params"]]} for group in groups
    ]
    return distribute(model, CONFIG, param_groups=named)


def _foreign_params(rank: int) -> object:
    model = Linear(2, 2)
    return distribute(
        model, CONFIG, param_groups=[{"params": [*model.parameters(), *Linear(1, 1).parameters()]}]
    )


def _second_time(rank: int) -> object:
    model = Linear(2, 2)
    first = distribute(model, CONFIG)
    return first, distribute(model, CONFIG)


def instance(build: Callable[[Any], Any], *args: Any, **options: Any) -> object:
    model = Linear(2, 2)
    return distribute(model, build(model.parameters()), *args, accelerator="torch", **options)


def _with_rate(rate: float | None) -> None:
    model = Linear(2, 2)
    optimizer = distribute(model, CONFIG)
    optimizer.param_groups[0]["lr"] = rate
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def added(later: Callable[[Sequential], Module]) -> object:
    """A group that is added later."""
    model = Sequential(Linear(2, 2), Linear(3, 3), Linear(3, 3))
    optimizer = distribute(model, RMSprop(model[0].parameters()), accelerator="torch")
    optimizer.add_param_group({"params": list(later(model).parameters())})
    return optimizer


def with_bad_variable(rank: int) -> object:
    if rank == 2:
        os.environ["MEGATRON_DISTOPT_NONFINITE"] = "ignore"
    try:
        return linear()
    finally:
        os.environ.pop("MEGATRON_DISTOPT_NONFINITE", None)


_GROUPS: list[Any] = []


def of_pair(rank: int, model: Module) -> object:
    """Ranks 0 and 1 hold the same params, ranks 2 and 3 others."""
    if not _GROUPS:
        _GROUPS.extend([dist.new_group([0, 1]), dist.new_group([2, 3])])
    return distribute(
        model, CONFIG, process_group=_GROUPS[rank // 2], stats_process_group=dist.group.WORLD
    )


def _of_others(rank: int) -> object:
    """With the group of the other pair."""
    of_pair(rank, Linear(2, 2))
    return distribute(Linear(2, 2), CONFIG, process_group=_GROUPS[1 - rank // 2])


def _saved_apart(rank: int) -> None:
    """Each rank to a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        optimizer = linear()
        optimizer.save(folder)


def _debugged(rank: int) -> object:
    """As with TORCH_DISTRIBUTED_DEBUG=DETAIL, which torch reads when it is imported."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        return linear(overlap_grad_reduce=True, shared_memory=False)
    finally:
        dist.set_debug_level(before)


def _growing(rank: int) -> None:
    """A module buffer grows on one rank."""
    model = _model()
    model.register_buffer("seen", torch.zeros(1))
    optimizer = distribute(model, AdamW(model.parameters()), accelerator="torch")
    model.seen = torch.zeros(3 if rank == 2 else 2)
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()


def _two_in_a_list(rank: int) -> object:
    model = _Twins()
    pair = [AdamW(model.one.parameters()), AdamW(model.other.parameters())]
    return distribute(model, pair, accelerator="torch")


def _added_of_another(rank: int) -> None:
    """A group of params that another optimizer has, for which that one leaves them."""
    model = _Twins()
    one = distribute(model, AdamW(model.one.parameters()), accelerator="torch")
    other = distribute(model, AdamW(model.other.parameters()), accelerator="torch")
    other.add_param_group({"params": list(model.one.parameters())})
    one.release()


class _Twins(Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Linear(6, 6), Linear(6, 6)

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = self.other(self.one(values))
        return out

    def tie(self) -> None:
        self.other.weight.data = self.one.weight.data


def _tied_before(rank: int) -> None:
    model = _Twins()
    model.tie()
    distribute(model, AdamW(model.parameters()), accelerator="torch")


def _shared(rank: int) -> None:
    model = _model().share_memory()
    distribute(model, AdamW(model.parameters()), accelerator="torch")


def _transpose(model: Any) -> None:
    """Leaves the values of the first weight alone, and the order of its elements in memory not."""
    model[0].weight.data = model[0].weight.data.t().contiguous().t()


def _other_strides(rank: int) -> None:
    model = _model()
    if rank == 2:
        _transpose(model)
    distribute(model, AdamW(model.parameters()), accelerator="torch")


def _strided_matrices_in_ddp(rank: int) -> None:
    model = Sequential(Linear(6, 8, bias=False))
    _transpose(model)
    wrapped = DistributedDataParallel(model)
    distribute(wrapped, torch.optim.Muon(model.parameters()), accelerator="torch")


def _leave_to_ranks(model: Module, *names: str) -> None:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(names))


def _left_to_ranks(rank: int) -> None:
    model = _model()
    _leave_to_ranks(model, "0.weight")
    distribute(model, AdamW(model.parameters()), accelerator="torch")


def _tensor_parallel_param(rank: int) -> None:
    model, mesh = _model(), init_device_mesh("cpu", (SIZE,))
    model[0].weight = Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Replicate()]))
    distribute(model, AdamW(model.parameters()), accelerator="torch")


def _module_buffers_differ(rank: int) -> None:
    model = _model()
    model.register_buffer("mask", torch.ones(4 if rank == 2 else 3))
    distribute(model, AdamW(model.parameters()), accelerator="torch")


FLOAT64 = ("param 'bias'", "float64", "float32, bfloat16, float16", "param.requires_grad_(False)")
IN_ITS_PAIR = (
    "param shapes",
    "rank 3 has bias[3]",
    "rank 2 has bias[2]",
    "Start rank(s) 3 with the code and options",
)
OF_PAIR = [(RanksDisagreeError, ("rank 2 raised", *IN_ITS_PAIR))] * 2 + [
    (RanksDisagreeError, IN_ITS_PAIR)
] * 2

START_UP: dict[str, Case] = {
    # what is given
    "params for model": (
        lambda rank: distribute(Linear(2, 2).parameters(), CONFIG),  # type: ignore[arg-type]
        everyone(ConfigError, "its params", "Write distribute(model, optimizer)"),
    ),
    "class of optimizer": (
        lambda rank: distribute(Linear(2, 2), AdamW),  # type: ignore[arg-type]
        everyone(
            ConfigError,
            "the class AdamW",
            "Write distribute(model, AdamW(model.parameters(), lr=...))",
        ),
    ),
    "groups and an optimizer": (
        lambda rank: instance(RMSprop, param_groups=[{"params": []}]),
        everyone(ConfigError, "param_groups", "Give the groups to the optimizer's constructor"),
    ),
    "group without params": (
        lambda rank: distribute(Linear(2, 2), CONFIG, param_groups=[{"lr": 0.5}]),
        everyone(
            LayoutError,
            "a dict without 'params'",
            "Write [{'params': [...], 'weight_decay': 0.0}, ...]",
        ),
    ),
    "in two groups": (
        lambda rank: grouped({"params": ["weight"]}, {"params": ["weight"]}),
        everyone(LayoutError, "'weight'", "in 2 param groups", "Leave it out of one"),
    ),
    "foreign params": (
        _foreign_params,
        everyone(
            LayoutError,
            "2 params that are not in the model",
            "distribute([model, other_module], ...)",
        ),
    ),
    "second time": (
        _second_time,
        everyone(
            LayoutError,
            "in another distributed optimizer",
            "Call release() on the other optimizer first",
            "on_fit_end()",
        ),
    ),
    "two optimizers in a list": (
        _two_in_a_list,
        everyone(
            ConfigError,
            "AdamW and AdamW",
            "one optimizer with several param groups",
            "once for each",
        ),
    ),
    "params of another optimizer added": (
        _added_of_another,
        everyone(LayoutError, "another distributed optimizer", "release()"),
    ),
    "a group without this rank": (
        _of_others,
        [
            (ConfigError, (f"Rank {rank} is not a member", "a group that it belongs to"))
            for rank in range(SIZE)
        ],
    ),
    "folders of other names": (
        _saved_apart,
        everyone(RanksDisagreeError, "The folder to save to", "on rank 0", "the same name"),
    ),
    "messages overlapped while torch counts them": (
        _debugged,
        everyone(ConfigError, "DETAIL", "TORCH_DISTRIBUTED_DEBUG=INFO", "overlap_grad_reduce"),
    ),
    "a module buffer grows on one rank": (
        _growing,
        everyone(
            RanksDisagreeError, "seen float32[3]", "seen float32[2]", "broadcast_buffers=False"
        ),
    ),
    "LBFGS instance": (
        lambda rank: instance(torch.optim.LBFGS),
        everyone(ConfigError, "torch's LBFGS", "Adafactor", "Use one of Adadelta"),
    ),
    "options beside an instance": (
        lambda rank: instance(RMSprop, adam="apex", lr=0.5),
        everyone(ConfigError, "'apex', but an optimizer object", "leave adam or the optimizer out"),
    ),
    "another rate in a step": (
        lambda rank: _with_rate(0.5 if rank == 2 else 0.01),
        everyone(
            RanksDisagreeError,
            "The lr of param group 0 is 0.5 on rank 2 and 0.01 on rank 0",
            "all_reduce",
        ),
    ),
    "a rate that is an array": (
        lambda rank: instance(lambda params: AdamW(params, lr=numpy.array(0.5))),
        everyone(ConfigError, "lr of param group 0 is array(0.5)", "no array", "float(...)"),
    ),
    "a rate of two elements": (
        lambda rank: grouped({"params": ["bias"], "lr": torch.tensor([0.5, 0.25])}),
        everyone(ConfigError, "lr of param group 0 is tensor([0.5000, 0.2500])", "finite number"),
    ),
    "no rate on one rank": (
        lambda rank: grouped({"params": ["bias"], "lr": None if rank == 2 else 0.5}),
        one_rank(2, ConfigError, "lr of param group 0 is None", "finite number"),
    ),
    "a key that no file keeps": (
        lambda rank: grouped({"params": ["bias"], 7: 0.5}),
        everyone(ConfigError, "Param group 0 has the key 7", "Write '7'"),
    ),
    "no rate in a step": (
        lambda rank: _with_rate(None),
        everyone(ConfigError, "lr of param group 0 is None", "finite number"),
    ),
    "arrays that differ": (
        lambda rank: grouped({"params": ["bias"], "own": numpy.array([float(rank == 2)])}),
        differing("param groups", "group 0: own=array [1.0]", "group 0: own=array [0.0]"),
    ),
    "bucket too small": (
        lambda rank: linear(bucket_size=3),
        everyone(
            ConfigError, "bucket_size is 3", "4 data-parallel ranks", "Write bucket_size=40_000_000"
        ),
    ),
    # the model
    "float64": (
        lambda rank: distribute(Linear(2, 2).double(), CONFIG),
        everyone(LayoutError, *FLOAT64),
    ),
    "fp16 without loss scale": (
        lambda rank: distribute(Linear(2, 2).half(), CONFIG),
        everyone(ConfigError, "fp16 params", "Write loss_scale='dynamic'"),
    ),
    "nothing trainable": (
        lambda rank: distribute(Linear(2, 2).requires_grad_(False), CONFIG),
        everyone(LayoutError, "No param of the model can be trained", "requires_grad_(True)"),
    ),
    "on meta": (
        lambda rank: distribute(Linear(2, 2, device="meta"), CONFIG),
        everyone(LayoutError, "meta", "cpu", "Move the model with model.to(...) first"),
    ),
    "lazy module": (
        lambda rank: distribute(Sequential(nn.LazyLinear(3)), CONFIG),
        everyone(LayoutError, "'0.bias'", "one batch"),
    ),
    "tied by data before": (
        _tied_before,
        everyone(LayoutError, "'one.weight'", "'other.weight'", "b.weight = a.weight"),
    ),
    "memory is shared before": (
        _shared,
        everyone(LayoutError, "'1.bias'", "share_memory()", "copy.deepcopy(model)"),
    ),
    "left to each rank by DDP": (
        _left_to_ranks,
        everyone(LayoutError, "'0.weight'", "_set_params_and_buffers", "AdamW([param])"),
    ),
    "strided matrix that DDP has": (
        _strided_matrices_in_ddp,
        everyone(LayoutError, "'module.0.weight'", "(1, 8)", "param.data.contiguous()"),
    ),
    "tensor-parallel param": (
        _tensor_parallel_param,
        everyone(LayoutError, "DTensor", "'0.weight'"),
    ),
    # what ranks must have alike
    "one rank only": (
        lambda rank: distribute(
            Linear(2, 2).to(torch.float64 if rank == 2 else torch.float32), CONFIG
        ),
        one_rank(2, LayoutError, *FLOAT64),
    ),
    "other options": (
        lambda rank: linear(lr=0.5 if rank == 2 else 0.01),
        differing("options", "lr=0.5", "lr=0.01"),
    ),
    "other names": (
        lambda rank: distribute(Sequential(Linear(2, 2)) if rank == 2 else Linear(2, 2), CONFIG),
        differing("param names", "0.bias", "bias"),
    ),
    "other shape": (
        lambda rank: distribute(Linear(2, 3 if rank == 2 else 2), CONFIG),
        differing("param shapes", "bias[3]", "bias[2]"),
    ),
    "other dtype": (
        lambda rank: distribute(
            Linear(2, 2).to(torch.bfloat16 if rank == 2 else torch.float32), CONFIG
        ),
        differing("param dtypes", "bias bfloat16", "bias float32"),
    ),
    "other group options": (
        lambda rank: grouped(
            {
                "params": ["weight", "bias"],
                "weight_decay": 0.5 if rank == 2 else 0.0,
                "lr_mult": 2.0,
            }
        ),
        differing(
            "param groups",
            "group 0: lr_mult=2.0, weight_decay=0.5",
            "group 0: lr_mult=2.0, weight_decay=0.0",
        ),
    ),
    "other members": (
        lambda rank: grouped(
            *[{"params": ["weight"]}, {"params": ["bias"]}][:: -1 if rank == 2 else 1]
        ),
        differing("param group members", "bias in 0", "weight in 0"),
    ),
    "other excluded from the norm": (
        lambda rank: distribute(
            Linear(2, 2), CONFIG, excluded_from_norm=lambda name: rank == 2 and name == "bias"
        ),
        differing("params excluded from the norm", "bias", "nothing"),
    ),
    "other defaults of instance": (  # the groups are alike; one that is added later would not be
        lambda rank: instance(
            lambda params: RMSprop([{"params": params, "lr": 0.1}], lr=0.5 if rank == 2 else 0.1)
        ),
        differing("inner optimizer", "lr=0.5", "lr=0.1"),
    ),
    "other frozen param": (
        lambda rank: distribute(
            Sequential(Linear(6, 8), Linear(8, 3 + (rank == 2)).requires_grad_(False)), CONFIG
        ),
        everyone(RanksDisagreeError, "1.bias", "float32[3]", "float32[4]"),
    ),
    "other module buffer": (
        _module_buffers_differ,
        everyone(RanksDisagreeError, "mask", "[3]", "[4]"),
    ),
    "other strides": (
        _other_strides,
        differing("memory order of the dimensions of params", "0.weight (1, 0)", "0.weight ()"),
    ),
    "bad variable": (
        with_bad_variable,
        one_rank(
            2, ConfigError, "MEGATRON_DISTOPT_NONFINITE is 'ignore'", "one of raise, skip, log"
        ),
    ),
    "shape in one data group": (
        lambda rank: of_pair(rank, Linear(2, 3 if rank == 3 else 2)),
        OF_PAIR,
    ),
    "float64 in one data group": (
        lambda rank: of_pair(rank, Linear(2, 2).to(torch.float64 if rank == 3 else torch.float32)),
        one_rank(3, LayoutError, *FLOAT64),
    ),
    # a group that is added later
    "foreign group later": (
        lambda rank: added(lambda model: Linear(1, 1)),
        everyone(
            LayoutError,
            "2 params that are not in the model",
            "Register their module in the model first",
        ),
    ),
    "known group later": (
        lambda rank: added(lambda model: model[0]),
        everyone(LayoutError, "in 2 param groups", "Leave it out of one"),
    ),
}


# --- in training


def _model() -> Sequential:
    torch.manual_seed(0)
    return Sequential(Linear(6, 8), Linear(8, 3))


def _backward(model: Module, optimizer: Any = None) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.full((2, 6), 1.0 + dist.get_rank(), dtype=dtype)).float().square().sum().backward()


def trained(
    *acts: Callable[[Any, Any], object], model: Callable[[], Module] = _model, **options: Any
) -> Callable[[int], None]:
    """A model and its optimizer, to which something is done."""

    def case(rank: int) -> None:
        built = model()
        optimizer = distribute(
            built, AdamW(built.parameters(), lr=0.1), accelerator="torch", **options
        )
        for act in acts:
            act(built, optimizer)

    return case


def _step(model: Any, optimizer: Any) -> None:
    optimizer.step()


def _whole_step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    _backward(model)
    optimizer.step()


def _clip(model: Any, optimizer: Any) -> None:
    optimizer.clip_grad_norm_(1.0)


def on_rank_1(act: Callable[[Any, Any], object]) -> Callable[[Any, Any], None]:
    def acts(model: Any, optimizer: Any) -> None:
        if dist.get_rank() == 1:
            act(model, optimizer)

    return acts


def _not_on_rank_1(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    _backward(model)
    if dist.get_rank() != 1:
        optimizer.step()


def _use_grad_scaler(model: Any, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(2, 6)).sum()).backward()
    scaler.step(optimizer)


def _scaled_step(model: Any, optimizer: Any) -> None:
    optimizer.scale_loss(model(torch.ones(2, 6)).sum()).backward()
    optimizer.step()


def _convert(model: Any, optimizer: Any) -> None:
    model.double()
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()


def _replace(model: Any, optimizer: Any) -> None:
    model[0].weight = Parameter(torch.ones(8, 6))


def _load_by_assigning(model: Any, optimizer: Any) -> None:
    model.load_state_dict(
        {name: value.clone() for name, value in _model().state_dict().items()}, assign=True
    )


def _clear_weight(model: Any, optimizer: Any) -> None:
    model[0].weight.grad = None


def _assign_weight(model: Any, optimizer: Any) -> None:
    model[0].weight.grad = torch.ones(8, 6)


def _assign_by_autograd(model: Any, optimizer: Any) -> None:
    grads = torch.autograd.grad(
        model(torch.full((2, 6), 1.0 + dist.get_rank())).sum(), list(model.parameters())
    )
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = grad


def _half_frozen() -> Module:
    model = _model()
    model[0].requires_grad_(False)
    return model


def _begin_to_train(model: Any, optimizer: Any) -> None:
    model[0].requires_grad_(True)
    _backward(model)


def _large_backward(model: Any, optimizer: Any) -> None:
    (1e5 * model(torch.ones(2, 6)).sum()).backward()


def clear(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()


def _half() -> Module:
    return _model().half()


def _in_ddp() -> Module:
    return DistributedDataParallel(_model())


def _inner_backward(model: Any, optimizer: Any) -> None:
    """The module inside is called, where DDP averages nothing."""
    _backward(model.module)


def _not_averaged(model: Any, optimizer: Any) -> None:
    with model.no_sync():
        _backward(model)


def _add_noop_hook(model: Any, optimizer: Any) -> None:
    model.register_comm_hook(None, noop_hook)


def _set_mixed_precision(model: Any, optimizer: Any) -> None:
    """What a device alone can train with."""
    model.mixed_precision = "bfloat16"


def _in_ddp_of_each_rank() -> Module:
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return DistributedDataParallel(_model(), process_group=own[dist.get_rank()])


def _leave_to_ranks_later(model: Any, optimizer: Any) -> None:
    _leave_to_ranks(model, "0.weight")
    _backward(DistributedDataParallel(model))


def _backward_in_no_sync(model: Any, optimizer: Any) -> None:
    with optimizer.no_sync():
        _backward(model)


def _make_other_calls(model: Any, optimizer: Any) -> None:
    with mock.patch("megatron_distopt.comm.meeting.SECONDS_TO_LOOK", 0.2):
        if dist.get_rank() == 0:
            optimizer.save("never_written")
        else:
            optimizer.full_state_dict()


def _run_out_of_batches(model: Any, optimizer: Any) -> None:
    with model.join():
        for _ in range(2 + dist.get_rank()):
            _whole_step(model, optimizer)


def _join_both(model: Any, optimizer: Any) -> None:
    with Join([model, optimizer]):
        _whole_step(model, optimizer)


def _entry(model: Any, optimizer: Any) -> Any:
    return optimizer.state[model[0].weight]


LATE = (
    "'1.bias' arrived after its bucket was reduced",
    "Call all but the last backward of a step inside no_sync()",
)
TRAINING: dict[str, Case] = {
    "clip by torch": (
        trained(_backward, lambda model, _: clip_grad_norm_(model.parameters(), 1.0)),
        everyone(AccessError, "optimizer.clip_grad_norm_(max_norm)"),
    ),
    "clip by torch of assigned grads": (
        trained(_assign_by_autograd, lambda model, _: clip_grad_norm_(model.parameters(), 1.0)),
        everyone(AccessError, "optimizer.clip_grad_norm_(max_norm)"),
    ),
    "clip by torch of params that begin to train": (
        trained(
            _begin_to_train,
            lambda model, _: clip_grad_norm_(model[0].parameters(), 1.0),
            model=_half_frozen,
        ),
        everyone(AccessError, "optimizer.clip_grad_norm_(max_norm)"),
    ),
    "overflow of what is sent": (
        trained(_large_backward, _step, reduce_dtype="float16"),
        everyone(
            NonFiniteGradError, "sent as float16", "65,504", "Leave reduce_dtype='float16' out"
        ),
    ),
    "grad is read": (
        trained(_backward, lambda model, _: model[0].weight.grad.norm()),
        everyone(AccessError, "'0.weight'", "optimizer.full_grad(param)"),
    ),
    "another optimizer steps": (
        trained(_backward, lambda model, _: SGD(model.parameters(), lr=0.1).step()),
        everyone(AccessError, "'0.weight'"),
    ),
    "GradScaler": (trained(_use_grad_scaler), everyone(AccessError, "loss_scale")),
    "loss is not scaled": (
        trained(_backward, model=_half, loss_scale="dynamic"),
        everyone(ConfigError, "optimizer.scale_loss(loss).backward()"),
    ),
    "grads kept under a loss scale": (
        trained(_scaled_step, _scaled_step, loss_scale=8.0),
        everyone(ConfigError, "optimizer.zero_grad()"),
    ),
    "optimizer is copied": (
        trained(lambda _, optimizer: copy.deepcopy(optimizer)),
        everyone(AccessError, "distribute(...)"),
    ),
    "optimizer is pickled": (
        trained(lambda _, optimizer: pickle.dumps(optimizer)),
        everyone(AccessError, "state_dict()"),
    ),
    "other norm": (
        trained(_backward, lambda _, optimizer: optimizer.clip_grad_norm_(1.0, norm_type=1.0)),
        everyone(ConfigError, "norm_type", "optimizer.full_grad(param)"),
    ),
    "state on another rank": (
        trained(lambda _, optimizer: optimizer.consolidate_state_dict(to=1)),
        everyone(ConfigError, "to", "1", "torch.save on rank 0"),
    ),
    # in DistributedDataParallel
    "module in DDP is called": (
        trained(_whole_step, clear, _inner_backward, _step, model=_in_ddp),
        everyone(LayoutError, "DistributedDataParallel", "call the wrapped model"),
    ),
    "DDP never averages": (
        trained(_not_averaged, _step, model=_in_ddp),
        everyone(LayoutError, "DistributedDataParallel", "no_sync()"),
    ),
    "hook of DDP that does not average": (
        trained(_add_noop_hook, _whole_step, _whole_step, _whole_step, model=_in_ddp),
        everyone(RanksDisagreeError, "DistributedDataParallel", "communication hook", "all_reduce"),
    ),
    "mixed precision of DDP": (
        trained(_backward, _set_mixed_precision, _step, model=_in_ddp),
        everyone(ConfigError, "mixed_precision", "torch.autocast"),
    ),
    "DDP of each rank alone": (
        trained(_whole_step, _whole_step, _whole_step, model=_in_ddp_of_each_rank),
        everyone(RanksDisagreeError, "DistributedDataParallel", "process_group", "all_reduce"),
    ),
    "left to each rank by DDP later": (
        trained(_leave_to_ranks_later, _step),
        everyone(LayoutError, "'0.weight'", "_set_params_and_buffers", "AdamW([param])"),
    ),
    "averaged by DDP and by us": (
        trained(_whole_step, model=_in_ddp, overlap_grad_reduce=True),
        everyone(ConfigError, "overlap_grad_reduce is True", "Leave overlap_grad_reduce out"),
    ),
    # one that was scaled by another scale would be added to
    "grads kept under a loss scale, in DDP": (
        trained(_scaled_step, _scaled_step, model=_in_ddp, loss_scale=8.0),
        everyone(ConfigError, "loss scale", "Call optimizer.zero_grad() before backward"),
    ),
    # the second clipping would not reach the gradient that the step takes
    "clipped by us and by torch, in DDP": (
        trained(
            _backward,
            _clip,
            lambda model, _: clip_grad_value_(model.parameters(), 0.01),
            model=_in_ddp,
        ),
        everyone(AccessError, "0.weight", "optimizer.clip_grad_norm_(max_norm)"),
    ),
    # what was done to params and groups
    "param is converted": (
        trained(_convert, _step),
        everyone(LayoutError, "float64", "before distribute(...)"),
    ),
    "param is replaced": (
        trained(_replace, _whole_step),
        everyone(LayoutError, "'0.weight'", "param.copy_(...)"),
    ),
    "state dict is assigned": (
        trained(_load_by_assigning, _whole_step),
        everyone(LayoutError, "without assign=True"),
    ),
    "tied by data": (
        trained(lambda model, _: model.tie(), _whole_step, model=_Twins),
        everyone(LayoutError, "'other.weight'", "b.weight = a.weight"),
    ),
    "memory is shared": (
        trained(lambda model, _: model.share_memory(), _whole_step),
        everyone(LayoutError, "'1.bias'", "share_memory()", "copy.deepcopy(model)"),
    ),
    "members are edited": (
        trained(lambda _, optimizer: optimizer.param_groups[0]["params"].pop(), _whole_step),
        everyone(LayoutError, "add_param_group", "requires_grad_(False)"),
    ),
    # what ranks do
    "rank leaves out a step": (
        trained(_whole_step, _not_on_rank_1, _whole_step),
        everyone(RanksDisagreeError, "rank 1", "rank 0", "3", "2"),
    ),
    "rank leaves out a step, overlapped": (
        trained(_whole_step, _whole_step, _not_on_rank_1, _whole_step, overlap_grad_reduce=True),
        everyone(RanksDisagreeError, "rank 1", "round 3", "zero_grad()"),
    ),
    "begun anew on one rank after clipping": (
        trained(_backward, _clip, on_rank_1(clear), _backward, _step),
        everyone(RanksDisagreeError, "on all ranks"),
    ),
    "cleared on one rank after clipping": (
        trained(_backward, _clip, on_rank_1(_clear_weight), _step),
        everyone(LayoutError, "clip_grad_norm_"),
    ),
    "cleared on one rank after the step": (
        trained(_backward, _step, on_rank_1(lambda model, _: model.zero_grad()), _backward, _step),
        everyone(RanksDisagreeError, "optimizer.zero_grad()"),
    ),
    "zeroed on one rank while it goes on from the step before": (
        trained(
            _backward,
            _step,
            _backward,
            on_rank_1(lambda model, _: model.zero_grad(set_to_none=False)),
            _backward,
            _step,
        ),
        everyone(RanksDisagreeError, "optimizer.zero_grad()"),
    ),
    "assigned after clipping": (
        trained(_backward, _clip, _assign_weight, _step),
        everyone(LayoutError, "'0.weight'", "optimizer.zero_grad()"),
    ),
    "save on one rank, another call on the other": (
        trained(_make_other_calls),
        everyone(RanksDisagreeError, "save()", "full_state_dict()", "Call it on all 2 ranks"),
    ),
    "numbers of batches differ, in DDP's join": (
        trained(_run_out_of_batches, model=_in_ddp),
        everyone(ConfigError, "join()", "DistributedSampler(..., drop_last=True)"),
    ),
    "numbers of batches differ, in torch's Join": (
        trained(_join_both, model=_in_ddp),
        everyone(ConfigError, "join()", "call optimizer.zero_grad() and optimizer.step()"),
    ),
    "a moment is assigned": (
        trained(_whole_step, lambda model, optimizer: _entry(model, optimizer).update(exp_avg=1)),
        everyone(AccessError, "reset_state(params)"),
    ),
    "a count is written": (
        trained(_whole_step, lambda model, optimizer: _entry(model, optimizer)["step"].fill_(0)),
        everyone(AccessError, "reset_state(params)"),
    ),
    "state is assigned": (
        trained(lambda model, optimizer: setattr(optimizer, "state", {model[0].weight: {"a": 1}})),
        everyone(AccessError, "load_state_dict"),
    ),
    "__setstate__": (
        trained(lambda _, optimizer: optimizer.__setstate__({"state": {}})),
        everyone(AccessError, "load_state_dict"),
    ),
    "state of the given optimizer is assigned": (
        trained(lambda _, optimizer: setattr(optimizer._given[0], "state", {})),
        everyone(AccessError, "reset_state(params)"),
    ),
    "param_groups of the given optimizer are assigned": (
        trained(lambda _, optimizer: setattr(optimizer._given[0], "param_groups", [])),
        everyone(ConfigError, "param_groups", "add_param_group"),
    ),
    "state is emptied after another model's params took the place": (
        trained(
            lambda model, _: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
            lambda _, optimizer: setattr(optimizer, "state", {}),
        ),
        everyone(LayoutError, "no longer in the model", "assign=True"),
    ),
    "state of a foreign param is reset": (
        trained(lambda _, optimizer: optimizer.reset_state([Parameter(torch.ones(2))])),
        everyone(
            LayoutError, "1 params that are in no param group", "Give it params of this optimizer"
        ),
    ),
    "a moment of no such name is scaled": (
        trained(_whole_step, lambda _, optimizer: optimizer.reset_state(scale={"exp_avgs": 0.1})),
        everyone(ConfigError, "exp_avgs", "exp_avg, exp_avg_sq"),
    ),
    "state is reset on one rank": (
        trained(
            _whole_step,
            on_rank_1(lambda model, optimizer: optimizer.state.pop(model[0].weight)),
            _whole_step,
        ),
        everyone(RanksDisagreeError, "optimizer state", "reset for '0.weight'", "as it was"),
    ),
    "second backward with overlap": (
        trained(_whole_step, _whole_step, clear, _backward, _backward, overlap_grad_reduce=True),
        everyone(LayoutError, *LATE, "overlap_grad_reduce=False"),
    ),
    "backward inside no_sync comes last": (  # when all has come that did in the first step
        trained(_whole_step, _backward, _backward_in_no_sync, overlap_grad_reduce=True),
        everyone(LayoutError, *LATE),
    ),
}


def _raised(case: Callable[[int], object], rank: int) -> tuple[type[Exception], str] | None:
    try:
        case(rank)
    except Exception as error:  # noqa: BLE001 - a raw error is not what was wanted, and is shown
        return type(error), str(error)
    return None


Found = dict[str, tuple[type[Exception], str] | None]


def collect_facts(rank: int, size: int) -> Found:
    found: Found = {}
    for name, (case, _) in (START_UP if size == SIZE else TRAINING).items():
        found[name] = _raised(case, rank)
        dist.barrier()
    return found


at_start = facts_of(collect_facts, SIZE, seconds=300.0)
in_training = facts_of(collect_facts, SIZE_TRAINED, seconds=300.0)


def check_refusals(found: list[tuple[type[Exception], str] | None], wanted: list[Refusal]) -> None:
    for each, (kind, parts) in zip(found, wanted, strict=True):
        assert each is not None
        assert each[0] is kind, each
        assert [part for part in parts if part not in each[1]] == [], each[1]


@pytest.mark.parametrize("name", START_UP)
def test_distribute_when_input_is_bad_then_every_rank_says_what_to_write(
    name: str, at_start: Facts
) -> None:
    check_refusals(at_start[name], START_UP[name][1])


@pytest.mark.parametrize("name", TRAINING)
def test_optimizer_when_there_is_no_equal_result_then_every_rank_is_told(
    name: str, in_training: Facts
) -> None:
    check_refusals(in_training[name], TRAINING[name][1][:SIZE_TRAINED])


@pytest.mark.parametrize(("is_dropped", "named"), [(True, "rank 0"), (False, "no rank")])
def test_step_when_another_rank_makes_another_call_then_names_the_ranks_that_cleared(
    is_dropped: bool, named: str
) -> None:
    model: Any = SimpleNamespace(everyone=Group(None, 0, 1), grads=SimpleNamespace(num_rounds=1))
    with pytest.raises(RanksDisagreeError, match=f"round 2 of .* cleared on {named}"):
        _raise_rounds(model, is_dropped=is_dropped)
