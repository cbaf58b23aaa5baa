"""Whether an optimizer updates each param by itself, as a matrix owner needs it: tried, because no name says it.

[Note: the trial of whole params] Small params are stepped together by one optimizer, as torch would, and each by one of
its own, as ranks would (owned_param.py). A class that looks across params, such as one that clips the norm of all
gradients, computes other values then: gradients differ ten thousandfold; or an operator is seen in which params meet
([Note: operators of a trial] in trial_ops.py). In two steps a param has no gradient. In the middle of a second run of
the latter kind everything is written down and read back, which shows whether a checkpoint can hold what the class
keeps; it has to go on to the bit, and its attributes have to become what they are without that.

[Note: counts of a group] A class may count updates once for a param group, as Distributed Shampoo does. An optimizer
for each param counts the same as long as all params of a group have a gradient in a step, or none has. So where the
runs differ, they are repeated without the steps in which a param has no gradient. If they agree then, such steps are
refused while training.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from megatron_distopt.errors import CheckpointError, ConfigError, refusal
from megatron_distopt.optimizer.inner import Build
from megatron_distopt.optimizer.owners.elementwise import is_close, kinds_of, undisturbed, watched_steps, with_usable_lr
from megatron_distopt.optimizer.owners.owned_param import OwnedParam
from megatron_distopt.optimizer.owners.reachable import other_attribute

#: By step and param.
_Grads = Sequence[Sequence[Tensor | None]]

#: Two for each number of dimensions; small, as some classes decompose a square matrix for each dimension.
_SHAPES: Mapping[int, tuple[tuple[int, ...], ...]] = {
    0: ((), ()),
    1: ((20,), (70,)),
    2: ((24, 10), (12, 32)),
    3: ((3, 10, 8), (2, 5, 20)),
    4: ((8, 4, 3, 3), (5, 6, 2, 2)),
}
_NUM_STEPS, _SEED = 12, 0
#: In these steps one param has no gradient, by step; after that one all is written down.
_WITHOUT, _STEP_OF_SAVE = {4: 1, 5: 0}, 7
#: Of gradients, by param.
_GRAD_SCALES = (1e-3, 10.0)
_BY_ITSELF, _ALL_IN_STATE = "update each param by itself", "keep everything in its state"
_REMEDY = "Use one that does, such as torch.optim.Adafactor, or torch.optim.AdamW"


def check_each_param(
    build: Build,
    name: str,
    groups: Iterable[Mapping[str, Any]] = ({},),
    dims: Collection[int] = (1, 2),
    device: torch.device | None = None,
) -> bool:
    """Checks that an optimizer updates each param by itself, see [Note: the trial of whole params].

    It changes nothing outside, as `check_elementwise`.

    Args:
        build: makes a new optimizer from param groups.
        name: of it, for the error.
        groups: options of its param groups; params in them are not looked at.
        dims: numbers of dimensions of the params that it is for.
        device: on which it runs; None for the CPU.

    Returns:
        Whether some params of a group may be without a gradient in a step, see [Note: counts of a group].

    Raises:
        ConfigError: the optimizer does not, it cannot be stepped, or it keeps what no file holds.
    """
    shapes = [shape for dim in sorted({min(dim, max(_SHAPES)) for dim in dims}) for shape in _SHAPES[dim]]
    place = device or torch.device("cpu")
    with undisturbed(place):
        served = [_Trial(build, name, options, shapes, place).run(_SEED) for options in kinds_of(groups)]
    return all(served)


@dataclass(frozen=True, eq=False)
class _Runs:
    """What two runs came to.

    Args:
        together: params, all of them in one optimizer.
        apart: params, each in one of its own.
        optimizers: the latter.
    """

    together: Sequence[Tensor]
    apart: Sequence[Tensor]
    optimizers: Sequence[Optimizer]

    def is_by_itself(self, start: Sequence[Tensor]) -> bool:
        """Whether both came to the same."""
        return all(is_close(*each, _NUM_STEPS) for each in zip(start, self.together, self.apart, strict=True))


class _Trial:
    """See the file."""

    def __init__(
        self,
        build: Build,
        name: str,
        options: Mapping[str, Any],
        shapes: Sequence[tuple[int, ...]],
        device: torch.device,
    ) -> None:
        self._build, self._name, self._shapes, self._device = build, name, shapes, device
        self._options: Mapping[str, Any] = options

    def run(self, seed: int) -> bool:
        """Returns what `check_each_param` returns."""
        start, grads = self._values(seed)
        with self._explained():
            param = torch.zeros(max(self._shapes, key=len), device=self._device)
            self._options = with_usable_lr(self._build, self._options, param)
            runs = self._runs(start, grads)
            serves_absent = runs.is_by_itself(start)
            if not serves_absent:
                grads = [of_step for of_step in grads if all(grad is not None for grad in of_step)]
                runs = self._runs(start, grads)
        self._check_by_itself(start, grads, runs)
        self._check_resumed(start, grads, runs)
        return serves_absent

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (ConfigError, CheckpointError) as error:
            raise ConfigError(f"optimizer {self._name}: {error}") from error
        except Exception as error:
            got = f"{self._name} ({type(error).__name__}: {error})"
            rule = "update each param by itself, from dense gradients or none, and without a closure"
            raise ConfigError(refusal("optimizer", got, rule, _REMEDY)) from error

    def _runs(self, start: Sequence[Tensor], grads: _Grads) -> _Runs:
        return _Runs(self._together(start, grads), *self._apart(start, grads, is_saved=False))

    def _check_by_itself(self, start: Sequence[Tensor], grads: _Grads, runs: _Runs) -> None:
        if not runs.is_by_itself(start):
            self._refuse("which updates a param differently where it has others beside it", _BY_ITSELF)
        watch = watched_steps(self._build, [each.clone() for each in start], grads, self._new_options())
        if watch is not None and watch.mixing:
            self._refuse(f"in whose {watch.mixing} params meet", _BY_ITSELF)

    def _check_resumed(self, start: Sequence[Tensor], grads: _Grads, runs: _Runs) -> None:
        with self._explained():
            resumed, optimizers = self._apart(start, grads, is_saved=True)
        for pair in zip(runs.optimizers, optimizers, strict=True):
            other = other_attribute(*pair)
            if other is not None:
                self._refuse(f"which changes its attribute {other!r}", _ALL_IN_STATE)
        if not all(torch.equal(*pair) for pair in zip(runs.apart, resumed, strict=True)):
            self._refuse("which goes on differently after its state was saved and loaded", _ALL_IN_STATE)

    def _refuse(self, what: str, rule: str) -> NoReturn:
        raise ConfigError(refusal("optimizer", f"{self._name}, {what}", rule, _REMEDY))

    def _values(self, seed: int) -> tuple[list[Tensor], list[list[Tensor | None]]]:
        """Params, and their gradients by step, which keep a direction."""
        generator = torch.Generator(device="cpu").manual_seed(seed)
        start = [self._random(shape, generator) for shape in self._shapes]
        directions = [self._random(shape, generator) for shape in self._shapes]
        grads: list[list[Tensor | None]] = [
            [
                (direction + 0.5 * self._random(direction.shape, generator)) * _GRAD_SCALES[number % 2]
                for number, direction in enumerate(directions)
            ]
            for _ in range(_NUM_STEPS)
        ]
        for step, number in _WITHOUT.items():
            grads[step][number] = None
        return start, grads

    def _random(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu").to(self._device)

    def _new_options(self) -> dict[str, Any]:
        return copy.deepcopy(dict(self._options))

    def _together(self, start: Sequence[Tensor], grads: _Grads) -> list[Tensor]:
        params = [each.clone().requires_grad_() for each in start]
        optimizer = self._build([{**self._new_options(), "params": params}])
        before = _options_of(optimizer)
        for of_step in grads:
            for param, grad in zip(params, of_step, strict=True):
                param.grad = None if grad is None else grad.clone()
            optimizer.step()
        after = _options_of(optimizer)
        changed = sorted(key for key in before if before[key] != after.get(key))
        if changed:
            self._refuse(f"which changes its option {changed[0]!r}", _ALL_IN_STATE)
        return [param.detach() for param in params]

    def _apart(self, start: Sequence[Tensor], grads: _Grads, *, is_saved: bool) -> tuple[list[Tensor], list[Optimizer]]:
        options = self._new_options()
        mains = [each.clone().view(-1) for each in start]
        owned = [OwnedParam(each.shape, self._device, self._build, options) for each in start]
        for step, of_step in enumerate(grads):
            for each, main, grad in zip(owned, mains, of_step, strict=True):
                each.step(main, None if grad is None else grad.clone().view(-1), options)
                if is_saved and step == _STEP_OF_SAVE:
                    description, tensors = each.split()
                    each.join(description, {key: tensor.clone() for key, tensor in tensors.items()}, options)
        params = [main.view(each.shape) for main, each in zip(mains, start, strict=True)]
        return params, [each.optimizer for each in owned]


def _options_of(optimizer: Optimizer) -> dict[str, str]:
    """What a user may read and no checkpoint has once the class itself changes it."""
    return {key: repr(value) for key, value in optimizer.param_groups[0].items() if key != "params"}
