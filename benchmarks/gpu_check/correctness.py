"""Is a step right here? Against torch's own optimizers, the same steps done otherwise, and collectives by themselves.

Every check trains for a few steps. Where gradients are `grads_of`, every sum is exact in whatever order, so equal means
equal to the bit; the reason stands where a check allows more.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from gpu_check.checks import Check, Found, Place, SkipError, Where, WrongError
from gpu_check.device import CPU
from gpu_check.machine import rank_counts
from gpu_check.models import (
    ADAM,
    BUCKET_SIZE,
    Given,
    Net,
    grads_of,
    groups_of,
    mean_grads,
    relative_change,
    samples,
)
from gpu_check.peers import is_compiled
from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.errors import DistOptError, NonFiniteGradError

__all__ = ["CHECKS"]

#: By implementation of Adam, the op of DeepSpeed's that it needs.
_OPS = {"deepspeed": "fused_adam", "deepspeed_cpu": "cpu_adam"}
STEPS = 6
CLIP_GRAD = 0.5
#: fp32 rounds the norm and the coefficient of clipping, on both sides in another order.
_ROUNDED = 1e-5
#: Some kernels compute 1 - beta2 in fp32, which is 6e-6 off where beta2 is 0.99; another formula is 1e-3 off.
_ROUNDED_IN_KERNELS = 5e-5
#: A bf16 param that lies between two numbers may be rounded to the other one.
_ROUNDED_TO_16_BITS = 2e-3
_HALF = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _config(**options: Any) -> DistOptConfig:
    return DistOptConfig(accelerator="torch", **{**ADAM, **options})


def _fused(place: Place) -> bool:
    """Whether torch has a fused Adam for the device."""
    utils = import_module("torch.utils._foreach_utils")
    return place.device.type in utils._get_fused_kernels_supported_devices()


def _same_adam(place: Place) -> tuple[str, dict[str, bool]]:
    """The same kernel for us and for torch, element by element: its name with us, and torch's option."""
    return ("torch_fused", {"fused": True}) if _fused(place) else ("torch_foreach", {"foreach": True})


def _is_exact(size: int) -> bool:
    """Whether a mean over the ranks is."""
    return size & (size - 1) == 0


def require(holds: bool, text: str) -> None:
    """
    Raises:
        WrongError: with the text, where it does not hold.
    """
    if not holds:
        raise WrongError(text)


def values_of(module: torch.nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in module.parameters()]


def require_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor], names: Sequence[str], when: str) -> None:
    """
    Raises:
        WrongError: a bit differs; with the first name, and how many elements.
    """
    for one, other, name in zip(ours, theirs, names, strict=True):
        if not torch.equal(one, other):
            differ = one != other
            largest = float((one.float() - other.float()).abs().max())
            text = f"{int(differ.sum())} of {one.numel()} elements of {name} differ {when}, by at most {largest:.3g}"
            raise WrongError(text)


# Collectives


def in_place_collectives(place: Place) -> Found:
    """Reduce-scatter into a view of its input and all-gather from a view of its output, against separate tensors."""
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
    require(torch.equal(within[mine], apart), f"the result {how} into a view of its input is not that into a tensor")
    gathered = torch.empty_like(whole)
    _all_gather(gathered, apart)
    inside = torch.zeros_like(whole)
    inside[mine] = apart
    _done(_all_gather(inside, inside[mine], async_op=asynchronous))
    how = how.replace("a reduce-scatter", "an all-gather")
    require(torch.equal(inside, gathered), f"the result {how} from a view of its output is not that from a tensor")


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
    name, option = _same_adam(place)
    for dtype in (torch.float32, torch.bfloat16):
        for clip in (0.0, CLIP_GRAD):
            _against_undistributed(place, dtype, clip, name, option)
    exact = "to the bit" if _is_exact(place.size) else f"to {_ROUNDED:g}, because a mean over {place.size} is rounded"
    return Found(f"fp32 and bf16 params equal {exact} after {STEPS} steps by {name}; to {_ROUNDED:g} where clipped")


def _against_undistributed(place: Place, dtype: torch.dtype, clip: float, name: str, option: dict[str, bool]) -> None:
    model, plain = (Given(dtype).to(place.device) for _ in range(2))
    start = values_of(plain)
    optimizer = distribute(model, _config(adam=name, clip_grad=clip), param_groups=groups_of(dict(model.held)))
    reference = _Undistributed(plain, option, clip)
    names = list(model.held)
    for step in range(STEPS):
        _train_given(optimizer, model, step, place)
        reference.step(mean_grads(step, place.size, place.device))
        if clip == 0.0 and _is_exact(place.size):
            require_equal(values_of(model), values_of(plain), names, f"after step {step} in {dtype}")
    allowed = _ROUNDED if dtype is torch.float32 else _ROUNDED_TO_16_BITS
    _require_close(values_of(model), values_of(plain), start, allowed, f"{dtype} params, clip_grad={clip}")
    optimizer.release()


def _train_given(optimizer: Any, model: Given, step: int, place: Place) -> None:
    optimizer.zero_grad()
    model(grads_of(step, place.rank, place.device)).backward()
    optimizer.step()


def _require_close(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], start: Sequence[Tensor], allowed: float, what: str
) -> float:
    apart = relative_change(ours, theirs, start)
    require(apart <= allowed, f"{what}: {apart:.3g} of the change from the reference, at most {allowed:g} is rounding")
    return apart


class _Undistributed:
    """What a careful user writes: fp32 main params, the mean gradient, clipping, AdamW, and a copy back.

    Args:
        model: that is updated.
        option: of torch's AdamW: which kernel.
        clip: largest norm of the gradient; 0 for none.
    """

    def __init__(self, model: Given, option: dict[str, bool], clip: float) -> None:
        self._held, self._clip = dict(model.held), clip
        self._mains = {name: torch.nn.Parameter(param.detach().clone().float()) for name, param in self._held.items()}
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
    """Every implementation of Adam that is installed, against torch's for-loop in float64 on the CPU."""
    start, wanted = _in_float64(place)
    found: dict[str, float] = {}
    absent: list[str] = []
    for name in ("auto", *_adam_sources()):
        model = Given(torch.float32).to(place.device)
        if name in _OPS and not is_compiled(_OPS[name]):
            absent.append(f"{name} (not compiled)")
            continue
        try:
            optimizer = distribute(model, _config(adam=name), param_groups=groups_of(dict(model.held)))
        except DistOptError:
            absent.append(name)
            continue
        place.say(name)
        for step in range(STEPS):
            _train_given(optimizer, model, step, place)
        found[name] = relative_change(values_of(model), wanted, start)
        optimizer.release()
    wrong = {name: apart for name, apart in found.items() if not apart <= _ROUNDED_IN_KERNELS}
    require(not wrong, f"{wrong} of the change from float64, at most {_ROUNDED_IN_KERNELS:g} is rounding; all: {found}")
    said = ", ".join(f"{name} {apart:.1e}" for name, apart in found.items())
    return Found(f"from float64: {said}; not here: {', '.join(absent) or 'none'}", {"apart": found, "absent": absent})


def _adam_sources() -> tuple[str, ...]:
    from megatron_distopt.config import ADAM_SOURCES

    return tuple(ADAM_SOURCES)


def _in_float64(place: Place) -> tuple[list[Tensor], list[Tensor]]:
    """Params at the start and at the end, on the CPU."""
    cpu = torch.device(CPU)
    params = {name: torch.nn.Parameter(param.detach().double()) for name, param in Given(torch.float32).held.items()}
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
    losses = []
    for step in range(2 * STEPS):
        (sample,) = samples(step, place.rank, place.device)
        losses.append([_ours_step(optimizer, ours, [sample]), _ddp_step(adam, theirs, wrapped, sample)])
    apart = max(abs(one / other - 1) for one, other in losses)
    changed = _require_close(values_of(ours), values_of(theirs), start, 1e-3, "params after a training in fp32")
    require(apart <= _ROUNDED, f"a loss is {apart:.3g} from that under DistributedDataParallel: {losses}")
    figures = {"losses": losses, "loss": apart, "params": changed}
    return Found(f"losses of {2 * STEPS} steps apart by at most {apart:.1e}, params by {changed:.1e}", figures)


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


def _ddp_step(adam: torch.optim.Optimizer, model: Net, wrapped: torch.nn.Module, sample: Tensor) -> float:
    adam.zero_grad()
    output = wrapped(sample)
    loss = (output.float() - sample.flip(-1)).square().mean()
    loss.backward()
    adam.step()
    return float(loss.detach())


# Overlaps, graphs, and what is not finite


def overlaps(place: Place) -> Found:
    """Both overlaps, alone and together, against a run without, in bf16 with two microbatches a step."""
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
        require_equal(values, wanted, _numbered(values), f"with overlap of {name} from the run without")
    return Found(f"grads, params and both: {2 * STEPS} steps in bf16 equal to the bit to the run without overlap")


def _trained(place: Place, options: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    model = Net(dtype).to(place.device)
    optimizer = distribute(model, _config(**options))
    for step in range(2 * STEPS):
        _ours_step(optimizer, model, samples(step, place.rank, place.device, 2))
    optimizer.finish_param_gather()
    values = values_of(model)
    optimizer.release()
    return values


def captured(place: Place) -> Found:
    """The step recorded as a graph of the device, against the ordinary one, with a rate that changes."""
    if not _can_record(place.device):
        raise SkipError(f"{place.device.type} records no graphs")
    ordinary, recorded = (_with_rates(place, is_captured) for is_captured in (False, True))
    for step, (one, other) in enumerate(zip(recorded, ordinary, strict=True)):
        require_equal(one, other, _numbered(one), f"after step {step} of a graph")
    return Found(f"{STEPS} steps, of which one graph replayed {STEPS - 1}, equal to the bit to the ordinary ones")


def _can_record(device: torch.device) -> bool:
    return device.type != CPU and bool(import_module("megatron_distopt.device").can_record(device))


def _with_rates(place: Place, is_captured: bool) -> list[list[Tensor]]:
    model = Given(torch.bfloat16).to(place.device)
    config = _config(adam="torch_fused", clip_grad=CLIP_GRAD, nonfinite="skip")
    optimizer = distribute(model, config, param_groups=groups_of(dict(model.held)))
    if is_captured:
        optimizer.capture_step()
    found = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 2.0 ** -(7 + step % 3)  # fp32 holds it
        _train_given(optimizer, model, step, place)
        found.append(values_of(model))
    optimizer.release()
    return found


def nonfinite(place: Place) -> Found:
    """A gradient that is not a number on one rank: what each policy promises."""
    _left_out(place, _config(nonfinite="skip"), torch.bfloat16)
    scale = {"loss_scale": "dynamic", "initial_loss_scale": 64.0, "hysteresis": 1}
    dynamic = _left_out(place, _config(**scale), torch.float16) if _has_half(place) else None
    require(dynamic in (None, 32.0), f"the dynamic loss scale is {dynamic} after one overflow at 64, not 32")
    _raised(place)
    _logged(place)
    return Found(f"skip, raise and log{', dynamic loss scale' if dynamic else '; the device has no fp16'}")


def _has_half(place: Place) -> bool:
    try:
        torch.ones(2, dtype=torch.float16, device=place.device).mul_(2)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


def _poisoned(place: Place, config: DistOptConfig, dtype: torch.dtype) -> tuple[Any, Given, list[Tensor]]:
    """After a good step and one with a NaN on the last rank; and the params between them."""
    model = Given(dtype).to(place.device)
    optimizer = distribute(model, config, param_groups=groups_of(dict(model.held)))
    _backward(optimizer, model, 0, place, poison=False)
    optimizer.step()
    before = values_of(model)
    _backward(optimizer, model, 1, place, poison=place.rank == place.size - 1)
    return optimizer, model, before


def _backward(optimizer: Any, model: Given, step: int, place: Place, poison: bool) -> None:
    optimizer.zero_grad()
    grads = grads_of(step, place.rank, place.device)
    if poison:
        grads["weight"][3, 5] = math.nan
    optimizer.scale_loss(model(grads)).backward()


def _left_out(place: Place, config: DistOptConfig, dtype: torch.dtype) -> float:
    """The bad step changes no param, and the next good one changes them; returns the loss scale in between."""
    optimizer, model, before = _poisoned(place, config, dtype)
    optimizer.step()
    require_equal(
        values_of(model), before, list(model.held), f"after a step that is to be skipped ({config.nonfinite})"
    )
    scale = float(optimizer.scale_loss(torch.ones((), device=place.device)))
    _backward(optimizer, model, 2, place, poison=False)
    optimizer.step()
    after = values_of(model)
    require(not torch.equal(after[0], before[0]), "a good step after a skipped one changes nothing")
    require(all(bool(each.isfinite().all()) for each in after), "a NaN came into the params after a skipped step")
    optimizer.release()
    return scale


def _raised(place: Place) -> None:
    """At once, or at the next step where the host does not wait for the device; params stay as they were."""
    optimizer, model, before = _poisoned(place, _config(nonfinite="raise"), torch.bfloat16)
    try:
        optimizer.step()
        require_equal(values_of(model), before, list(model.held), "after a step whose error comes one step later")
        _backward(optimizer, model, 2, place, poison=False)
        optimizer.step()
    except NonFiniteGradError as error:
        require("weight" in str(error), f"the error does not name the param with the NaN: {error}")
        require_equal(values_of(model), before, list(model.held), "after a step that raised")
        optimizer.release()
        return
    raise WrongError("a NaN in a gradient raised no error in its own step and none in the next")


def _logged(place: Place) -> None:
    optimizer, model, _ = _poisoned(place, _config(nonfinite="log"), torch.bfloat16)
    optimizer.step()
    after = dict(zip(model.held, values_of(model), strict=True))
    require(bool(after["weight"].isnan().any()), "nonfinite='log' did not update with a NaN, as it promises")
    optimizer.release()


# Checkpoints


def resume(place: Place) -> Found:
    """Saved by all ranks and loaded by each smaller number of them, which go on as if there had been no end."""
    wanted, start = _train_and_save(place)
    sizes = rank_counts(place.size)
    for size in sizes:
        group = None if size == place.size else dist.new_group(list(range(size)))
        if place.rank < size:
            values = _loaded(place, group)
            how = f"after {place.size} ranks saved and {size} resumed"
            if _is_exact(size) and _is_exact(place.size):
                require_equal(values, wanted, _numbered(values), how)
            _require_close(values, wanted, start, _ROUNDED_TO_16_BITS, f"params {how}")
        dist.barrier()
    return Found(f"saved by {place.size} and resumed by {', '.join(map(str, sizes))}, equal to a run that did not end")


def _train_and_save(place: Place) -> tuple[list[Tensor], list[Tensor]]:
    """Params at the end of a run that saves in its middle, and at its start."""
    model, optimizer = _of_mean(place, None)
    start = values_of(model)
    for step in range(STEPS):
        _train_mean(optimizer, model, step, place)
    optimizer.save(place.folder / "checkpoint")
    for step in range(STEPS, 2 * STEPS):
        _train_mean(optimizer, model, step, place)
    optimizer.release()
    return values_of(model), start


def _loaded(place: Place, group: Any) -> list[Tensor]:
    model, optimizer = _of_mean(place, group)
    optimizer.load(place.folder / "checkpoint")
    for step in range(STEPS, 2 * STEPS):
        _train_mean(optimizer, model, step, place)
    optimizer.release()
    return values_of(model)


def _of_mean(place: Place, group: Any) -> tuple[Given, Any]:
    model = Given(torch.bfloat16).to(place.device)
    groups = groups_of(dict(model.held))
    return model, distribute(model, _config(adam=_same_adam(place)[0]), param_groups=groups, process_group=group)


def _numbered(values: Sequence[Tensor]) -> list[str]:
    return [f"param {number}" for number in range(len(values))]


def _train_mean(optimizer: Any, model: Given, step: int, place: Place) -> None:
    """All ranks have the same gradients, so that their mean does not depend on how many they are."""
    optimizer.zero_grad()
    model(grads_of(step, 0, place.device)).backward()
    optimizer.step()


def state_dict(place: Place) -> Found:
    """`state_dict` and `load_state_dict` of torch's format, through a copy."""
    model = Given(torch.bfloat16).to(place.device)
    optimizer = distribute(model, _config(), param_groups=groups_of(dict(model.held)))
    for step in range(STEPS):
        _train_given(optimizer, model, step, place)
    kept, weights = _copied(optimizer.state_dict()), _copied(model.state_dict())
    for step in range(STEPS, 2 * STEPS):
        _train_given(optimizer, model, step, place)
    wanted = values_of(model)
    optimizer.release()
    model = Given(torch.bfloat16).to(place.device)
    model.load_state_dict(weights)
    optimizer = distribute(model, _config(), param_groups=groups_of(dict(model.held)))
    optimizer.load_state_dict(kept)
    for step in range(STEPS, 2 * STEPS):
        _train_given(optimizer, model, step, place)
    require_equal(values_of(model), wanted, list(model.held), "after load_state_dict")
    optimizer.release()
    return Found(f"{STEPS} steps after load_state_dict equal to the bit to a run without it")


def _copied(state: Any) -> Any:
    """All tensors in it as they are now."""
    return tree_map(lambda each: each.detach().clone() if isinstance(each, Tensor) else copy.copy(each), state)


CHECKS = (
    Check("collectives", "collectives in place equal those into other tensors", in_place_collectives, least_ranks=2),
    Check("undistributed", "steps equal torch's AdamW on one rank", undistributed),
    Check("ddp", "a training agrees with DistributedDataParallel and AdamW", ddp),
    Check("overlaps", "both overlaps change no bit", overlaps, limit=90),
    Check("nonfinite", "NaNs are skipped, raised or logged as asked", nonfinite),
    Check("captured", "a captured step equals the ordinary one", captured, limit=90),
    Check("resume", "checkpoints resume at every number of ranks", resume, limit=90),
    Check("state_dict", "torch's state_dict resumes", state_dict),
    Check("kernels", "every Adam that is installed agrees with float64", kernels, Where.ALL, limit=150),
)
