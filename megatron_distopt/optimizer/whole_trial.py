"""Whether an optimizer updates each param by itself, as a matrix owner needs it: tried, because no name says it.

[Note: the trial of whole params] Small params are stepped together by one optimizer, as torch would, and each by one of
its own, as ranks would (owned_param.py). A class that looks across params, such as one that clips the norm of all
gradients, computes other values then: gradients differ ten thousandfold; or an operator is seen in which params meet
([Note: operators of a trial] in trial_ops.py). In one step a param has no gradient. In the
middle of a second run of the latter kind everything is written down and read back, which shows whether a checkpoint can
hold what the class keeps; it has to go on to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.errors import CheckpointError, ConfigError, refusal
from megatron_distopt.optimizer.elementwise import is_close, kinds_of, undisturbed, watched_steps, with_usable_lr
from megatron_distopt.optimizer.inner import Build
from megatron_distopt.optimizer.owned_param import OwnedParam

__all__ = ["check_each_param"]

#: Two for each number of dimensions; small, as some classes decompose a square matrix for each dimension.
_SHAPES: Mapping[int, tuple[tuple[int, ...], ...]] = {
    0: ((), ()),
    1: ((20,), (70,)),
    2: ((24, 10), (12, 32)),
    3: ((3, 10, 8), (2, 5, 20)),
    4: ((8, 4, 3, 3), (5, 6, 2, 2)),
}
_NUM_STEPS, _SEED = 12, 0
#: In this step the first param has no gradient; after that one all is written down.
_STEP_WITHOUT, _STEP_OF_SAVE = 5, 7
#: Of gradients, by param.
_GRAD_SCALES = (1e-3, 10.0)
_REMEDY = "Use one that does, such as torch.optim.Adafactor, or torch.optim.AdamW"


def check_each_param(
    build: Build,
    name: str,
    groups: Iterable[Mapping[str, Any]] = ({},),
    dims: Collection[int] = (1, 2),
    device: torch.device | None = None,
) -> None:
    """Checks that an optimizer updates each param by itself, see [Note: the trial of whole params].

    It changes nothing outside, as `check_elementwise`.

    Args:
        build: makes a new optimizer from param groups.
        name: of it, for the error.
        groups: options of its param groups; params in them are not looked at.
        dims: numbers of dimensions of the params that it is for.
        device: on which it runs; None for the CPU.

    Raises:
        ConfigError: the optimizer does not, it cannot be stepped, or it keeps what no file holds.
    """
    shapes = [shape for dim in sorted({min(dim, max(_SHAPES)) for dim in dims}) for shape in _SHAPES[dim]]
    place = device or torch.device("cpu")
    with undisturbed(place):
        for options in kinds_of(groups):
            _Trial(build, name, options, shapes, place).run(_SEED)


class _Trial:
    """One run of the trial."""

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

    def run(self, seed: int) -> None:
        start, grads = self._values(seed)
        try:
            param = torch.zeros(max(self._shapes, key=len), device=self._device)
            self._options = with_usable_lr(self._build, self._options, param)
            together = self._together(start, grads)
            apart = self._apart(start, grads, is_saved=False)
            resumed = self._apart(start, grads, is_saved=True)
        except (ConfigError, CheckpointError) as error:
            raise ConfigError(f"optimizer {self._name}: {error}") from error
        except Exception as error:
            got = f"{self._name} ({type(error).__name__}: {error})"
            rule = "update each param by itself, from dense gradients or none, and without a closure"
            raise ConfigError(refusal("optimizer", got, rule, _REMEDY)) from error
        if not all(is_close(*each, _NUM_STEPS) for each in zip(start, together, apart, strict=True)):
            got = f"{self._name}, which updates a param differently where it has others beside it"
            raise ConfigError(refusal("optimizer", got, "update each param by itself", _REMEDY))
        watch = watched_steps(self._build, [each.clone() for each in start], grads, self._new_options())
        if watch is not None and watch.mixing:
            got = f"{self._name}, in whose {watch.mixing} params meet"
            raise ConfigError(refusal("optimizer", got, "update each param by itself", _REMEDY))
        if not all(torch.equal(*pair) for pair in zip(apart, resumed, strict=True)):
            got = f"{self._name}, which goes on differently after its state was saved and loaded"
            raise ConfigError(refusal("optimizer", got, "keep everything in its state", _REMEDY))

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
        grads[_STEP_WITHOUT][0] = None
        return start, grads

    def _random(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu").to(self._device)

    def _new_options(self) -> dict[str, Any]:
        return copy.deepcopy(dict(self._options))

    def _together(self, start: Sequence[Tensor], grads: Sequence[Sequence[Tensor | None]]) -> list[Tensor]:
        params = [each.clone().requires_grad_() for each in start]
        optimizer = self._build([{**self._new_options(), "params": params}])
        before = _what_is_outside(optimizer)
        for of_step in grads:
            for param, grad in zip(params, of_step, strict=True):
                param.grad = None if grad is None else grad.clone()
            optimizer.step()
        after = _what_is_outside(optimizer)
        changed = sorted(key for key in before if before[key] != after.get(key))
        if changed:
            got, rule = f"{self._name}, which changes its {changed[0]}", "keep everything in its state"
            raise ConfigError(refusal("optimizer", got, rule, _REMEDY))
        return [param.detach() for param in params]

    def _apart(
        self, start: Sequence[Tensor], grads: Sequence[Sequence[Tensor | None]], *, is_saved: bool
    ) -> list[Tensor]:
        options = self._new_options()
        mains = [each.clone().view(-1) for each in start]
        owned = [OwnedParam(each.shape, self._device, self._build, options) for each in start]
        for step, of_step in enumerate(grads):
            for each, main, grad in zip(owned, mains, of_step, strict=True):
                each.step(main, None if grad is None else grad.clone().view(-1), options)
                if is_saved and step == _STEP_OF_SAVE:
                    description, tensors = each.split()
                    each.join(description, {key: tensor.clone() for key, tensor in tensors.items()}, options)
        return [main.view(each.shape) for main, each in zip(mains, start, strict=True)]


def _what_is_outside(optimizer: Any) -> dict[str, str]:
    """Attributes and options of an optimizer, which no checkpoint has, and a user may read."""
    attributes = {f"attribute {key!r}": value for key, value in vars(optimizer).items() if key not in _ATTRIBUTES}
    options = {f"option {key!r}": value for key, value in optimizer.param_groups[0].items() if key != "params"}
    return {key: repr(value) for key, value in {**attributes, **options}.items()}


#: What torch's class has, and changes itself.
_ATTRIBUTES = ("state", "param_groups", "defaults")
