"""Options of an optimizer that our own choice has not: the update is that of the class that the
user built.

Exercises session/announce.py.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_distopt import DistOptConfig, distribute
from megatron_distopt.errors import ConfigError
from megatron_distopt.hosts.megatron.inner_optimizers import inner_for
from megatron_distopt.hosts.megatron_2023.translate import merge_config, with_host_flags

Build = Callable[[Any], torch.optim.Optimizer]
VALUES, GRADS = (
    torch.linspace(-1, 1, 12),
    [torch.linspace(1, -2, 12), torch.linspace(0.5, 3, 12), torch.ones(12)],
)


class AdamW(torch.optim.Optimizer):
    """Of a user's own, with another formula than the class of that name in torch."""

    def __init__(self, params: Any, lr: float = 0.25) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad.sign(), alpha=group["lr"])


OWN: dict[str, Build] = {
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "dampening": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    "maximize": lambda params: torch.optim.AdamW(params, lr=0.1, maximize=True),
    "maximize in a group": lambda params: torch.optim.AdamW(
        [{"params": params, "maximize": True}], lr=0.1
    ),
    "own class": AdamW,
}
#: What a user says of the class.
SAID = {"own class": "elements"}


def _trained(param: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    for grad in GRADS:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


def _plain(build: Build) -> Tensor:
    param = VALUES.clone().requires_grad_()
    return _trained(param, build([param]))


def _chosen(base: torch.optim.Optimizer, options: DistOptConfig) -> Any:
    config = merge_config(options, base, 0.0, False, None)
    return inner_for(base, with_host_flags(config, base, Namespace(), "cpu"), "cpu")


@pytest.mark.parametrize("name", OWN)
def test_base_optimizer_of_2023_when_it_has_options_of_its_own_then_it_is_used_itself(
    name: str,
) -> None:
    base = OWN[name]([VALUES.clone().requires_grad_()])
    choice, groups = _chosen(base, DistOptConfig(updates=SAID.get(name)))
    main = VALUES.clone()
    inner = choice.build([{**group, "params": [main]} for group in groups])
    assert torch.equal(_trained(main, inner), _plain(OWN[name]))


def test_base_optimizer_of_2023_when_it_has_options_that_the_named_adam_has_not_then_refused() -> (
    None
):
    base = OWN["amsgrad"]([VALUES.clone().requires_grad_()])
    with pytest.raises(ConfigError, match=r"AdamW has amsgrad=True.*Drop these options"):
        _chosen(base, DistOptConfig(adam="torch_foreach"))


@pytest.mark.parametrize("name", OWN)
def test_given_optimizer_when_it_has_options_of_its_own_then_the_update_is_its_own(
    name: str, one_rank: None
) -> None:
    model = nn.Linear(12, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(VALUES)
    given = OWN[name](list(model.parameters()))
    optimizer = distribute(model, given, accelerator="torch", updates=SAID.get(name))
    for grad in GRADS:
        model.weight.grad = grad.clone().view(1, 12)
        optimizer.step()
    # The fused kernel rounds otherwise in the last place, at each of three steps.
    torch.testing.assert_close(
        model.weight.detach().view(-1), _plain(OWN[name]), rtol=1e-6, atol=1e-6
    )
