"""A model in torch's DistributedDataParallel with our optimizer, and with torch's AdamW.

Every case is a training loop that is called twice, with either optimizer; losses and params are
compared.

Exercises hosts/torch/ddp.py, hosts/torch/module_buffers.py, buffers/grad_buffer.py.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from megatron_distopt import distribute
from tests.support.facts import Facts, facts_of

#: Sums of three equal gradients are rounded once more, and flat params are cut elsewhere than
#: torch's, so that a few elements go through other lanes of the same kernel: some units in the last
#: place of changes of size lr.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}
STEPS = 4


class Net(nn.Module):
    """With a branch that the first rank takes from the third step on, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.branch = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.branch.requires_grad_(False)
        self.takes_branch = False

    def forward(self, batch: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(self.first(batch)))
        if self.takes_branch:
            hidden = hidden + self.branch(hidden)
        return self.second(hidden).float().square().mean()


class Rounded:
    """torch's AdamW on fp32 copies of 16-bit params, rounded into them after each step."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params, self.copies = params, [param.detach().float().clone() for param in params]
        self.inner = adamw(self.copies)
        self.param_groups = [{"params": params}]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.params:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        for param, copy in zip(self.params, self.copies, strict=True):
            copy.grad = None if param.grad is None else param.grad.float()
        self.inner.step()
        for param, copy in zip(self.params, self.copies, strict=True):
            param.copy_(copy)


def adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=True)


def reference(model: nn.Module, options: dict[str, Any]) -> Any:
    trained = [param for param in model.parameters() if param.requires_grad]
    return adamw(trained) if trained[0].dtype is torch.float32 else Rounded(trained)


def ours(model: nn.Module, options: dict[str, Any]) -> Any:
    return distribute(
        model,
        adamw([p for p in model.parameters() if p.requires_grad]),
        accelerator="torch",
        **options,
    )


class Loop:
    """One training of a case; `wrapping` has options of DistributedDataParallel, `options` those of
    `distribute`."""

    def __init__(
        self,
        build: Callable[..., Any],
        dtype: torch.dtype,
        wrapping: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        torch.manual_seed(3)
        self.net = Net().to(dtype)
        self.build, self.dtype, self.wrapping, self.options = build, dtype, wrapping, options
        self.seen: list[Tensor] = []

    def wrap(self) -> DistributedDataParallel:
        return DistributedDataParallel(self.net, **self.wrapping)

    def wrap_then_distribute(self) -> tuple[Any, Any]:
        model = self.wrap()
        return model, self.build(self.net, self.options)

    def distribute_then_wrap(self) -> tuple[Any, Any]:
        optimizer = self.build(self.net, self.options)
        return self.wrap(), optimizer

    def batch(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        return torch.randn(4, 6, generator=generator).to(self.dtype)

    def note(self, *values: Tensor) -> None:
        self.seen += [value.detach().float().clone() for value in (*values, *self.net.parameters())]


def average(module: nn.Module) -> None:
    """In fp32, as we do."""
    for param in (each for each in module.parameters() if each.grad is not None):
        grad = param.grad.float()
        dist.all_reduce(grad)
        param.grad_dtype = None
        param.grad = grad / dist.get_world_size()


def clipped_steps(loop: Loop, model: Any, optimizer: Any) -> None:
    """What most scripts do."""
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(loop.batch(step))
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        loop.note(loss, norm)


def wrapped_first(loop: Loop) -> None:
    clipped_steps(loop, *loop.wrap_then_distribute())


def whole_wrapper(loop: Loop) -> None:
    """The optimizer is given the wrapper."""
    model = loop.wrap()
    clipped_steps(loop, model, loop.build(model, loop.options))


def accumulated(loop: Loop) -> None:
    """Microbatches inside of no_sync, gradients that are zeroed, and read after the step."""
    model, optimizer = loop.distribute_then_wrap()
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for micro in range(2):
            with model.no_sync() if micro < 1 else contextlib.nullcontext():
                (model(loop.batch(2 * step + micro)) / 2).backward()
        clip_grad_value_(model.parameters(), 0.003)
        optimizer.step()
        loop.note(loop.net.first.weight.grad)


def never_zeroed(loop: Loop) -> None:
    """Gradients add up over steps, and some are read much later."""
    model, optimizer = loop.distribute_then_wrap()
    kept = []
    for step in range(STEPS):
        model(loop.batch(step)).backward()
        kept.append(loop.net.second.bias.grad.clone())
        optimizer.step()
        loop.note(loop.net.second.weight.grad)
    loop.note(*kept)


def kept_references(loop: Loop) -> None:
    """A gradient that somebody holds stays what it was."""
    model, optimizer = loop.distribute_then_wrap()
    for step in range(STEPS):
        model(loop.batch(step)).backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        optimizer.step()
        # those are DDP's own memory, also in torch
        if not loop.wrapping.get("gradient_as_bucket_view"):
            optimizer.zero_grad()
        loop.note(*grads)
        optimizer.zero_grad()


def branches(loop: Loop) -> None:
    """Params of which one rank has a gradient, or none has."""
    loop.net.branch.requires_grad_(True)
    loop.wrapping = {**loop.wrapping, "find_unused_parameters": True}
    model, optimizer = loop.distribute_then_wrap()
    for step in range(STEPS):
        loop.net.takes_branch = step >= 2 and dist.get_rank() == 0
        optimizer.zero_grad()
        model(loop.batch(step)).backward()
        clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        loop.note()


def part_wrapped(loop: Loop) -> None:
    """Only one layer is in DDP: the others' gradients are averaged by us, or by hand."""
    net = loop.net
    optimizer = loop.build(net, loop.options)
    layer = DistributedDataParallel(net.first, **loop.wrapping)
    for step in range(STEPS):
        optimizer.zero_grad()
        hidden = torch.tanh(net.frozen(layer(loop.batch(step))))
        net.second(hidden).float().square().mean().backward()
        if loop.build is reference:
            average(net.second)
        optimizer.step()
        loop.note()


def unwrapped_again(loop: Loop) -> None:
    """DDP is dropped in the middle: our gradients are reduced by us from then on."""
    model, optimizer = loop.distribute_then_wrap()
    for step in range(STEPS):
        optimizer.zero_grad()
        if step == 2:
            model = loop.net
            gc.collect()  # DDP is in a cycle
        model(loop.batch(step)).backward()
        if step >= 2 and loop.build is reference:
            average(model)
        optimizer.step()
        loop.note()


def wrapped_twice(loop: Loop) -> None:
    """The first wrapper is still there when the second one trains."""
    before, optimizer = loop.distribute_then_wrap()
    before(loop.batch(0)).backward()
    optimizer.step()
    clipped_steps(loop, loop.wrap(), optimizer)


def scaled(loop: Loop) -> None:
    """torch's own loss scale, which skips the second step."""
    model, optimizer = loop.distribute_then_wrap()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(loop.batch(step)) * (math.inf if step == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        loop.note(torch.tensor(scaler.get_scale()))


def compiled(loop: Loop) -> None:
    model, optimizer = loop.distribute_then_wrap()
    if loop.build is ours:
        model = torch.compile(model, backend="eager")
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(2):
            with model.no_sync() if micro == 0 else contextlib.nullcontext():
                model(loop.batch(2 * step + micro)).backward()
        clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        loop.note()


def strided(loop: Loop) -> None:
    """Weights whose elements lie column by column when DDP and `distribute` find them."""
    for layer in (loop.net.first, loop.net.second):
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    loop.wrapping = {**loop.wrapping, "find_unused_parameters": True}
    clipped_steps(loop, *loop.wrap_then_distribute())
    loop.note(torch.tensor(loop.net.first.weight.stride()))


def hooked(loop: Loop) -> None:
    """A communication hook that averages, and returns a tensor of its own."""
    model, optimizer = loop.wrap_then_distribute()
    model.register_comm_hook(None, fp16_compress_hook)
    clipped_steps(loop, model, optimizer)


def left_to_ranks(loop: Loop) -> None:
    """Params and a module buffer that DDP ignores: each rank has its own, trained beside."""
    torch.manual_seed(dist.get_rank())
    loop.net.branch = nn.Linear(8, 8 + dist.get_rank())
    loop.net.register_buffer("count", torch.full((3,), float(dist.get_rank())))
    names = ["branch.weight", "branch.bias", "count"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(loop.net, names)
    beside = torch.optim.SGD(loop.net.branch.parameters(), lr=0.5)
    model = loop.wrap()
    optimizer = adamw([*loop.net.first.parameters(), *loop.net.second.parameters()])
    if loop.build is ours:
        optimizer = distribute(loop.net, optimizer, accelerator="torch", **loop.options)
    for step in range(STEPS):
        optimizer.zero_grad()
        beside.zero_grad()
        loop.net.count = loop.net.count + 1
        model(loop.batch(step)).backward()
        loop.net.branch(loop.batch(step)[:, :1].expand(4, 8)).square().mean().backward()
        optimizer.step()
        beside.step()
        loop.note(loop.net.count)


def buffers_left_alone(loop: Loop) -> None:
    """Module buffers follow no rank where DDP was told so."""
    loop.net.register_buffer("count", torch.zeros(3))
    loop.wrapping = {**loop.wrapping, "broadcast_buffers": False}
    model, optimizer = loop.wrap_then_distribute()
    for step in range(STEPS):
        optimizer.zero_grad()
        loop.net.count += dist.get_rank()
        model(loop.batch(step)).backward()
        optimizer.step()
        loop.note(loop.net.count)


def prepared_by_framework(loop: Loop) -> None:
    """Lightning's manual optimization: it prepares the second backward of a training step without a
    forward pass of the wrapper, as a GAN needs it."""
    model, optimizer = loop.wrap_then_distribute()
    for step in range(STEPS):
        for forward in (model, loop.net):
            optimizer.zero_grad()
            loss = forward(loop.batch(step))
            if forward is loop.net:
                model.require_forward_param_sync = True
                model.reducer._rebuild_buckets()
                model.reducer.prepare_for_backward([])
            loss.backward()
            optimizer.step()
            loop.note(loss)


def sync_triggered(loop: Loop) -> None:
    """Accelerate's `trigger_sync_in_backward`: the last backward averages, whatever the forward
    passes were prepared for; afterwards DDP's attributes are as before."""
    model, optimizer = loop.wrap_then_distribute()
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            first, second = model(loop.batch(2 * step)), model(loop.batch(2 * step + 1))
        first.backward()
        before = model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        model.reducer.prepare_for_backward([])
        second.backward()
        model.require_forward_param_sync = before
        optimizer.step()
        loop.note(first, second)


CASES: dict[str, Callable[[Loop], None]] = {
    each.__name__: each
    for each in (
        wrapped_first,
        whole_wrapper,
        accumulated,
        never_zeroed,
        kept_references,
        branches,
        part_wrapped,
        unwrapped_again,
        wrapped_twice,
        scaled,
        compiled,
        strided,
        hooked,
        left_to_ranks,
        buffers_left_alone,
        prepared_by_framework,
        sync_triggered,
    )
}


def outcome(
    case: Callable[[Loop], None],
    dtype: torch.dtype,
    wrapping: dict[str, Any],
    options: dict[str, Any],
) -> str:
    sides = [Loop(build, dtype, wrapping, options) for build in (reference, ours)]
    for side in sides:
        case(side)
    pairs = zip(sides[0].seen, sides[1].seen, strict=True)
    unequal = [
        number
        for number, (one, other) in enumerate(pairs)
        if not torch.allclose(one, other, **TOLERANCE)
    ]
    return "equal" if not unequal else f"unequal at {unequal[0]} of {len(sides[0].seen)}"


#: Cases that differ where gradients are views of DDP's buckets, in bf16.
WITH_VIEWS = ("accumulated", "kept_references", "branches", "scaled", "strided")
#: From a key to a case, a dtype, and whether gradients are views of DDP's buckets.
KEYS = {
    **{f"{name}, float32, copies": (name, torch.float32, False) for name in CASES},
    **{f"{name}, bfloat16, views": (name, torch.bfloat16, True) for name in WITH_VIEWS},
    "kept_references, float32, views": ("kept_references", torch.float32, True),
}


def collect_facts(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, (name, dtype, is_view) in KEYS.items():
        options = {"bucket_size": 64, "overlap_param_gather": is_view}
        found[key] = outcome(CASES[name], dtype, {"gradient_as_bucket_view": is_view}, options)
    return found


# Of three ranks, where an average is no power of two.
facts = facts_of(collect_facts, 3, seconds=300)


@pytest.mark.parametrize("key", KEYS)
def test_ddp_when_trained_with_our_optimizer_then_all_is_as_with_adamw(
    facts: Facts, key: str
) -> None:
    assert facts[key] == ["equal"] * 3
