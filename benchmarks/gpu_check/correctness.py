"""Is a step right here? Against torch's own optimizers, the same steps done otherwise, and
collectives by themselves.

Every check trains for a few steps. Where gradients are `grads_of`, every sum is exact in whatever
order, so equal means equal to the bit; the reason stands where a check allows more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from gpu_check.checks import Check, Found, Place, Where
from gpu_check.comparing import (
    CLIP_GRAD,
    ROUNDED,
    ROUNDED_TO_16_BITS,
    STEPS,
    config_of,
    is_exact,
    numbered,
    require,
    require_close,
    require_equal,
    same_adam,
    sharded,
    train_given,
    values_of,
)
from gpu_check.machine import CPU
from gpu_check.models import (
    ADAM,
    BUCKET_SIZE,
    Given,
    Net,
    groups_of,
    mean_grads,
    relative_change,
    samples,
)
from gpu_check.peers import is_compiled
from megatron_distopt import distribute
from megatron_distopt.errors import DistOptError

#: By implementation of Adam, the op of DeepSpeed's that it needs.
_OPS = {"deepspeed": "fused_adam", "deepspeed_cpu": "cpu_adam"}
#: Some kernels compute 1 - beta2 in fp32, which is 6e-6 off where beta2 is 0.99; another formula is
#: 1e-3 off.
_ROUNDED_IN_KERNELS = 5e-5
#: Of the norm of the gradient in fp32, after steps that were rounded otherwise.
_NORM = 1e-4


# Collectives


def in_place_collectives(place: Place) -> Found:
    """Reduce-scatter into a view of its input and all-gather from a view of its output, against
    separate tensors."""
    combinations = 0
    for dtype in (torch.float32, torch.bfloat16):
        for numel in (8, 1003, 1 << 20):
            for asynchronous in (False, True):
                _one_exchange(place, dtype, numel, asynchronous)
                combinations += 1
    return Found(f"{combinations} combinations of dtype, length and async_op, equal to the bit")


_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _one_exchange(place: Place, dtype: torch.dtype, numel: int, asynchronous: bool) -> None:
    whole = _grid(place, place.rank, numel * place.size).to(dtype)
    mine = slice(place.rank * numel, (place.rank + 1) * numel)
    apart = torch.empty(numel, dtype=dtype, device=place.device)
    _reduce_scatter(apart, whole.clone())
    within = whole.clone()
    _done(_reduce_scatter(within[mine], within, async_op=asynchronous))
    wanted = sum(_grid(place, rank, numel * place.size)[mine] for rank in range(place.size))
    how = f"of a reduce-scatter of {numel} elements in {dtype}, async_op={asynchronous}"
    require(torch.equal(apart.float(), wanted), f"the sum {how} is wrong")
    require(
        torch.equal(within[mine], apart),
        f"the result {how} into a view of its input is not that into a tensor",
    )
    gathered = torch.empty_like(whole)
    _all_gather(gathered, apart)
    inside = torch.zeros_like(whole)
    inside[mine] = apart
    _done(_all_gather(inside, inside[mine], async_op=asynchronous))
    how = how.replace("a reduce-scatter", "an all-gather")
    require(
        torch.equal(inside, gathered),
        f"the result {how} from a view of its output is not that from a tensor",
    )


def _done(work: Any) -> None:
    if work is not None:
        work.wait()


def _grid(place: Place, rank: int, numel: int) -> Tensor:
    """fp32, and values that bf16 holds as well as their sum over 8 ranks."""
    start = torch.arange(numel, device=place.device)
    return ((start * 7 + rank * 3) % 17 - 8).float() / 16


# The step


def undistributed(place: Place) -> Found:
    """Ours against torch's AdamW over fp32 main params on one rank, with the same kernel."""
    name, option = same_adam(place)
    for dtype in (torch.float32, torch.bfloat16):
        for clip in (0.0, CLIP_GRAD):
            _against_undistributed(place, dtype, clip, name, option)
    exact = (
        "to the bit"
        if is_exact(place.size)
        else f"to {ROUNDED:g}, because a mean over {place.size} is rounded"
    )
    return Found(
        f"fp32 and bf16 params equal {exact} after {STEPS} steps by {name}; to {ROUNDED:g} where "
        "clipped"
    )


def _against_undistributed(
    place: Place, dtype: torch.dtype, clip: float, name: str, option: dict[str, bool]
) -> None:
    model, plain = (Given(dtype).to(place.device) for _ in range(2))
    start = values_of(plain)
    optimizer = sharded(model, config_of(adam=name, clip_grad=clip))
    reference = _Undistributed(plain, option, clip)
    names = list(model.held)
    for step in range(STEPS):
        train_given(optimizer, model, step, place)
        reference.step(mean_grads(step, place.size, place.device))
        if clip == 0.0 and is_exact(place.size):
            require_equal(
                values_of(model), values_of(plain), names, f"after step {step} in {dtype}"
            )
    allowed = ROUNDED if dtype is torch.float32 else ROUNDED_TO_16_BITS
    require_close(
        values_of(model), values_of(plain), start, allowed, f"{dtype} params, clip_grad={clip}"
    )
    optimizer.release()


class _Undistributed:
    """What a careful user writes: fp32 main params, the mean gradient, clipping, AdamW, and a copy
    back.

    Args:
        model: that is updated.
        option: of torch's AdamW: which kernel.
        clip: largest norm of the gradient; 0 for none.
    """

    def __init__(self, model: Given, option: dict[str, bool], clip: float) -> None:
        self._held, self._clip = dict(model.held), clip
        self._mains = {
            name: torch.nn.Parameter(param.detach().clone().float())
            for name, param in self._held.items()
        }
        self._adam = torch.optim.AdamW(groups_of(self._mains), **ADAM, **option)

    def step(self, grads: dict[str, Tensor]) -> None:
        for name, main in self._mains.items():
            main.grad = grads[name].clone()
        if self._clip:
            torch.nn.utils.clip_grad_norm_(self._mains.values(), self._clip)
        self._adam.step()
        with torch.no_grad():
            for name, main in self._mains.items():
                self._held[name].copy_(main)


def kernels(place: Place) -> Found:
    """Every implementation of Adam that is installed, against torch's for-loop in float64 on the
    CPU."""
    start, wanted = _in_float64(place)
    found: dict[str, float] = {}
    absent: list[str] = []
    for name in ("auto", *_adam_sources()):
        model = Given(torch.float32).to(place.device)
        if name in _OPS and not is_compiled(_OPS[name]):
            absent.append(f"{name} (not compiled)")
            continue
        try:
            optimizer = sharded(model, config_of(adam=name))
        except DistOptError:
            absent.append(name)
            continue
        place.say(name)
        for step in range(STEPS):
            train_given(optimizer, model, step, place)
        found[name] = relative_change(values_of(model), wanted, start)
        optimizer.release()
    wrong = {name: apart for name, apart in found.items() if not apart <= _ROUNDED_IN_KERNELS}
    require(
        not wrong,
        f"{wrong} of the change from float64, at most {_ROUNDED_IN_KERNELS:g} is rounding; all: "
        f"{found}",
    )
    said = ", ".join(f"{name} {apart:.1e}" for name, apart in found.items())
    return Found(
        f"from float64: {said}; not here: {', '.join(absent) or 'none'}",
        {"apart": found, "absent": absent},
    )


def _adam_sources() -> tuple[str, ...]:
    from megatron_distopt.config import ADAM_SOURCES

    return tuple(ADAM_SOURCES)


def _in_float64(place: Place) -> tuple[list[Tensor], list[Tensor]]:
    """Params at the start and at the end, on the CPU."""
    cpu = torch.device(CPU)
    params = {
        name: torch.nn.Parameter(param.detach().double())
        for name, param in Given(torch.float32).held.items()
    }
    start = [param.detach().clone() for param in params.values()]
    adam = torch.optim.AdamW(groups_of(params), **ADAM, foreach=False)
    for step in range(STEPS):
        for name, grad in mean_grads(step, place.size, cpu).items():
            params[name].grad = grad.double()
        adam.step()
    return start, [param.detach() for param in params.values()]


def ddp(place: Place) -> Found:
    """A training of a real model, against torch's DistributedDataParallel with its AdamW."""
    ours, theirs = (Net(torch.float32).to(place.device) for _ in range(2))
    start = values_of(theirs)
    optimizer = distribute(ours, torch.optim.AdamW(ours.parameters(), **ADAM))
    wrapped = DistributedDataParallel(theirs, device_ids=None) if place.size > 1 else theirs
    adam = torch.optim.AdamW(theirs.parameters(), **ADAM)
    losses, norms = [], []
    for step in range(2 * STEPS):
        (sample,) = samples(step, place.rank, place.device)
        losses.append(
            [_ours_step(optimizer, ours, [sample]), _ddp_step(adam, theirs, wrapped, sample)]
        )
        norms.append(
            [
                float(optimizer.last_step.grad_norm),
                float(clip_grad_norm_(theirs.parameters(), math.inf)),
            ]
        )
    apart, norm = (max(abs(one / other - 1) for one, other in pairs) for pairs in (losses, norms))
    changed = require_close(
        values_of(ours), values_of(theirs), start, 1e-3, "params after a training in fp32"
    )
    require(
        apart <= ROUNDED, f"a loss is {apart:.3g} from that under DistributedDataParallel: {losses}"
    )
    # Adam divides by the size of gradients: only the norm shows a wrong one.
    require(
        norm <= _NORM,
        f"a norm of the gradient is {norm:.3g} from that under DistributedDataParallel: {norms}",
    )
    figures = {"losses": losses, "loss": apart, "norm": norm, "params": changed}
    said = (
        f"losses of {2 * STEPS} steps apart by at most {apart:.1e}, norms by {norm:.1e}, params by "
        f"{changed:.1e}"
    )
    return Found(said, figures)


def _ours_step(optimizer: Any, model: Net, microbatches: Sequence[Tensor]) -> float:
    optimizer.zero_grad()
    total = 0.0
    for number, sample in enumerate(microbatches):
        with nullcontext() if number == len(microbatches) - 1 else optimizer.no_sync():
            loss = model.loss(sample)
            optimizer.scale_loss(loss / len(microbatches)).backward()
        total += float(loss.detach())
    optimizer.step()
    return total


def _ddp_step(
    adam: torch.optim.Optimizer, model: Net, wrapped: torch.nn.Module, sample: Tensor
) -> float:
    adam.zero_grad()
    output = wrapped(sample)
    loss = (output.float() - sample.flip(-1)).square().mean()
    loss.backward()
    adam.step()
    return float(loss.detach())


# Overlaps, graphs, and what is not finite


def overlaps(place: Place) -> Found:
    """Both overlaps, alone and together, against a run without, in bf16 with two microbatches a
    step."""
    runs = {
        "neither": {},
        "grads": {"overlap_grad_reduce": True},
        "params": {"overlap_param_gather": True},
        "both": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    }
    wanted: list[Tensor] = []
    for name, options in runs.items():
        values = _trained(place, {**options, "bucket_size": BUCKET_SIZE, "clip_grad": CLIP_GRAD})
        wanted = wanted or values
        require_equal(
            values, wanted, numbered(values), f"with overlap of {name} from the run without"
        )
    return Found(
        f"grads, params and both: {2 * STEPS} steps in bf16 equal to the bit to the run without "
        "overlap"
    )


def _trained(
    place: Place, options: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    model = Net(dtype).to(place.device)
    optimizer = distribute(model, config_of(**options))
    for step in range(2 * STEPS):
        _ours_step(optimizer, model, samples(step, place.rank, place.device, 2))
    optimizer.finish_param_gather()
    values = values_of(model)
    optimizer.release()
    return values


CHECKS = (
    Check(
        "collectives",
        "collectives in place equal those into other tensors",
        in_place_collectives,
        least_ranks=2,
    ),
    Check("undistributed", "steps equal torch's AdamW on one rank", undistributed),
    Check("ddp", "a training agrees with DistributedDataParallel and AdamW", ddp),
    Check("overlaps", "both overlaps change no bit", overlaps, limit=90),
    Check(
        "kernels",
        "every Adam that is installed agrees with float64",
        kernels,
        where=Where.ALL,
        limit=150,
    ),
)
