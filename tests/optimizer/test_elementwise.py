"""What the trial at start-up accepts and refuses, and that nothing outside of it notices."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import pytorch_optimizer
import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_distopt.errors import ConfigError
from megatron_distopt.optimizer.choice import adopt_instance
from megatron_distopt.optimizer.owners import elementwise
from megatron_distopt.optimizer.owners.elementwise import check_elementwise

Params = Iterable[Tensor]


class _Own(Optimizer):
    """A class of a user: `update` says what is subtracted from a param, times lr."""

    def __init__(self, params: Params, lr: float = 0.01, weight_decay: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **options})

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * self.update(param, param.grad, self.state[param], group))


class Lion(_Own):
    """Chen et al., 2023: element-wise."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        mean = state.setdefault("exp_avg", torch.zeros_like(param))
        update = (0.9 * mean + 0.1 * grad).sign() + group["weight_decay"] * param
        mean.mul_(0.99).add_(grad, alpha=0.01)
        return update


class Lars(_Own):
    """You et al., 2017: a trust ratio of two norms."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        grad = grad + group["weight_decay"] * param
        return grad * (0.02 * param.norm() / (grad.norm() + 1e-9))


class Lamb(_Own):
    """You et al., 2019: the same of Adam's update."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        mean = state.setdefault("exp_avg", torch.zeros_like(param))
        square = state.setdefault("exp_avg_sq", torch.zeros_like(param))
        mean.lerp_(grad, 0.1)
        square.lerp_(grad.square(), 0.01)
        update = mean / (square.sqrt() + 1e-6) + group["weight_decay"] * param
        return update * (param.norm() / update.norm())


class NovoGrad(_Own):
    """Ginsburg et al., 2019: a second moment for a whole param, which is one number."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        norm = grad.norm().square()
        state["exp_avg_sq"] = norm if "exp_avg_sq" not in state else 0.98 * state["exp_avg_sq"] + 0.02 * norm
        return grad / (state["exp_avg_sq"].sqrt() + 1e-8) + group["weight_decay"] * param


class Prodigy(Optimizer):
    """Mishchenko & Defazio, 2023, without the moments of Adam: an estimate of the distance over all params."""

    def __init__(self, params: Params, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-6, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            denominator = 0.0
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(start=param.clone(), sum=torch.zeros_like(param), square=torch.zeros_like(param))
                group["numerator"] += group["d"] * float((param.grad * (state["start"] - param)).sum())
                state["sum"].add_(param.grad, alpha=group["d"])
                denominator += float(state["sum"].abs().sum())
            group["d"] = max(group["d"], group["numerator"] / denominator)
            for param in group["params"]:
                self.state[param]["square"].add_(param.grad.square())
                param.sub_(group["lr"] * group["d"] * param.grad / (self.state[param]["square"].sqrt() + 1e-12))


class Centralized(_Own):
    """Yong et al., 2020: the mean of a gradient's rows is taken out, where there are rows."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return grad - grad.mean(dim=1, keepdim=True) if grad.dim() > 1 else grad


class Clipping(_Own):
    """It clips by the norm of all gradients that it holds."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_([param for group in self.param_groups for param in group["params"]], 1.0)
        super().step()

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return grad


class ByGroup(Lion):
    """A flag of a param group makes it another optimizer."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return grad / grad.norm() if group.get("normalized") else super().update(param, grad, state, group)


class Noisy(Lion):
    """Langevin noise: nobody gets the same values twice."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return grad + torch.randn_like(grad) + random.random() + float(np.random.rand())


ACCEPTED: dict[str, Callable[[Params], Optimizer]] = {
    "Adam": torch.optim.Adam,
    "Adam, amsgrad, maximize": lambda params: torch.optim.Adam(params, amsgrad=True, maximize=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, fused=True),
    "AdamW, one by one": lambda params: torch.optim.AdamW(params, foreach=False),
    "SGD, nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "a warm-up that begins at 0": lambda params: torch.optim.NAdam(params, lr=0.0),
    "Lion": Lion,
    **{
        name: getattr(torch.optim, name)
        for name in ("Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
    },
}

#: And what the error says of it.
REFUSED: dict[str, tuple[Callable[[Params], Optimizer], str]] = {
    **{each.__name__: (each, "differently") for each in (Lars, Lamb, NovoGrad, Prodigy, Centralized, Clipping, Noisy)},
    "Lars while it warms up": (lambda params: Lars(params, lr=0.0), "differently"),
    "LBFGS": (torch.optim.LBFGS, "'closure'"),
    "SparseAdam": (torch.optim.SparseAdam, "dense gradients"),
    "Adafactor": (torch.optim.Adafactor, "'row_var' of [90, 1] for a param of [90, 110]"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_trial_when_every_element_goes_by_itself_then_accepted(name: str) -> None:
    check_elementwise(ACCEPTED[name], name)


@pytest.mark.parametrize("name", REFUSED)
def test_trial_when_elements_depend_on_each_other_then_values_show_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, why = REFUSED[name]
    monkeypatch.setattr(elementwise, "watched_steps", lambda *about: None)
    with pytest.raises(ConfigError) as error:
        check_elementwise(make, name)
    assert str(error.value).startswith(f"Invalid optimizer: {name}")
    assert why in str(error.value)
    assert str(error.value).endswith("Use an element-wise one, such as torch.optim:Adagrad.")


#: By name, an operator of its step in which elements meet.
MEET = {
    "Lars": (Lars, "linalg_vector_norm"),
    "Prodigy": (Prodigy, "sum"),
    "Centralized": (Centralized, "mean"),
    "Noisy": (Noisy, "randn_like"),
    # Both come to the same values as an element-wise one here: rows are not orthogonal, and the rate is too small.
    "AdamP": (lambda params: pytorch_optimizer.AdamP(params, lr=0.01), "linalg_vector_norm"),
    "Prodigy with a small rate": (lambda params: pytorch_optimizer.Prodigy(params, lr=0.01), "dot"),
}


@pytest.mark.parametrize("name", MEET)
def test_trial_when_elements_meet_in_an_operator_then_refused_by_its_name(name: str) -> None:
    make, operator = MEET[name]
    with pytest.raises(ConfigError, match=f"{name}, which calls {operator}") as error:
        check_elementwise(make, name)
    assert str(error.value).endswith("Use an element-wise one, such as torch.optim:Adagrad.")


def test_trial_when_a_step_cannot_be_watched_then_values_decide() -> None:
    class Unwatched(Lion):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if _len_torch_dispatch_stack():
                raise RuntimeError("compiled code takes no other dispatcher")
            super().step()

    check_elementwise(Unwatched, "Unwatched")


def test_instance_when_an_attribute_holds_params_of_the_model_then_the_copy_holds_main_params() -> None:
    class Listing(Lion):
        def __init__(self, params: Params, lr: float = 0.5) -> None:
            super().__init__(params, lr=lr)
            self.every = [param for group in self.param_groups for param in group["params"]]
            self.note = "kept"

    instance = Listing([torch.ones(3, requires_grad=True)])
    instance.note = "changed"
    main = torch.zeros(3)
    built = adopt_instance(instance).build([{"params": [main]}])
    assert built.every[0] is main  # type: ignore[attr-defined]
    assert built.note == "changed"  # type: ignore[attr-defined]


def test_trial_when_one_group_of_an_instance_is_not_elementwise_then_refused() -> None:
    first, second = (torch.zeros(2, 2, requires_grad=True) for _ in range(2))
    adopt_instance(ByGroup([{"params": [first]}, {"params": [second], "lr": 0.5}]))
    with pytest.raises(ConfigError, match="ByGroup"):
        adopt_instance(ByGroup([{"params": [first]}, {"params": [second], "normalized": True}]))


def test_trial_when_an_instance_has_options_of_its_own_then_those_are_tried() -> None:
    class Optional(_Own):
        def __init__(self, params: Params, lr: float = 0.01, trust: bool = False) -> None:
            super().__init__(params, lr=lr, trust=trust)

        def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
            return grad / grad.norm() if group["trust"] else grad

    params = [torch.zeros(2, requires_grad=True)]
    adopt_instance(Optional(params))
    with pytest.raises(ConfigError, match="Optional"):
        adopt_instance(Optional(params, trust=True))


def test_trial_when_done_then_neither_random_states_nor_hooks_nor_the_instance_have_changed() -> None:
    called = []
    hook = register_optimizer_step_post_hook(lambda *about: called.append(about))
    param = torch.ones(3, requires_grad=True)
    instance = Lion([param], lr=0.5)
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    wanted = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    try:
        with pytest.raises(ConfigError):
            check_elementwise(Noisy, "Noisy")
        adopt_instance(instance)
        assert not called
        found = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
        assert torch.equal(found[0], wanted[0])
        assert found[1:] == wanted[1:]
        assert (param.tolist(), dict(instance.state), instance.param_groups[0]["params"]) == ([1.0] * 3, {}, [param])
        check = torch.optim.SGD([param], lr=0.0)
        param.grad = torch.zeros(3)
        check.step()
        assert len(called) == 1
    finally:
        hook.remove()
