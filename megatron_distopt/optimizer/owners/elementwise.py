"""Whether an optimizer updates each element by itself, as a shard needs it: tried, because no name says it.

[Note: the trial] Two small tensors are stepped whole, and a second time as the flat pieces that two ranks would own, by
an optimizer for each rank. A class that uses a row, a norm, a trust ratio or an estimate over all params then computes
other values: the gradients of the two tensors differ ten thousandfold. The pieces are cut through the middle of a
tensor, and larger than the 4,096 elements below which some classes keep their state in another form. What a class keeps
for a param has to be as large as the param, or one number: checkpoints cut it like the param. What values do not show,
operators do: [Note: operators of a trial] in trial_ops.py.
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_distopt.errors import ConfigError, refusal
from megatron_distopt.optimizer.inner import Build
from megatron_distopt.optimizer.owners.trial_ops import OperatorWatch

#: One of them a matrix, so that a class that treats matrices differently shows it.
_SHAPES = ((90, 110), (1400,))
_NUMELS = [torch.Size(shape).numel() for shape in _SHAPES]
#: Of params and of gradients, by tensor.
_PARAM_SCALES, _GRAD_SCALES = (1e-3, 1e-2), (1e-3, 10.0)
#: Elements of the first rank's piece.
_CUT = 6001
_NUM_STEPS, _SEEDS = 8, (0, 1)
#: Some classes only begin their state in the first step.
_NUM_WATCHED = 3
#: See `with_usable_lr`.
_LEAST_LR, _LR = 1e-4, 1e-2
#: Of the largest change: kernels round the last elements of a tensor in another way than those before, a few units in
#: the last place, and a square root or a quotient of moments spreads that; a norm of another piece changes everything.
_TOLERANCE = 1e-3
#: A param itself is rounded once in every step, by half a unit in the last place.
_ROUNDING = 2.0**-24
_REMEDY = "Use an element-wise one, such as torch.optim:Adagrad"
#: What torch calls for every optimizer of the process.
_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def check_elementwise(
    build: Build, name: str, groups: Iterable[Mapping[str, Any]] = ({},), device: torch.device | None = None
) -> None:
    """Checks that an optimizer updates each element by itself, see [Note: the trial].

    It changes nothing outside: no random state, and no optimizer that exists.

    Args:
        build: makes a new optimizer from param groups.
        name: of it, for the error.
        groups: options of its param groups; params in them are not looked at.
        device: on which it runs; None for the CPU.

    Raises:
        ConfigError: the optimizer does not, or it cannot be stepped.
    """
    with undisturbed(device or torch.device("cpu")):
        for each in kinds_of(groups):
            _watch(build, name, each, _values(_SEEDS[0], device))  # first, as it takes less time
            for seed in _SEEDS:
                _try(build, name, each, _values(seed, device))


def kinds_of(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Options of param groups, without their params; once for those that are updated by the same code."""
    return list({repr(_kind_of(group)): _usable(group) for group in groups}.values())


def _kind_of(group: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Groups that differ in a number alone, such as lr, are updated by the same code."""
    return [(key, type(value) if type(value) is float else value) for key, value in _usable(group).items()]


def _usable(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a param group, without its params."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _values(seed: int, device: torch.device | None) -> tuple[Tensor, list[Tensor]]:
    """Flat params, and their gradients by step, which keep a direction."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    shape = (_NUM_STEPS + 2, sum(_NUMELS))
    start, direction, *noise = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    grads = [(direction + 0.5 * each) * _by_element(_GRAD_SCALES) for each in noise]
    return (start * _by_element(_PARAM_SCALES)).to(device or "cpu"), [grad.to(device or "cpu") for grad in grads]


def _by_element(scales: Sequence[float]) -> Tensor:
    parts = zip(_NUMELS, scales, strict=True)
    return torch.cat([torch.full((numel,), scale, dtype=torch.float32, device="cpu") for numel, scale in parts])


def _try(build: Build, name: str, options: Mapping[str, Any], values: tuple[Tensor, Sequence[Tensor]]) -> None:
    start, grads = values
    shares = [start.numel()], [_CUT, start.numel() - _CUT]
    try:
        whole, pieces = (
            torch.cat([_stepped(build, name, options, *_share(start, grads, span)) for span in _spans(share)])
            for share in shares
        )
    except ConfigError:
        raise
    except Exception as error:
        got = f"{name} ({type(error).__name__}: {error})"
        rule = "update each element by itself, from dense gradients and without a closure"
        raise ConfigError(refusal("optimizer", got, rule, _REMEDY)) from error
    ways = zip(_cut(start), _cut(whole), _cut(pieces), strict=True)
    if not all(is_close(before, one, other, _NUM_STEPS) for before, one, other in ways):
        got = f"{name}, which updates a param and pieces of it differently"
        raise ConfigError(refusal("optimizer", got, "update each element by itself", _REMEDY))


def _watch(build: Build, name: str, options: Mapping[str, Any], values: tuple[Tensor, Sequence[Tensor]]) -> None:
    start, *grads = (_small(each) for each in (values[0], *values[1][:_NUM_WATCHED]))
    watch = watched_steps(build, start, grads, options)
    if watch is not None and watch.not_elementwise:
        got = f"{name}, which calls {watch.not_elementwise}"
        raise ConfigError(refusal("optimizer", got, "update each element by itself", _REMEDY))


def _small(flat: Tensor) -> list[Tensor]:
    """Copies of a few elements, in shapes with as many dimensions as those of the trial."""
    return [flat[:12].view(3, 4).clone(), flat[-5:].clone()]


def watched_steps(
    build: Build, params: Sequence[Tensor], grads: Sequence[Sequence[Tensor | None]], options: Mapping[str, Any]
) -> OperatorWatch | None:
    """Steps an optimizer and watches its operators.

    Args:
        build: makes it from param groups.
        params: are changed.
        grads: by step and param.
        options: of the param group.

    Returns:
        None where it cannot be watched, as where it compiles its step.
    """
    for param in params:
        param.requires_grad_()
    watch = OperatorWatch(params)
    try:
        with watch:
            optimizer = build([{**copy.deepcopy(dict(options)), "params": list(params)}])
            for of_step in grads:
                for param, grad in zip(params, of_step, strict=True):
                    param.grad = grad
                watch.mark_grads(params)
                optimizer.step()
    except Exception:  # noqa: BLE001 -- without being watched it could be stepped
        return None
    return watch


def is_close(start: Tensor, whole: Tensor, pieces: Tensor, num_steps: int) -> bool:
    """Whether two ways came to the same values of one tensor; a nan never is the same.

    Args:
        start: before the first step.
        whole, pieces: after the last one.
        num_steps: that were made.
    """
    bound = _TOLERANCE * (whole - start).abs().max() + num_steps * _ROUNDING * start.abs().max()
    return bool(((whole - pieces).abs() <= bound).all())


def _spans(numels: Sequence[int]) -> list[slice]:
    stops = [sum(numels[: index + 1]) for index in range(len(numels))]
    return [slice(stop - numel, stop) for stop, numel in zip(stops, numels, strict=True)]


def _share(start: Tensor, grads: Sequence[Tensor], span: slice) -> tuple[Tensor, list[Tensor]]:
    return start[span], [grad[span] for grad in grads]


def _stepped(build: Build, name: str, options: Mapping[str, Any], start: Tensor, grads: Sequence[Tensor]) -> Tensor:
    """Flat params after all steps."""
    params = [part.requires_grad_() for part in _cut(start)]
    optimizer = build([{**with_usable_lr(build, options, start), "params": params}])
    for grad in grads:
        for param, part in zip(params, _cut(grad), strict=True):
            param.grad = part
        optimizer.step()
    _check_state(optimizer, name, params)
    return torch.cat([param.detach().flatten() for param in params])


def with_usable_lr(build: Build, options: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """Copies of options with which an optimizer changes params; one whose warm-up begins at 0 would change nothing.

    Args:
        build: makes the optimizer, whose own lr counts where the options have none.
        options: of a param group.
        param: that the optimizer can take; stays as it is.
    """
    copied = copy.deepcopy(dict(options))
    lr = build([{**copied, "params": [param.clone()]}]).param_groups[0].get("lr")
    return {**copied, "lr": _LR} if isinstance(lr, (int, float)) and lr < _LEAST_LR else copied


def _cut(flat: Tensor) -> list[Tensor]:
    """Copies: tensors of `_SHAPES` where all elements are there, or else one flat piece."""
    if flat.numel() < sum(_NUMELS):
        return [flat.clone()]
    return [part.reshape(shape).clone() for part, shape in zip(torch.split(flat, _NUMELS), _SHAPES, strict=True)]


def _check_state(optimizer: Optimizer, name: str, params: Iterable[Tensor]) -> None:
    for param in params:
        for key, value in optimizer.state.get(param, {}).items():
            if not _is_kept(value, param):
                shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                got = f"{name}, which keeps {key!r} of {shape} for a param of {list(param.shape)}"
                rule = "keep one number, or one for each element, for a param"
                raise ConfigError(refusal("optimizer", got, rule, _REMEDY))


def _is_kept(value: object, param: Tensor) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 or value.shape == param.shape
    return value is None or isinstance(value, (bool, int, float, str))


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Random states of torch, Python and numpy, hooks of the user on all optimizers, and warnings stay as they are."""
    devices = [] if device.type == "cpu" else [device]
    numpys = sys.modules["numpy"].random if "numpy" in sys.modules else None
    states = random.getstate(), None if numpys is None else numpys.get_state()
    kind = {} if device.type == "cpu" else {"device_type": device.type}
    hooks = {name: getattr(sys.modules["torch.optim.optimizer"], name, {}) for name in _GLOBAL_HOOKS}
    kept = {name: dict(each) for name, each in hooks.items()}
    try:
        for each in hooks.values():
            each.clear()
        with torch.random.fork_rng(devices, **kind), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(states[0])
        if numpys is not None:
            numpys.set_state(states[1])
        for name, each in hooks.items():
            each.update(kept[name])
