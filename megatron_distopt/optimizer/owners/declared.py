"""What an optimizer updates independently, elements or params. A table says it for torch's classes;
the user says it for other classes.

[Note: a declared class] What the user says is checked at the start, on small params. One optimizer
steps all of them, and in addition each part gets an optimizer of its own. A part is a param, or for
a class of elements one of two flat pieces, as two ranks would own them. Both ways must give the
same values, and after its state was saved and loaded a part must continue bit for bit. A learning
rate of 1 and gradients of large and small norm reveal most dependencies on a norm. What a class
does only in situations that small params do not reach is not checked.
tests/optimizer/test_declared.py has classes of all these kinds."""

from __future__ import annotations

import copy
import inspect
import math
import random
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_distopt.device import CPU
from megatron_distopt.errors import ConfigError
from megatron_distopt.optimizer.inner import Build, is_of_torch
from megatron_distopt.optimizer.inner_options import option_text, option_values
from megatron_distopt.optimizer.inner_step import without_step_hooks
from megatron_distopt.optimizer.owners.whole_params import OwnedParam

#: What an optimizer updates independently: elements, so that every rank updates its shard, or whole
#: params, so that one rank updates each param.
ELEMENTS, PARAMS = "elements", "params"
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
OF_TORCH = {**dict.fromkeys(_ELEMENT_WISE, ELEMENTS), "Adafactor": PARAMS, "Muon": PARAMS}
_HOW_TO_TELL = (
    'Write updates="elements" if the new value of an element depends only on the gradient and '
    'state of that element, as in Adam or Lion. Write updates="params" if it depends on the whole '
    "param, as in LAMB, SOAP or Shampoo; that works for both kinds but sends more. In a Megatron "
    "write --distopt-updates or MEGATRON_DISTOPT_UPDATES."
)
_USE_ANOTHER = (
    'If it updates each element independently, write updates="elements". Otherwise use another '
    "class, such as torch.optim.AdamW or torch.optim.Adafactor."
)


@dataclass(frozen=True)
class Candidate:
    """A class that may become the inner optimizer."""

    kind: type[Optimizer]
    build: Build  # makes a new one from param groups
    name: str  # for errors
    # options of its param groups; params in them are ignored
    groups: Sequence[Mapping[str, Any]] = ({},)
    device: torch.device = field(default_factory=lambda: torch.device(CPU))


#: Shapes of params by their number of dimensions. They are small, because some classes decompose a
#: square matrix for each dimension.
_SMALL: Sequence[tuple[int, ...]] = ((), (20,), (24, 10), (3, 10, 8), (8, 4, 3, 3))
#: Shapes for elements: some classes treat tensors of more than 4,096 elements differently.
_LARGE = ((90, 110), (1400,))
#: The size of gradients in each step. Some classes compare a norm with 1 or with earlier norms, or
#: use a gradient only if it is orthogonal to its param, as a tiny one is.
_SIZES = (100.0, 100.0, 25.0, 400.0, 50.0, 1e-12, 100.0, 1.0, 1e-2, 4e-2)
_STEP_WITHOUT_GRAD, _STEP_OF_SAVE = 3, 6
#: Kernels round the last elements of a tensor differently, and a root or a quotient of moments
#: amplifies that.
_TOLERANCE = 1e-3  # of the largest change
_ROUNDING = 2.0**-24  # half a unit in the last place of a param, in each step

_Grads = Sequence[Sequence[Tensor | None]]  # by step and param


class _Differs(Exception):
    """Says how the updates of a class are not independent."""


def known_updates(kind: type[Optimizer], asked: str | None) -> str | None:
    """What the table says about a class of torch's; None for another class.

    Raises:
        ConfigError: if `asked` differs from the table, or if torch's class is not in it.
    """
    if not is_of_torch(kind):
        return None
    known = OF_TORCH.get(kind.__name__)
    if known is None:
        raise ConfigError(
            f"torch's {kind.__name__} cannot be distributed, because it does not update each "
            f"element or each param independently. Use one of {', '.join(OF_TORCH)}."
        )
    if asked not in (None, known):
        raise ConfigError(
            f"updates is {asked!r}, but torch's {kind.__name__} updates {known} independently. "
            "Leave updates out."
        )
    return known


def declared_updates(
    candidate: Candidate, dims: Collection[int], asked: str | None
) -> tuple[str, frozenset[str]]:
    """What a class updates independently, and for elements the keys that it writes into its param
    groups besides options of its constructor. Changes nothing outside.

    Args:
        candidate: the class.
        dims: numbers of dimensions of the params that it will update; empty if only a class of
            elements can be used.
        asked: the option `updates`.

    Raises:
        ConfigError: if the option is missing or wrong for the class.
    """
    name, known = candidate.name, known_updates(candidate.kind, asked)
    updates = known or asked
    if updates is None:
        raise ConfigError(
            f"Optimizer {name} is not one of torch's, so the option updates must say what it "
            f"updates independently. {_HOW_TO_TELL}"
        )
    if updates == PARAMS and not dims:
        raise ConfigError(
            f"Optimizer {name} updates whole params, but only an optimizer that updates each "
            "element independently can be used here. Use another class, such as torch.optim.AdamW."
        )
    written = set[str]()
    try:
        with undisturbed(candidate.device):
            for options in _kinds_of(candidate):
                if known is None:
                    written |= _Check(candidate, options, updates, dims).run()
    except Exception as error:
        reason = str(error) if isinstance(error, _Differs) else f"{type(error).__name__}: {error}"
        remedy = _HOW_TO_TELL if updates == ELEMENTS else _USE_ANOTHER
        if known is not None:
            remedy = "Check the options that it is given."
        raise ConfigError(
            f"Optimizer {name} cannot be distributed with updates={updates!r}: "
            f"{reason.rstrip('.')}. {remedy}"
        ) from error
    return updates, frozenset(written - inspect.signature(candidate.kind).parameters.keys())


def _kinds_of(candidate: Candidate) -> list[dict[str, Any]]:
    """Options of param groups with a learning rate of 1. Groups that differ only in the learning
    rate appear once, because a model may have many."""
    kinds = dict[str, dict[str, Any]]()
    for group in candidate.groups:
        options = copy.deepcopy(option_values(group))
        param = torch.zeros(2, 2, device=candidate.device)
        built = candidate.build([{**options, "params": [param]}])
        options = option_values(built.param_groups[0])
        if options.get("lr") is not None:
            options["lr"] = options["lr"] * 0 + 1.0  # a tensor stays a tensor
        kinds[option_text({**options, "initial_lr": None})] = options
    return list(kinds.values())


class _Check:
    """The check of one class with one kind of options, see [Note: a declared class]."""

    def __init__(
        self, candidate: Candidate, options: Mapping[str, Any], updates: str, dims: Collection[int]
    ) -> None:
        self._build, self._options, self._what = candidate.build, options, updates
        self._is_cut = updates == ELEMENTS
        shapes = list(_LARGE)
        if not self._is_cut:
            shapes = [_SMALL[min(dim, len(_SMALL) - 1)] for dim in sorted(dims)]
            shapes += [shape[::-1] for shape in shapes]
        # Drawn from a CPU generator, whatever the user's defaults and the device are.
        draw = partial(
            torch.randn,
            generator=torch.Generator(device=CPU).manual_seed(0),
            device=CPU,
            dtype=torch.float32,
        )
        self._start = [draw(shape).to(candidate.device) for shape in shapes]
        self._grads = list[list[Tensor | None]]()
        for size in _SIZES:
            noises = [draw(shape).to(candidate.device) for shape in shapes]
            self._grads.append([size * (1 + noise) for noise in noises])
        if not self._is_cut:
            self._grads[_STEP_WITHOUT_GRAD][0] = None
            self._grads[_STEP_WITHOUT_GRAD + 1][-1] = None

    def run(self) -> set[str]:
        """Returns the keys that the class writes into its param groups."""
        params, optimizer = self._together(self._start, self._grads)
        written = self._check_groups(optimizer)
        self._check_state(optimizer)
        parts = list[Tensor]()
        for part in range(len(self._parts(self._start))):
            alone, kept = self._alone(part)
            again, resumed = self._alone(part, is_saved=True)
            if not torch.equal(alone, again):
                raise _Differs("its results differ after its state was saved and loaded")
            for name, value in vars(kept).items():
                is_plain = isinstance(value, (bool, int, float, str))
                if is_plain and value != getattr(resumed, name, None):
                    raise _Differs(
                        f"it changes its attribute {name!r}, which checkpoints do not hold"
                    )
            parts.append(alone)
        joined = torch.split(torch.cat(parts), [param.numel() for param in params])
        for start, param, other in zip(self._start, params, joined, strict=True):
            change = (param - start).abs().max()
            rounding = len(_SIZES) * _ROUNDING * start.abs().max()
            difference = (param.flatten() - other).abs().max()
            if not bool(difference <= _TOLERANCE * change + rounding):  # true for nan, too
                raise _Differs(f"its results differ if it updates only a part of the {self._what}")
        self._check_beside_others(params[0])
        return written

    def _check_beside_others(self, first: Tensor) -> None:
        """Checks that the first param does not change by a bit if other params have other
        gradients. A weak dependence on those would be within the tolerance for parts."""
        changed = list[list[Tensor | None]]()
        for of_first, *others in self._grads:
            changed.append([of_first, *(None if grad is None else -50 * grad for grad in others)])
        beside_others, _ = self._together(self._start, changed)
        if not torch.equal(beside_others[0], first):
            raise _Differs("its update of a param depends on the gradients of other params")

    def _parts(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """The parts: each param, or each of two flat pieces."""
        if not self._is_cut:
            return tensors
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        middle = flat.numel() // 2 + 1  # within a row
        return [flat[:middle], flat[middle:]]

    def _together(self, start: Sequence[Tensor], grads: _Grads) -> tuple[list[Tensor], Optimizer]:
        """Steps all params with one optimizer."""
        params = [param.clone().requires_grad_() for param in start]
        optimizer = self._build([{**copy.deepcopy(self._options), "params": params}])
        for of_step in grads:
            for param, grad in zip(params, of_step, strict=True):
                param.grad = None if grad is None else grad.clone()
            optimizer.step()
        return [param.detach() for param in params], optimizer

    def _alone(self, part: int, *, is_saved: bool = False) -> tuple[Tensor, Optimizer]:
        """Steps one part with an optimizer of its own. With `is_saved` its state is saved and
        loaded in between."""
        start = self._parts(self._start)[part]
        main, options = start.flatten().clone(), copy.deepcopy(self._options)
        owned = OwnedParam(start.shape, start.device, self._build, options)
        for step, of_step in enumerate(self._grads):
            grad = self._parts(of_step)[part]
            # a copy, because a class may change it
            owned.step(main, None if grad is None else grad.flatten().clone(), options)
            if is_saved and step == _STEP_OF_SAVE:
                description, tensors = owned.split()
                copies = {key: tensor.clone() for key, tensor in tensors.items()}
                options = option_values(owned.optimizer.param_groups[0])
                owned.join(description, copies, options)
        return main, owned.optimizer

    def _check_groups(self, optimizer: Optimizer) -> set[str]:
        """Checks that a param group has the same values on each rank, whatever params the rank has.
        Returns the keys that the class writes there."""
        _, new = self._together(self._start, [])
        known, group = option_values(new.param_groups[0]), option_values(optimizer.param_groups[0])
        written = {key for key in group if repr(group[key]) != repr(known.get(key))}
        if not self._is_cut and written & known.keys():
            raise _Differs(f"it changes the options {written}, which all params of a group share")
        _, empty = self._together([], [()] * len(_SIZES))
        if self._is_cut and repr(option_values(empty.param_groups[0])) != repr(group):
            raise _Differs("it writes different values into a param group without params")
        return written | ({"step"} & group.keys())

    def _check_state(self, optimizer: Optimizer) -> None:
        """Checks that all state belongs to a param. In a class of elements, state must have the
        shape of the param, so that it can be cut, or be one number."""
        if strange := set(optimizer.state) - set(optimizer.param_groups[0]["params"]):
            raise _Differs(f"its state holds {strange} in addition to the state of its params")
        for param, state in optimizer.state.items() if self._is_cut else ():
            others = {key: value for key, value in state.items() if not _is_number(value)}
            if state and not others:
                raise _Differs(f"its state of a param holds only numbers: {', '.join(state)}")
            for key, value in others.items():
                is_like = torch.is_tensor(value) and value.shape == param.shape
                if not is_like or value.dtype != param.dtype:
                    raise _Differs(
                        f"its state holds {key!r}, which is neither a finite number nor a tensor "
                        "with the shape and dtype of the param"
                    )


def _is_number(value: object) -> bool:
    """Whether a value is a finite number or a 0-D tensor of one."""
    if isinstance(value, Tensor):
        return not value.dim() and not value.is_complex() and math.isfinite(value)
    return isinstance(value, (int, float)) and math.isfinite(value)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Within it, steps do not change the random states of torch, Python and numpy, call no hooks of
    the user, and show no warnings."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
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
        random.setstate(of_python)
        np.random.set_state(of_numpy)
