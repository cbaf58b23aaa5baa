"""A param that one rank updates as a whole, by an optimizer of its own.

[Note: an optimizer a param] The optimizer of a param sees one step for every step of the run, as if the model had no
other param. So also a class that counts in its param group counts right, and one that looks across params is found out
by the trial in whole_trial.py. Main param and gradient are there while it steps: the param has memory of its own no
longer than that.

[Note: state from the constructor] A class that fills its state in the constructor, as Distributed Shampoo does, may
keep views of param and state elsewhere. So for such a class the param is always the same memory, which is resized to
nothing between steps, and a loaded state is written into the one that is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_distopt.optimizer.inner import Build
from megatron_distopt.optimizer.owners.owned_state import join_state, split_state

#: Parts of what is kept: of the param, and what the class has written into its param group.
_STATE, _GROUP = "state", "group"


class OwnedParam:
    """See the file.

    Args:
        shape: of the param.
        device: where it is updated.
        build: makes the optimizer from param groups.
        options: of its param group.
    """

    def __init__(self, shape: Sequence[int], device: torch.device, build: Build, options: Mapping[str, Any]) -> None:
        self._shape, self._device, self._build = tuple(shape), device, build
        self.begin(options)

    def begin(self, options: Mapping[str, Any]) -> None:
        """Begins anew, without state."""
        self._given = _without_params(options)
        self._param = Parameter(torch.zeros(self._shape, dtype=torch.float32, device=self._device))
        self.optimizer = self._build([{**self._given, "params": [self._param]}])
        self._is_filled = bool(self.optimizer.state)
        self._grad = torch.zeros_like(self._param) if self._is_filled else torch.zeros(0)
        self._let_go()

    @property
    def numel(self) -> int:
        """Elements of the param."""
        return self._param.numel()

    @torch.no_grad()
    def step(self, main: Tensor, grad: Tensor | None, options: Mapping[str, Any]) -> None:
        """One step of the optimizer.

        Args:
            main: fp32 1-D, all of the param; changed in place.
            grad: fp32 1-D; may be changed. None where the param has none in this step.
            options: of the param group, as they are now.
        """
        self._take_options(options)
        self._lend(main.view(self._shape), None if grad is None else grad.view(self._shape))
        try:
            self.optimizer.step()
            if self._param.data_ptr() != main.data_ptr():  # memory of its own, or another tensor of the class
                main.copy_(self._param.detach().reshape(-1))
        finally:
            self._let_go()

    def _take_options(self, options: Mapping[str, Any]) -> None:
        """Those that changed; what the class itself has written into its group stays."""
        now = _without_params(options)
        changed = {key: value for key, value in now.items() if not _is_same(value, self._given.get(key, _MISSING))}
        self.optimizer.param_groups[0].update(changed)
        self._given = now

    def _lend(self, main: Tensor, grad: Tensor | None) -> None:
        """Values for a step, see [Note: state from the constructor]."""
        if self._is_filled:
            self._resize(self._param.nbytes)
            self._param.copy_(main)
            grad = None if grad is None else self._grad.copy_(grad)
        else:
            self._param.data = main
        self._param.grad = grad

    def _let_go(self) -> None:
        """A shape without memory takes the place of the values."""
        self._param.grad = None
        if self._is_filled:
            self._resize(0)
        else:
            self._param.data = torch.zeros((), dtype=torch.float32, device=self._device).expand(self._shape)

    def _resize(self, nbytes: int) -> None:
        """Of the memory of the param, which a class may have views of, and of its gradient."""
        for tensor in (self._param, self._grad):
            tensor.untyped_storage().resize_(nbytes)

    @property
    def has_state(self) -> bool:
        """Whether anything is kept."""
        return bool(self.optimizer.state.get(self._param)) or bool(self._written())

    def _written(self) -> dict[str, Any]:
        """What the class has written into its param group, beside options."""
        group = _without_params(self.optimizer.param_groups[0])
        known = {**self.optimizer.defaults, **self._given}
        return {key: value for key, value in group.items() if key not in known}

    def split(self) -> tuple[Any, dict[str, Tensor]]:
        """All that is kept; see `split_state`.

        Raises:
            CheckpointError: something of it fits into no file.
        """
        return split_state({_STATE: dict(self.optimizer.state.get(self._param, {})), _GROUP: self._written()})

    def join(self, description: Any, tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> None:
        """Takes back what `split` returned.

        Args:
            description, tensors: see `join_state`.
            options: of the param group.
        """
        fresh = OwnedParam(self._shape, self._device, self._build, options)
        present = {_STATE: fresh.optimizer.state.get(fresh._param)}
        kept = join_state(description, tensors, self._device, present)
        if kept[_STATE]:
            fresh.optimizer.state[fresh._param] = kept[_STATE]
        fresh.optimizer.param_groups[0].update(kept[_GROUP])
        vars(self).update(vars(fresh))  # only now: nothing is lost where they do not belong together

    @property
    def state_nbytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(tensor.nbytes for tensor in self.split()[1].values())


_MISSING = object()


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _is_same(one: Any, other: Any) -> bool:
    if one is other or torch.is_tensor(one) or torch.is_tensor(other):
        return one is other
    return type(one) is type(other) and bool(one == other)
