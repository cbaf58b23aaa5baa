"""Optimizers of whole params with the constructor of a Megatron's Adam, in whose place they are put."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytorch_optimizer
import torch

__all__ = ["Adafactor", "Preconditioned", "Soap", "tried_once"]


@contextlib.contextmanager
def tried_once() -> Iterator[None]:
    """In the block a class is tried when it is built for the first time: a trial takes longer than the trainings here.

    Trials themselves are tested in tests/hosts/test_torch_whole_params.py.
    """
    from megatron_distopt.optimizer.owners import whole_params

    check, tried = whole_params.check_each_param, dict[str, bool]()

    def once(build: Any, name: str, *args: Any) -> bool:
        if name not in tried:
            tried[name] = check(build, name, *args)
        return tried[name]

    with mock.patch.object(whole_params, "check_each_param", once):
        yield


class Adafactor(torch.optim.Adafactor):
    """Rows and columns for a matrix."""

    def __init__(self, params: Any, lr: float, weight_decay: float, **adams: Any) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)


class Soap(pytorch_optimizer.SOAP):
    """Two preconditioners for a matrix, which it turns every other step."""

    def __init__(self, params: Any, lr: float, weight_decay: float, **adams: Any) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, precondition_frequency=2)


class Factor:
    """What `Preconditioned` keeps of the gradients of a param: an object, as some classes put into their state."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.left = torch.zeros(numel, numel, device=device)
        self.name = "left"

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.left.copy_(state_dict["left"])


class Preconditioned(torch.optim.Optimizer):
    """Built as Distributed Shampoo is: it fills its state in the constructor, keeps views of params and objects in
    attributes, and counts updates once for a group."""

    def __init__(
        self, params: Any, lr: float = 0.125, weight_decay: float = 0.0, helper: object = None, **adams: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._lists = [self._list_of(group["params"], helper) for group in self.param_groups]

    def _list_of(self, params: list[torch.Tensor], helper: object) -> dict[str, Any]:
        count, rows = torch.tensor(0), []
        for param in params:
            view = param.detach().view(len(param) if param.dim() else 1, -1)
            self.state[param] = {"factor": Factor(len(view), param.device), "step": count}
            rows.append((view, self.state[param]["factor"]))
        return {"count": count, "rows": rows, "params": params, "grads": (), "helper": helper}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, lists in zip(self.param_groups, self._lists, strict=True):
            lists["grads"] = [param.grad for param in lists["params"]]
            if all(grad is None for grad in lists["grads"]):
                continue
            lists["count"] += 1
            pairs = zip(lists["rows"], lists["grads"], strict=True)
            for view, factor, grad in ((*row, grad.view(row[0].shape)) for row, grad in pairs if grad is not None):
                factor.left.add_(grad @ grad.T)
                update = factor.left @ grad / (1e-6 + factor.left.norm()) + group["weight_decay"] * view
                view.sub_(update, alpha=group["lr"] / float(lists["count"]))
