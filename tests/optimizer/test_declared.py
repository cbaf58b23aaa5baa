"""A class that is not torch's is declared: what is said of it is checked, and nothing outside
notices that."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_distopt.config import DistOptConfig
from megatron_distopt.errors import CheckpointError, ConfigError
from megatron_distopt.optimizer.choice import adopt_instance
from megatron_distopt.optimizer.owners.declared import OF_TORCH, Candidate, declared_updates
from megatron_distopt.optimizer.owners.given import build_alike
from megatron_distopt.optimizer.owners.whole_params import OwnedParam
from tests.support.published import pytorch_optimizer

Params = Iterable[Tensor]


class _Own(Optimizer):
    """A class of a user: `update` says what is subtracted from a param, times lr."""

    def __init__(
        self, params: Params, lr: float = 0.01, weight_decay: float = 0.1, **options: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **options})

    def update(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(
                        group["lr"] * self.update(param, param.grad, self.state[param], group)
                    )


class Lion(_Own):
    """Chen et al., 2023: element-wise."""

    def update(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> Tensor:
        mean = state.setdefault("exp_avg", torch.zeros_like(param))
        update = (0.9 * mean + 0.1 * grad).sign() + group["weight_decay"] * param
        mean.mul_(0.99).add_(grad, alpha=0.01)
        return update


class Lamb(_Own):
    """You et al., 2019: a trust ratio of two norms."""

    def update(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> Tensor:
        mean = state.setdefault("exp_avg", torch.zeros_like(param))
        square = state.setdefault("exp_avg_sq", torch.zeros_like(param))
        mean.lerp_(grad, 0.1)
        square.lerp_(grad.square(), 0.01)
        update = mean / (square.sqrt() + 1e-6) + group["weight_decay"] * param
        return update * (param.norm() / update.norm())


class NovoGrad(_Own):
    """Ginsburg et al., 2019: a second moment for a whole param, which is one number."""

    def update(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> Tensor:
        norm = grad.norm().square()
        state["exp_avg_sq"] = (
            norm if "exp_avg_sq" not in state else 0.98 * state["exp_avg_sq"] + 0.02 * norm
        )
        return grad / (state["exp_avg_sq"].sqrt() + 1e-8) + group["weight_decay"] * param


class Centralized(_Own):
    """Yong et al., 2020: the mean of a gradient's rows is taken out, where there are rows."""

    def update(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> Tensor:
        return grad - grad.mean(dim=1, keepdim=True) if grad.dim() > 1 else grad


class Clipping(_Own):
    """It clips by the norm of all gradients that it holds."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_(
            [param for group in self.param_groups for param in group["params"]], 1.0
        )
        super().step()

    def update(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> Tensor:
        return grad


class ByGroup(Lion):
    """A flag of a param group makes it another optimizer."""

    def update(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> Tensor:
        return (
            grad / grad.norm()
            if group.get("normalized")
            else super().update(param, grad, state, group)
        )


class Noisy(Lion):
    """Langevin noise: nobody gets the same values twice."""

    def update(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> Tensor:
        return grad + torch.randn_like(grad) + random.random() + float(np.random.rand())


class Counting(_Own):
    """It counts in an attribute, which no checkpoint holds."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        super().step()

    def update(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> Tensor:
        return grad / self.count


def keeping(**more: Callable[[Tensor], Any]) -> Callable[[Params], Optimizer]:
    """A class that keeps a mean and something else, of which `more` says how it begins."""

    class Keeping(_Own):
        def update(
            self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
        ) -> Tensor:
            mean = state.setdefault("exp_avg", torch.zeros_like(param))
            if more.keys() - state.keys() and ("late" not in more or mean.any()):
                state.update({key: make(param) for key, make in more.items()})
            return mean.lerp_(grad, 0.1)

    return Keeping


class WarmingUp(_Own):
    """It counts in its group, and writes a rate there; where there are params alone with
    `only_params`."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["params"] or not group.get("only_params"):
                group["count"] = group.get("count", 0) + 1
                group["lr"] = group.setdefault("base", group["lr"]) * min(1.0, group["count"] / 5)
        super().step()

    def update(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> Tensor:
        return grad


class Still(_Own):
    """It does not begin before its hundredth step."""

    def update(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> Tensor:
        state["count"] = state.get("count", 0) + 1
        state.setdefault("sum", torch.zeros_like(grad)).add_(grad)
        return grad if state["count"] > 100 else torch.zeros_like(grad)


def declared(
    make: Callable[[Params], Optimizer], asked: str | None, dims: Iterable[int] = (1, 2)
) -> tuple[str, frozenset[str]]:
    """What is taken for declared of a class, though its name be in torch's table."""

    class Unknown(Optimizer):
        pass

    return declared_updates(Candidate(Unknown, make, "it"), tuple(dims), asked)


po = pytorch_optimizer
ELEMENTS: dict[str, Callable[[Params], Optimizer]] = {
    "Adam, amsgrad, maximize": lambda params: torch.optim.Adam(params, amsgrad=True, maximize=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, fused=True),
    "a warm-up that begins at 0": lambda params: torch.optim.NAdam(params, lr=0.0),
    "Lion": Lion,
    "a rate in its group": WarmingUp,
    "numbers": keeping(
        count=lambda _: 0, rate=lambda _: 0.1, product=lambda _: torch.ones((), dtype=torch.float64)
    ),
    "ScheduleFreeAdamW": po.ScheduleFreeAdamW,
    "nothing in the first steps": Still,
}
#: Params by themselves, and not elements; and what the error says that refuses them as elements.
PARAMS: dict[str, tuple[Callable[[Params], Optimizer], str]] = {
    "Adafactor": (torch.optim.Adafactor, "'row_var'"),
    "a norm while it warms up": (lambda params: Lamb(params, lr=0.0), "only a part of the"),
    "a trust ratio": (Lamb, "only a part of the"),
    "one number for a param": (NovoGrad, "only numbers"),
    "means of rows": (Centralized, "only a part of the"),
    "a norm that falls": (po.AdaNorm, "'exp_grad_norm'"),
    "rows that are nearly orthogonal to their gradients": (po.AdamP, "only a part of the"),
    "a correction in bf16": (po.StableAdamW, "'kahan_comp'"),
    "rates of layers": (po.LARS, "only a part of the"),
    "lists of matrices": (lambda params: po.SOAP(params, precondition_frequency=2), "'GG'"),
    "one number in a tensor with a dimension": (po.QHAdam, "'beta1_weight'"),
    "a text": (keeping(mode=lambda _: "warm"), "'mode'"),
    "a number that is not finite": (keeping(best=lambda _: float("inf")), "'best'"),
    "values of elements in bf16": (keeping(rounded=torch.Tensor.bfloat16), "'rounded'"),
    "a rate that groups without params have not": (
        lambda params: WarmingUp(params, only_params=True),
        "a param group without params",
    ),
}
#: Of neither kind, and what the error says of it as params.
REFUSED: dict[str, tuple[Callable[[Params], Optimizer], str]] = {
    "an estimate over all params": (po.Prodigy, "changes the options.*'d'"),
    "the norm of all gradients": (Clipping, "only a part of the"),
    "noise": (Noisy, "saved and loaded"),
    "a count in an attribute": (Counting, "saved and loaded"),
    "a closure": (torch.optim.LBFGS, "'closure'"),
    "sparse gradients": (torch.optim.SparseAdam, "dense gradients"),
    "objects in the state": (po.ScalableShampoo, "a checkpoint cannot hold"),
    "state that is of no param": (po.MADGRAD, "state holds .*'k'"),
    "an argument without a default": (po.BSAM, "num_data"),
    "a complex number": (keeping(phase=lambda _: 1j), "state.phase.*a checkpoint cannot hold"),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_when_every_element_goes_by_itself_then_accepted(name: str) -> None:
    assert declared(ELEMENTS[name], "elements")[0] == "elements"


@pytest.mark.parametrize("name", PARAMS)
def test_elements_when_they_depend_on_each_other_or_cannot_be_cut_then_params_alone(
    name: str,
) -> None:
    make, why = PARAMS[name]
    with pytest.raises(ConfigError, match=why) as error:
        declared(make, "elements")
    assert 'updates="params"' in str(error.value)
    rewrites_its_rate = why == "a param group without params"
    if not rewrites_its_rate:
        assert declared(make, "params")[0] == "params"


@pytest.mark.parametrize("asked", ["elements", "params"])
@pytest.mark.parametrize("name", REFUSED)
def test_class_when_it_looks_beyond_a_param_or_cannot_be_saved_then_refused(
    name: str, asked: str
) -> None:
    make, why = REFUSED[name]
    with pytest.raises(ConfigError, match=why if asked == "params" else "elements") as error:
        declared(make, asked)
    assert "cannot be distributed with updates=" in str(error.value)


def test_class_of_elements_when_declared_as_params_then_accepted() -> None:
    for make in (Lion, Still):
        assert declared(make, "params")[0] == "params"


def test_class_when_nothing_is_said_of_it_then_the_error_says_how_to_tell() -> None:
    with pytest.raises(ConfigError) as error:
        declared(Lion, None)
    for words in ('updates="elements"', 'updates="params"', "--distopt-updates", "LAMB"):
        assert words in str(error.value)


def test_class_of_params_when_only_elements_are_served_then_refused() -> None:
    with pytest.raises(ConfigError, match="each element independently"):
        declared(Lamb, "params", dims=())


def test_keys_when_a_class_writes_options_of_its_constructor_then_without_them() -> None:
    class Unknown(WarmingUp):
        def __init__(self, params: Params, lr: float = 0.01) -> None:
            super().__init__(params, lr)

    candidate = Candidate(Unknown, Unknown, "it")
    assert declared_updates(candidate, (), "elements")[1] == {"count", "base"}


def test_table_when_a_class_is_torchs_then_it_counts_and_the_user_may_not_say_otherwise() -> None:
    for name in OF_TORCH:
        kind = getattr(torch.optim, name, None)
        if kind is None:
            continue  # this torch has no such class
        candidate = Candidate(kind, kind, name)
        assert declared_updates(candidate, (2,), None) == (OF_TORCH[name], frozenset())
        (other,) = {"elements", "params"} - {OF_TORCH[name]}
        with pytest.raises(ConfigError, match="Leave updates out"):
            declared_updates(candidate, (2,), other)


def test_owned_param_when_its_state_is_split_and_joined_then_the_same() -> None:
    class Keeping(_Own):
        def update(
            self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
        ) -> Tensor:
            state.update(
                GG=[grad @ grad.T, []],
                pair=(1, "text"),
                step=torch.tensor(3),
                none=None,
                by={0: grad + 1},
            )
            state["by_columns"] = grad.t()  # its product with another matrix rounds as it lies
            group["count"] = 5
            return grad

    one, other = (OwnedParam((2, 3), torch.device("cpu"), Keeping, {"lr": 0.1}) for _ in range(2))
    one.step(torch.ones(6), torch.arange(6.0), {"lr": 0.1})
    description, tensors = one.split()
    in_file = {name: tensor.contiguous() for name, tensor in tensors.items()}
    other.join(json.loads(json.dumps(description)), in_file, {"lr": 0.1})
    assert other.split()[0] == description
    assert other.split()[1]["state.by_columns"].stride() == (1, 3)
    assert all(torch.equal(tensor, other.split()[1][name]) for name, tensor in tensors.items())
    assert other.has_state
    before = other.split()
    with pytest.raises(KeyError):
        other.join(description, {}, {"lr": 0.1})
    assert other.split()[0] == before[0]
    one.optimizer.state[one.optimizer.param_groups[0]["params"][0]]["a"] = [object()]
    with pytest.raises(CheckpointError, match=r"a object in 'state\.a\.0'"):
        one.split()


class Helper:
    """An argument of a constructor that the options do not tell."""


def test_instance_when_an_argument_is_not_in_its_defaults_then_refused() -> None:
    class Helped(Lion):
        def __init__(
            self, params: Params, lr: float = 0.5, helper: object = None, scale: float = 1.0
        ) -> None:
            super().__init__(params, lr=lr)
            self.lists = [{"params": self.param_groups[0]["params"], "helper": helper}]
            self.scale = scale

    params = [torch.ones(3, requires_grad=True)]
    built = build_alike(Helped(params, scale=2.0))([{"params": [torch.zeros(3)]}])
    assert built.scale == 2.0  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"attribute 'lists'.*Helper"):
        build_alike(Helped(params, helper=Helper()))


def test_instance_when_it_is_distributed_shampoo_then_refused_by_name_with_its_own_way() -> None:
    class DistributedShampoo(Lion):
        """Meta's is called so."""

    with pytest.raises(ConfigError, match="DDPDistributedConfig"):
        adopt_instance(DistributedShampoo([torch.ones(3, requires_grad=True)]))


def test_instance_when_an_attribute_holds_params_of_the_model_then_the_copy_holds_main_params() -> (
    None
):
    class Listing(Lion):
        def __init__(self, params: Params, lr: float = 0.5) -> None:
            super().__init__(params, lr=lr)
            self.every = [param for group in self.param_groups for param in group["params"]]
            self.note = "kept"

    instance = Listing([torch.ones(3, requires_grad=True)])
    instance.note = "changed"
    main = torch.zeros(3)
    built = adopt_instance(instance, config=DistOptConfig(updates="elements")).build(
        [{"params": [main]}]
    )
    assert built.every[0] is main  # type: ignore[attr-defined]
    assert built.note == "changed"  # type: ignore[attr-defined]


def test_instance_when_one_of_its_groups_is_not_elementwise_then_refused() -> None:
    first, second = (torch.zeros(2, 2, requires_grad=True) for _ in range(2))
    said = DistOptConfig(updates="elements")
    adopt_instance(ByGroup([{"params": [first]}, {"params": [second], "lr": 0.5}]), config=said)
    with pytest.raises(ConfigError, match="ByGroup"):
        adopt_instance(
            ByGroup([{"params": [first]}, {"params": [second], "normalized": True}]), config=said
        )


def test_check_when_done_then_neither_random_states_nor_hooks_nor_the_instance_have_changed() -> (
    None
):
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
            declared(Noisy, "elements")
        adopt_instance(instance, config=DistOptConfig(updates="elements"))
        assert not called
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
        assert torch.equal(after[0], wanted[0])
        assert after[1:] == wanted[1:]
        assert (param.tolist(), dict(instance.state), instance.param_groups[0]["params"]) == (
            [1.0] * 3,
            {},
            [param],
        )
        check = torch.optim.SGD([param], lr=0.0)
        param.grad = torch.zeros(3)
        check.step()
        assert len(called) == 1
    finally:
        hook.remove()
