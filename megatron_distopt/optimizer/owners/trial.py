"""What an optimizer updates by itself, elements or params: a table for torch's classes, a trial for all others.

[Note: the trial] Small params are stepped in ways that have to come to the same values. An optimizer of elements: whole
tensors, and the flat pieces of them that two ranks would own. An optimizer of params: all of them together, and each by
an optimizer of its own (owned_param.py), with steps in which a param has no gradient. Both: once more with other
gradients for some, while the rest has to stay equal to the bit; and once more with everything saved and loaded in the
middle. A class may look beyond an element only sometimes. So the trial is repeated with gradients of other sizes, since
a norm may matter above a threshold alone; with a learning rate of 1, with which estimates over all params begin to move
(Prodigy); and with gradients that are orthogonal to the rows of the param, which some classes project (AdamP).
tests/optimizer/test_trial.py runs it on classes of all these kinds.
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_distopt.errors import ConfigError
from megatron_distopt.optimizer.inner import Build
from megatron_distopt.optimizer.owners.owned_param import OwnedParam, option_values


class Updates(Enum):
    """What an optimizer updates without looking at anything else."""

    #: Each element: every rank updates the elements of its shard.
    ELEMENTS = "elements"
    #: Each param: one rank updates it, whole.
    PARAMS = "params"


_ELEMENT_WISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
#: torch's classes, by name.
OF_TORCH = {**dict.fromkeys(_ELEMENT_WISE, Updates.ELEMENTS), "Adafactor": Updates.PARAMS, "Muon": Updates.PARAMS}


@dataclass(frozen=True)
class Candidate:
    """A class that may become the inner optimizer."""

    kind: type[Optimizer]
    build: Build  # makes a new one from param groups
    name: str  # for errors
    groups: Sequence[Mapping[str, Any]] = ({},)  # options of its param groups; params in them are not looked at
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True)
class _Regime:
    """The values of one trial."""

    grad_scales: tuple[float, float]  # of the gradients of even and of odd params
    lr: float | None = None  # None for the one that the user chose
    is_orthogonal: bool = False  # each row of a gradient to that row of its param


_REGIMES = (_Regime((1e-3, 10.0)), _Regime((100.0, 1e-2), lr=1.0), _Regime((10.0, 1.0), is_orthogonal=True))
#: For elements. Some classes treat matrices in another way, or tensors of more than 4,096 elements.
_LARGE = ((90, 110), (1400,))
_PIECES = (slice(6001), slice(6001, None))
#: For params, by their number of dimensions; small, as some classes decompose a square matrix for each dimension.
_SMALL: Mapping[int, tuple[tuple[int, ...], ...]] = {
    0: ((), ()),
    1: ((20,), (70,)),
    2: ((24, 10), (12, 32)),
    3: ((3, 10, 8), (2, 5, 20)),
    4: ((8, 4, 3, 3), (5, 6, 2, 2)),
}
_NUM_STEPS, _STEP_OF_SAVE = 12, 7
#: Of gradients, by step: some classes compare a norm with that of the steps before.
_SIZES = (1.0, 1.0, 0.25, 4.0, 0.5)
_WITHOUT_GRAD = {4: 1, 5: 0}  # the number of a param, by step
#: A warm-up may begin with a rate of 0, with which nothing changes.
_LEAST_LR, _USUAL_LR = 1e-4, 1e-2
#: Kernels round the last elements of a tensor in another way, and a root or a quotient of moments spreads that.
_TOLERANCE = 1e-3  # of the largest change
_ROUNDING = 2.0**-24  # half a unit in the last place of a param, in each step

_Grads = Sequence[Tensor | None]  # of one step, by param


class _Differs(Exception):
    """Says how a class looks beyond what it should update by itself."""


class _NothingChanged(Exception):
    """Nothing can be told from a trial."""


def check_updates(kind: type[Optimizer], asked: str) -> Updates | None:
    """What a class of torch's updates; None for another class.

    Raises:
        ConfigError: something else than the user says.
    """
    known = OF_TORCH.get(kind.__name__) if f"{kind.__module__}.".startswith("torch.optim.") else None
    if known is not None and asked not in ("auto", known.value):
        raise ConfigError(f"updates is {asked!r}, and torch's {kind.__name__} updates {known.value}. Leave it out.")
    return known


def find_updates(candidate: Candidate, dims: Collection[int], asked: str = "auto") -> Updates:
    """Finds out what a class updates by itself. It changes nothing outside: no random state, and no optimizer.

    Args:
        candidate: the class.
        dims: numbers of dimensions of the params that it is for; empty where only elements are served.
        asked: the option `updates`; where it says something the trial has to agree.

    Raises:
        ConfigError: neither, something else than the user says, or it cannot be told.
    """
    known = check_updates(candidate.kind, asked)
    if known is Updates.ELEMENTS:
        return known
    reasons = [] if known is None else [f"not elements, because torch's {candidate.kind.__name__} needs whole params"]
    for updates in Updates:
        is_meant = asked in ("auto", updates.value) and known in (None, updates)
        if not is_meant or (updates is Updates.PARAMS and not dims):
            continue
        try:
            with _undisturbed(candidate.device):
                for options in _kinds_of(candidate.groups):
                    if updates is Updates.ELEMENTS:
                        _try_elements(candidate, options, is_told=asked != "auto")
                    else:
                        _try_params(candidate, options, dims)
            return updates
        except _NothingChanged:
            raise ConfigError(
                f"Whether {candidate.name} updates each element by itself cannot be told: trial steps changed nothing. "
                'Say it with updates="elements" or updates="params".'
            ) from None
        except Exception as error:  # noqa: BLE001 -- of any kind; it is told
            reason = str(error) if isinstance(error, _Differs) else f"{type(error).__name__}: {error}"
            reasons.append(f"not {updates.value}, because {reason}")
    raise ConfigError(
        f"Optimizer {candidate.name} cannot be distributed: of what each rank could update by itself it updates "
        f"{'; '.join(reasons)}. Use one that does, such as torch.optim.AdamW or torch.optim.Adafactor."
    )


def _try_elements(candidate: Candidate, options: Mapping[str, Any], *, is_told: bool) -> None:
    start = _random(_LARGE, 0, candidate.device)
    kept = torch.arange(start[0].numel(), device=candidate.device).view(start[0].shape) % 3 > 0
    for regime in _REGIMES:
        chosen = _with_lr(candidate, options, regime, start[0])
        whole = _run(candidate, chosen, start, regime)
        _check_state(whole.optimizer)
        if not is_told and all(map(torch.equal, start, whole.params)):
            raise _NothingChanged
        pieces = [
            _run(candidate, chosen, [_flat(start)[piece]], [[_flat(of_step)[piece]] for of_step in whole.grads])
            for piece in _PIECES
        ]
        joined = torch.split(_flat([piece.params[0] for piece in pieces]), [each.numel() for each in start])
        if not all(map(_is_close, start, whole.params, joined)):
            raise _Differs("it updates a param and pieces of it differently")
        noise = [_random(_LARGE, 100 + step, candidate.device) for step in range(_NUM_STEPS)]
        changed = [
            [torch.where(kept, _flat(grads[:1]).view(kept.shape), 50 * others[0]), 50 * others[1]]
            for grads, others in zip(whole.grads, noise, strict=True)
        ]
        beside_others = _run(candidate, chosen, start, changed)
        found = [{key: _where(value, kept) for key, value in run.kept_for(0).items()} for run in (whole, beside_others)]
        if not _are_same(*found) or any(_numbers(whole.kept_for(0)) != _numbers(piece.kept_for(0)) for piece in pieces):
            raise _Differs("it updates an element differently where others have another gradient")
        _check_resumed(whole, _run(candidate, chosen, start, whole.grads, is_saved=True))


def _try_params(candidate: Candidate, options: Mapping[str, Any], dims: Collection[int]) -> None:
    shapes = [shape for dim in sorted({min(dim, max(_SMALL)) for dim in dims}) for shape in _SMALL[dim]]
    start = _random(shapes, 0, candidate.device)
    for regime in _REGIMES:
        chosen = _with_lr(candidate, options, regime, start[-1])
        together = _run(candidate, chosen, start, regime, _WITHOUT_GRAD)
        written = [
            key
            for key, value in together.first_options.items()
            if repr(value) != repr(option_values(together.optimizer.param_groups[0])[key])
        ]
        if written:
            raise _Differs(f"it changes its option {written[0]!r} for all params of a group")
        alone = [_run_alone(candidate, chosen, start, together.grads, number) for number in range(len(start))]
        if not all(map(_is_close, start, together.params, (each.params[0] for each in alone))):
            raise _Differs("it updates a param differently where it has others beside it")
        noise = [_random(shapes, 100 + step, candidate.device) for step in range(_NUM_STEPS)]
        changed = [
            [grads[0], *(None if grad is None else 50 * new for grad, new in zip(grads[1:], other[1:], strict=True))]
            for grads, other in zip(together.grads, noise, strict=True)
        ]
        if not _are_same(_run(candidate, chosen, start, changed).kept_for(0), together.kept_for(0)):
            raise _Differs("it updates a param differently where others have another gradient")
        for number, one in enumerate(alone):
            _check_resumed(one, _run_alone(candidate, chosen, start, together.grads, number, is_saved=True))


@dataclass(frozen=True, eq=False)
class _Ran:
    """What some steps came to."""

    params: Sequence[Tensor]
    optimizer: Optimizer
    grads: Sequence[_Grads]  # by step
    first_options: Mapping[str, Any]  # of the param group, before the first step

    def kept_for(self, number: int) -> dict[str, Any]:
        """A param, its state and its group, by name."""
        group = self.optimizer.param_groups[0]
        state = self.optimizer.state.get(group["params"][number], {})
        of_group = {f"group {key}": value for key, value in option_values(group).items()}
        return {"param": self.params[number], **dict(state), **of_group}


def _run(
    candidate: Candidate,
    options: Mapping[str, Any],
    start: Sequence[Tensor],
    grads: Sequence[_Grads] | _Regime,
    without: Mapping[int, int] | None = None,
    *,
    is_saved: bool = False,
) -> _Ran:
    """Steps params together, with gradients that are given or drawn."""
    params = [each.clone().requires_grad_() for each in start]
    optimizer = candidate.build([{**copy.deepcopy(dict(options)), "params": params}])
    first, used = dict(option_values(optimizer.param_groups[0])), list[_Grads]()
    for step in range(_NUM_STEPS):
        drawn = _draw(grads, step, params) if isinstance(grads, _Regime) else grads[step]
        used.append([None if (without or {}).get(step) == number else grad for number, grad in enumerate(drawn)])
        for param, grad in zip(params, used[-1], strict=True):
            param.grad = None if grad is None else grad.clone()
        optimizer.step()
        if is_saved and step == _STEP_OF_SAVE:
            group, state = optimizer.param_groups[0], optimizer.state
            optimizer = candidate.build([{**copy.deepcopy(option_values(group)), "params": params}])
            optimizer.state.update({param: copy.deepcopy(state[param]) for param in params if param in state})
    return _Ran([param.detach() for param in params], optimizer, used, first)


def _run_alone(
    candidate: Candidate,
    options: Mapping[str, Any],
    start: Sequence[Tensor],
    grads: Sequence[_Grads],
    number: int,
    *,
    is_saved: bool = False,
) -> _Ran:
    """Steps one of the params as its owner does."""
    options, main = copy.deepcopy(dict(options)), start[number].flatten().clone()
    owned = OwnedParam(start[number].shape, candidate.device, candidate.build, options)
    first = dict(option_values(owned.optimizer.param_groups[0]))
    for step, of_step in enumerate(grads):
        grad = of_step[number]
        owned.step(main, None if grad is None else grad.flatten(), options)
        if is_saved and step == _STEP_OF_SAVE:
            description, tensors = owned.split()
            owned.join(description, {key: tensor.clone() for key, tensor in tensors.items()}, options)
    return _Ran([main.view(start[number].shape)], owned.optimizer, grads, first)


def _check_state(optimizer: Optimizer) -> None:
    """Checkpoints cut what is kept for a param like the param, or hold it once."""
    params = optimizer.param_groups[0]["params"]
    for param, state in optimizer.state.items():
        if not any(param is each for each in params):
            raise _Differs(f"it keeps {param!r} in its state beside that of its params")
        for key, value in state.items():
            is_kept = value is None or isinstance(value, (bool, int, float, str))
            if not is_kept and not (isinstance(value, Tensor) and (value.numel() == 1 or value.shape == param.shape)):
                raise _Differs(f"it keeps {key!r}, which is neither one number nor as large as the param")


def _check_resumed(ran: _Ran, again: _Ran) -> None:
    if not all(map(_is_same, ran.params, again.params)):
        raise _Differs("it goes on differently after its state was saved and loaded")
    for name, value in vars(ran.optimizer).items():
        if isinstance(value, (bool, int, float, str)) and repr(value) != repr(getattr(again.optimizer, name, None)):
            raise _Differs(f"it changes its attribute {name!r}, which no checkpoint holds")


def _is_close(start: Tensor, one: Tensor, other: Tensor) -> bool:
    """Whether two ways came to the same values of one tensor but for rounding."""
    one, other = one.flatten(), other.flatten()
    change, size = (
        (each[each.isfinite()].abs().max() if each.isfinite().any() else 0.0) for each in (one - start.flatten(), start)
    )
    bound = _TOLERANCE * change + _NUM_STEPS * _ROUNDING * size
    return bool((((one - other).abs() <= bound) | (one == other) | (one.isnan() & other.isnan())).all())


def _is_same(one: Any, other: Any) -> bool:
    """Equal to the bit, but for zeros and nans of another kind."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    is_plain = isinstance(one, (bool, int, float, str)) or one is None
    return not is_plain or repr(one) == repr(other)


def _are_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)


def _where(value: Any, kept: Tensor) -> Any:
    return value[kept] if isinstance(value, Tensor) and value.shape == kept.shape else value


def _numbers(kept: Mapping[str, Any]) -> dict[str, str]:
    """What a class keeps once for a param or a group."""
    return {
        key: repr(value.item() if isinstance(value, Tensor) else value)
        for key, value in kept.items()
        if not isinstance(value, Tensor) or value.numel() == 1
    }


def _random(shapes: Iterable[Sequence[int]], seed: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return [
        torch.randn(tuple(shape), generator=generator, device="cpu", dtype=torch.float32).to(device) for shape in shapes
    ]


def _draw(regime: _Regime, step: int, params: Sequence[Tensor]) -> list[Tensor]:
    """Gradients that keep a direction, and not their size."""
    shapes, device = [param.shape for param in params], params[0].device
    directions, noises = (_random(shapes, seed, device) for seed in (1, 2 + step))
    size = _SIZES[step % len(_SIZES)]
    grads = [size * (direction + 0.5 * noise) for direction, noise in zip(directions, noises, strict=True)]
    if regime.is_orthogonal:
        grads = [
            _orthogonal_to(param.detach(), grad) if param.dim() else grad
            for param, grad in zip(params, grads, strict=True)
        ]
    return [grad * regime.grad_scales[number % 2] for number, grad in enumerate(grads)]


def _orthogonal_to(param: Tensor, grad: Tensor) -> Tensor:
    """A gradient without its part along each row of a param, or along a vector."""
    rows, of_grad = (each.reshape(len(each) if each.dim() > 1 else 1, -1) for each in (param, grad))
    along = (rows * of_grad).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True)
    return (of_grad - along * rows).view(grad.shape)


def _flat(tensors: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors if tensor is not None])


def _with_lr(candidate: Candidate, options: Mapping[str, Any], regime: _Regime, param: Tensor) -> dict[str, Any]:
    """Options with a learning rate that changes something."""
    copied = copy.deepcopy(dict(options))
    lr = candidate.build([{**copied, "params": [param.clone().requires_grad_()]}]).param_groups[0].get("lr")
    if regime.lr is not None and isinstance(lr, (float, int, Tensor)):
        return {**copied, "lr": torch.full_like(lr, regime.lr) if isinstance(lr, Tensor) else regime.lr}
    return {**copied, "lr": _USUAL_LR} if isinstance(lr, (int, float)) and lr < _LEAST_LR else copied


def _kinds_of(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Options of param groups; once for groups that differ in a number alone, such as lr: the same code runs."""
    kinds: dict[str, dict[str, Any]] = {}
    for group in groups:
        options = option_values(group)
        kinds[repr([(key, type(value) if type(value) is float else value) for key, value in options.items()])] = options
    return list(kinds.values())


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Random states of torch, Python and numpy, hooks of the user on all optimizers, and warnings stay as they are."""
    numpys = sys.modules["numpy"].random if "numpy" in sys.modules else None
    states = random.getstate(), None if numpys is None else numpys.get_state()
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")  # torch calls them for every optimizer
    hooks = [vars(sys.modules["torch.optim.optimizer"])[name] for name in names]
    saved = [dict(each) for each in hooks]
    forked: dict[str, Any] = (
        {"devices": []} if device.type == "cpu" else {"devices": [device], "device_type": device.type}
    )
    try:
        for each in hooks:
            each.clear()
        with torch.random.fork_rng(**forked), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(states[0])
        if numpys is not None:
            numpys.set_state(states[1])
        for each, before in zip(hooks, saved, strict=True):
            each.update(before)
