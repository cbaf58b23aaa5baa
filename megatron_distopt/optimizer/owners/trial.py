"""What an optimizer updates by itself, elements or params: a table for torch's classes, a trial for
all others.

[Note: the trial] Small params are stepped in ways that have to come to the same values. An
optimizer of elements: whole tensors, and the flat pieces of them that two ranks would own. An
optimizer of params: all of them together, and each by an optimizer of its own (whole_params.py),
with steps in which a param has no gradient. Both: once more with other gradients for some, while
the rest has to stay equal to the bit; and once more with everything saved and loaded in the middle.
A class may look beyond an element only sometimes. So the trial is repeated with gradients of other
sizes, since a norm may matter above a threshold alone; with a learning rate of 1, with which
estimates over all params begin to move (Prodigy); and with gradients that are orthogonal to the
rows of the param, which some classes project (AdamP). tests/optimizer/test_trial.py runs it on
classes of all these kinds."""

from __future__ import annotations

import copy
import inspect
import math
import random
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_distopt.device import CPU
from megatron_distopt.errors import ConfigError
from megatron_distopt.optimizer.inner import Build, option_values, without_step_hooks
from megatron_distopt.optimizer.owners.whole_params import OwnedParam


class Updates(Enum):
    """What an optimizer updates without looking at anything else."""

    ELEMENTS = "elements"  # every rank updates the elements of its shard
    PARAMS = "params"  # each is updated whole, by one rank


_ELEMENT_WISE = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
#: torch's classes, by name.
OF_TORCH = {
    **dict.fromkeys(_ELEMENT_WISE, Updates.ELEMENTS),
    "Adafactor": Updates.PARAMS,
    "Muon": Updates.PARAMS,
}


@dataclass(frozen=True)
class Candidate:
    """A class that may become the inner optimizer."""

    kind: type[Optimizer]
    build: Build  # makes a new one from param groups
    name: str  # for errors
    # options of its param groups; params in them are not looked at
    groups: Sequence[Mapping[str, Any]] = ({},)
    device: torch.device = field(default_factory=lambda: torch.device(CPU))


@dataclass(frozen=True)
class _Regime:
    """The values of one trial."""

    grad_scales: tuple[float, float]  # of the gradients of even and of odd params
    lr: float | None = None  # None for the one that the user chose
    is_orthogonal: bool = False  # each row of a gradient to that row of its param


_REGIMES = (
    _Regime((1e-3, 10.0)),
    _Regime((100.0, 1e-2), lr=1.0),
    _Regime((10.0, 1.0), is_orthogonal=True),
)
_Shapes = Sequence[tuple[int, ...]]
#: For elements: some classes treat matrices in another way, or tensors of more than 4,096 elements.
_LARGE: _Shapes = ((90, 110), (1400,))
#: Where they are cut in two.
_PIECE = 0.53
#: By their number of dimensions; small, as some classes decompose a square matrix for each
#: dimension.
_SMALL: Mapping[int, _Shapes] = {
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
#: Kernels round the last elements of a tensor in another way, and a root or a quotient of moments
#: spreads that.
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
    known = (
        OF_TORCH.get(kind.__name__) if f"{kind.__module__}.".startswith("torch.optim.") else None
    )
    if known is not None and asked not in ("auto", known.value):
        raise ConfigError(
            f"updates is {asked!r}, and torch's {kind.__name__} updates {known.value}. Leave it "
            "out."
        )
    return known


def find_updates(candidate: Candidate, dims: Collection[int], asked: str = "auto") -> Updates:
    """Finds out what a class updates by itself. It changes nothing outside: no random state, and no
    optimizer.

    Args:
        candidate: the class.
        dims: numbers of dimensions of the params that it is for; empty where only elements are
            served.
        asked: the option `updates`, with which the trial has to agree.

    Raises:
        ConfigError: neither, something else than the user says, or it cannot be told.
    """
    known = check_updates(candidate.kind, asked)
    if known is Updates.ELEMENTS:
        return known
    reasons = (
        []
        if known is None
        else [f"not elements, because torch's {candidate.kind.__name__} needs whole params"]
    )
    of_dims = [
        shape for dim in sorted({min(dim, max(_SMALL)) for dim in dims}) for shape in _SMALL[dim]
    ]
    for updates in Updates:
        is_meant = asked in ("auto", updates.value) and known in (None, updates)
        if not is_meant or (updates is Updates.PARAMS and not dims):
            continue
        # Those of elements begin with small ones, with which most other classes differ.
        all_shapes = [_SMALL[2], _LARGE] if updates is Updates.ELEMENTS else [of_dims]
        try:
            with undisturbed(candidate.device):
                for options, regime, shapes in product(
                    _kinds_of(candidate.groups), _REGIMES, all_shapes
                ):
                    trial = _Trial(candidate, options, regime, _random(shapes, 0, candidate.device))
                    if updates is Updates.ELEMENTS:
                        trial.check_elements(is_told=asked != "auto")
                    else:
                        trial.check_params()
            return updates
        except _NothingChanged:
            raise ConfigError(
                f"Whether {candidate.name} updates each element by itself cannot be told: trial "
                "steps changed nothing. "
                'Say it with updates="elements" or updates="params".'
            ) from None
        except Exception as error:  # noqa: BLE001 -- of any kind; it is told
            reason = (
                str(error) if isinstance(error, _Differs) else f"{type(error).__name__}: {error}"
            )
            reasons.append(f"not {updates.value}, because {reason}")
    raise ConfigError(
        f"Optimizer {candidate.name} cannot be distributed: of what each rank could update by "
        f"itself it updates {'; '.join(reasons)}. Use one that does, such as torch.optim.AdamW or "
        "torch.optim.Adafactor."
    )


def written_keys(candidate: Candidate) -> frozenset[str]:
    """What a class writes into its param groups by itself, such as a count; no options of its
    constructor."""
    with undisturbed(candidate.device):
        start = _random([(3,)], 0, candidate.device)
        trial = _Trial(candidate, candidate.groups[0], _REGIMES[0], start)
        before, after = (trial.run(start, grads).options for grads in ((), None))
    written = {
        key for key, value in after.items() if repr(value) != repr(before.get(key)) or key == "step"
    }
    return frozenset(written - inspect.signature(candidate.kind).parameters.keys())


class _Trial:
    """Steps of one class with one kind of options, from the same params every time."""

    def __init__(
        self, candidate: Candidate, options: Mapping[str, Any], regime: _Regime, start: list[Tensor]
    ) -> None:
        self._build, self._regime, self._start = candidate.build, regime, start
        group = copy.deepcopy(dict(options))
        first = self._build(
            [{**group, "params": [start[0].clone().requires_grad_()]}]
        ).param_groups[0]
        self._options = option_values(first)  # with a learning rate that changes something
        lr = first.get("lr")
        if regime.lr is not None and isinstance(lr, (float, int, Tensor)):
            self._options["lr"] = (
                torch.full_like(lr, regime.lr) if isinstance(lr, Tensor) else regime.lr
            )
        elif isinstance(lr, (int, float)) and lr < _LEAST_LR:
            self._options["lr"] = _USUAL_LR

    def check_elements(self, *, is_told: bool) -> None:
        start = self._start
        whole = self.run(start)
        if not is_told and all(map(torch.equal, start, whole.params)):
            raise _NothingChanged
        of_first_step = self.run(start, whole.grads[:1])
        for ran in (of_first_step, whole):
            _check_state(ran.optimizer, is_cut=True)
        if of_first_step.keys != whole.keys:
            raise _Differs(f"it keeps {of_first_step.keys ^ whole.keys} from a later step on alone")
        for key, value in whole.options.items():
            is_written = repr(value) != repr(self._options.get(key))
            if is_written and not (value is None or isinstance(value, str) or _is_number(value)):
                raise _Differs(f"it writes {value!r} as {key!r} into its param group")
        if repr(self.run([], [()] * _NUM_STEPS).options) != repr(whole.options):
            raise _Differs("it writes other options into a param group without params")
        cut = int(_PIECE * _flat(start).numel())
        pieces = [
            self.run([_flat(start)[piece]], [[_flat(of_step)[piece]] for of_step in whole.grads])
            for piece in (slice(cut), slice(cut, None))
        ]
        joined = torch.split(
            _flat([piece.params[0] for piece in pieces]), [param.numel() for param in start]
        )
        if not all(map(_is_close, start, whole.params, joined)):
            raise _Differs("it updates a param and pieces of it differently")
        some = (torch.arange(start[0].numel(), device=start[0].device) % 3 > 0).view(start[0].shape)
        self._check_others(
            whole, [some, *(torch.zeros_like(param, dtype=torch.bool) for param in start[1:])]
        )
        if any(whole.numbers_of_first() != piece.numbers_of_first() for piece in pieces):
            raise _Differs("it counts differently for a param and pieces of it")
        _check_resumed(whole, self.run(start, whole.grads, is_saved=True))

    def check_params(self) -> None:
        start = self._start
        together = self.run(start, without=_WITHOUT_GRAD)
        _check_state(together.optimizer, is_cut=False)
        for key, value in self._options.items():
            if repr(value) != repr(together.optimizer.param_groups[0][key]):
                raise _Differs(f"it changes its option {key!r} for all params of a group")
        alone = [self._run_alone(number, together.grads) for number in range(len(start))]
        if not all(map(_is_close, start, together.params, (owned.params[0] for owned in alone))):
            raise _Differs("it updates a param differently where it has others beside it")
        first = [
            torch.full_like(param, number == 0, dtype=torch.bool)
            for number, param in enumerate(start)
        ]
        self._check_others(together, first)
        for number, owned in enumerate(alone):
            _check_resumed(owned, self._run_alone(number, together.grads, is_saved=True))

    def _check_others(self, ran: _Ran, kept: Sequence[Tensor]) -> None:
        """Steps again with other gradients where `kept` is false; the first param has to stay the
        same where it is."""
        changed = list[_Grads]()
        for step, grads in enumerate(ran.grads):
            others = _random([param.shape for param in kept], 100 + step, kept[0].device)
            of_step = zip(grads, kept, others, strict=True)
            changed.append(
                [
                    None if grad is None else grad.where(stays, 50 * other)
                    for grad, stays, other in of_step
                ]
            )
        if not _is_same(self.run(self._start, changed).of_first(kept[0]), ran.of_first(kept[0])):
            raise _Differs(
                "it updates the same gradients differently where others have another gradient"
            )

    def run(
        self,
        start: Sequence[Tensor],
        grads: Sequence[_Grads] | None = None,
        without: Mapping[int, int] | None = None,
        *,
        is_saved: bool = False,
    ) -> _Ran:
        """Steps params together, with gradients that are given or drawn; in some steps without one
        of them."""
        params = [param.clone().requires_grad_() for param in start]
        optimizer = self._build([{**copy.deepcopy(self._options), "params": params}])
        used = list[_Grads]()
        for step in range(_NUM_STEPS if grads is None else len(grads)):
            drawn = _draw(self._regime, step, params) if grads is None else grads[step]
            used.append(
                [
                    None if (without or {}).get(step) == number else grad
                    for number, grad in enumerate(drawn)
                ]
            )
            for param, grad in zip(params, used[-1], strict=True):
                param.grad = None if grad is None else grad.clone()
            optimizer.step()
            if is_saved and step == _STEP_OF_SAVE:
                group, state = optimizer.param_groups[0], optimizer.state
                optimizer = self._build([{**copy.deepcopy(option_values(group)), "params": params}])
                optimizer.state.update(
                    {param: copy.deepcopy(state[param]) for param in params if param in state}
                )
        return _Ran([param.detach() for param in params], optimizer, used)

    def _run_alone(self, number: int, grads: Sequence[_Grads], *, is_saved: bool = False) -> _Ran:
        """Steps one of the params as its owner does."""
        start, options = self._start[number], copy.deepcopy(self._options)
        main = start.flatten().clone()
        owned = OwnedParam(start.shape, start.device, self._build, options)
        for step, of_step in enumerate(grads):
            grad = of_step[number]
            owned.step(main, None if grad is None else grad.flatten(), options)
            if is_saved and step == _STEP_OF_SAVE:
                description, tensors = owned.split()
                owned.join(
                    description, {key: tensor.clone() for key, tensor in tensors.items()}, options
                )
        return _Ran([main.view(start.shape)], owned.optimizer, grads)


@dataclass(frozen=True, eq=False)
class _Ran:
    """What some steps came to."""

    params: Sequence[Tensor]
    optimizer: Optimizer
    grads: Sequence[_Grads]  # by step

    def of_first(self, kept: Tensor | None = None) -> dict[str, Any]:
        """The first param, its state and its group, by name; of tensors as large as `kept` the
        elements where it is."""
        state = self.optimizer.state.get(self.optimizer.param_groups[0]["params"][0], {})
        found = {
            "param": self.params[0],
            **state,
            **{f"group {key}": value for key, value in self.options.items()},
        }
        return {
            key: value[kept]
            if isinstance(value, Tensor) and kept is not None and value.shape == kept.shape
            else value
            for key, value in found.items()
        }

    @property
    def keys(self) -> set[str]:
        """Of the state of all params."""
        return {key for state in self.optimizer.state.values() for key in state}

    @property
    def options(self) -> dict[str, Any]:
        return option_values(self.optimizer.param_groups[0])

    def numbers_of_first(self) -> dict[str, str]:
        """What the class keeps once for the first param and its group."""
        return {
            key: repr(value.item() if isinstance(value, Tensor) else value)
            for key, value in self.of_first().items()
            if not isinstance(value, Tensor) or value.numel() == 1
        }


def _check_state(optimizer: Optimizer, *, is_cut: bool) -> None:
    """Checks that all state is that of a param, and where that is cut, that it can be cut like the
    param or kept once.

    Else no way of saving holds it exactly.
    """
    for owner, state in optimizer.state.items():
        if not any(owner is param for param in optimizer.param_groups[0]["params"]):
            raise _Differs(f"it keeps {owner!r} in its state beside that of its params")
        is_like = {
            key: isinstance(value, Tensor) and _form(value) == _form(owner)
            for key, value in state.items()
        }
        if is_cut and state and not any(is_like.values()):
            raise _Differs(
                f"it keeps nothing but numbers, {', '.join(state)}, with which no state begins"
            )
        for key, value in state.items() if is_cut else ():
            if not is_like[key] and not _is_number(value):
                raise _Differs(
                    f"it keeps {key!r}, which is neither one finite number nor of shape and dtype "
                    "of the param"
                )


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _is_number(value: object) -> bool:
    """A finite one, by itself or in a tensor without dimensions."""
    is_real = (
        not value.dim() and not value.is_complex()
        if isinstance(value, Tensor)
        else isinstance(value, (int, float))
    )
    return is_real and math.isfinite(value)  # type: ignore[arg-type]


def _check_resumed(ran: _Ran, again: _Ran) -> None:
    if not all(map(_is_same, ran.params, again.params)):
        raise _Differs("it goes on differently after its state was saved and loaded")
    for name, value in vars(ran.optimizer).items():
        if isinstance(value, (bool, int, float, str)) and repr(value) != repr(
            getattr(again.optimizer, name, None)
        ):
            raise _Differs(f"it changes its attribute {name!r}, which no checkpoint holds")


def _is_close(start: Tensor, one: Tensor, other: Tensor) -> bool:
    """Whether two ways came to the same values of one tensor but for rounding."""
    one, other = one.flatten(), other.flatten()
    change, size = (
        (each[each.isfinite()].abs().max() if each.isfinite().any() else 0.0)
        for each in (one - start.flatten(), start)
    )
    bound = _TOLERANCE * change + _NUM_STEPS * _ROUNDING * size
    return bool(
        (((one - other).abs() <= bound) | (one == other) | (one.isnan() & other.isnan())).all()
    )


def _is_same(one: Any, other: Any) -> bool:
    """Equal to the bit, but for zeros and nans of another kind."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(
            ((one == other) | (one.isnan() & other.isnan())).all()
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    is_plain = isinstance(one, (bool, int, float, str)) or one is None
    return not is_plain or repr(one) == repr(other)


def _random(shapes: Iterable[Sequence[int]], seed: int, device: torch.device) -> list[Tensor]:
    """In fp32 from the CPU's generator, whatever the user's defaults and the device are."""
    generator = torch.Generator(device=CPU).manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "device": CPU, "dtype": torch.float32}
    return [torch.randn(tuple(shape), **options).to(device) for shape in shapes]


def _draw(regime: _Regime, step: int, params: Sequence[Tensor]) -> list[Tensor]:
    """Gradients that keep a direction, and not their size."""
    directions, noises = (
        _random([param.shape for param in params], seed, params[0].device) for seed in (1, 2 + step)
    )
    size = _SIZES[step % len(_SIZES)]
    grads = [
        size * (direction + 0.5 * noise)
        for direction, noise in zip(directions, noises, strict=True)
    ]
    for number, param in enumerate(params if regime.is_orthogonal else ()):
        if param.dim():  # without its part along each row of the param, or along a vector
            rows, of_grad = (
                each.reshape(len(each) if each.dim() > 1 else 1, -1)
                for each in (param, grads[number])
            )
            along = (rows * of_grad).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True)
            grads[number] = (of_grad - along * rows).detach().view(param.shape)
    return [grad * regime.grad_scales[number % 2] for number, grad in enumerate(grads)]


def _flat(tensors: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors if tensor is not None])


def _kinds_of(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Options of param groups; once for groups that differ in a number alone, such as lr: the same
    code runs."""
    kinds: dict[str, dict[str, Any]] = {}
    for group in groups:
        options = option_values(group)
        kinds[
            repr(
                [
                    (key, type(value) if type(value) is float else value)
                    for key, value in options.items()
                ]
            )
        ] = options
    return list(kinds.values())


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Random states of torch, Python and numpy, hooks of the user on all optimizers, and warnings
    stay as they are."""
    states = random.getstate(), np.random.get_state()
    devices = [] if device.type == CPU else [device]
    try:
        with (
            torch.random.fork_rng(devices, device_type=device.type),
            torch.enable_grad(),
            without_step_hooks(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
