"""Whoever constructs megatron-core's distributed optimizer gets ours: copied factories, wrapped ones, those below.

All of it runs in one spawn of two ranks.
"""

from __future__ import annotations

import contextlib
import functools
import logging.handlers
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distopt.errors import ConfigError, DistOptError, HostMismatchError
from tests.support.cases import Case
from tests.support.core_version import core_mentions
from tests.support.refusals import assert_mentions
from tests.support.spawn import run_ranks

CASE = Case("distopt", dp=2, steps=3, num_microbatches=1)
#: Then a copied factory builds the host's HybridDeviceOptimizer first.
OFFLOADS = core_mentions("optimizer/optimizer_config.py", "optimizer_cpu_offload")
OFFLOADED = (("optimizer_cpu_offload", True), ("optimizer_offload_fraction", 0.5))
Facts = dict[str, Any]


def _collect(rank: int, size: int) -> Facts:
    return {
        "copied factory": _with_factory(_copied),
        "wrapped factory": _with_factory(_wrapped),
        "own factory": _with_factory(lambda: None),
        "copied factory, required": _with_factory(_copied, switch="require"),
        "copied factory, state on the host": _with_factory(_copied, CASE.of(fields=OFFLOADED)) if OFFLOADS else None,
        "copied factory, switched off": _refusal(lambda: _with_factory(_copied, switch="0")),
        "required and not used": _refusal(_required_without_flag),
        "subclass": _refusal(_subclass),
        "chained with another": _refusal(_mixed_chain),
        "method of other code": _refusal(_method_of_other_code),
        "another Adam, host": _with_adam(_Stateless, "host-distributed"),
        "another Adam": _with_adam(_Stateless, "distopt"),
        "another Adam across params": _refusal(lambda: _with_adam(_Clipped, "distopt")),
        "another Adam, and one by name": _refusal(lambda: _with_adam(_Stateless, "distopt", source="torch_fused")),
        "undone": _undone(),
        "not used": _lines_when_not_used(),
    }


def _refusal(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except DistOptError as error:
        return type(error), str(error)


def _copied() -> Callable[..., Any]:
    """As a framework has it that copied the module: its own functions over names that it imported by value."""
    import megatron.core.optimizer as host

    space = dict(vars(host))
    for name in ("get_megatron_optimizer", "_get_megatron_optimizer_based_on_param_groups"):
        original = space[name]
        copy = types.FunctionType(original.__code__, space, name, original.__defaults__)
        copy.__kwdefaults__ = original.__kwdefaults__
        space[name] = copy
    factory: Callable[..., Any] = space["get_megatron_optimizer"]
    return factory


def _wrapped() -> None:
    """As a framework has it that wraps the host's function before we come."""
    import megatron.core.optimizer as host

    original = host.get_megatron_optimizer

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    host.get_megatron_optimizer = wrapper


def _with_factory(make: Callable[[], Callable[..., Any] | None], case: Case = CASE, *, switch: str = "1") -> Facts:
    """Trains with what a factory builds that was made before the installation."""
    import megatron.core.optimizer as host

    from tests.support import gpt

    with pytest.MonkeyPatch.context() as outer:
        outer.setattr(host, "get_megatron_optimizer", host.get_megatron_optimizer)
        copied = make()
        with _installed(), pytest.MonkeyPatch.context() as patch, gpt.hosts_own_runs():
            patch.setenv("MEGATRON_DISTOPT", switch)
            if copied is not None:
                patch.setattr(host, "get_megatron_optimizer", copied)
            training = gpt.Training(case.of(optimizer="host-distributed"))  # which installs nothing itself
            losses = [training.step().loss for _ in range(case.steps)]
        kinds = [type(each).__module__ for each in (training.optimizer, *gpt.parts_of(training.optimizer))]
    return {"losses": losses, "kinds": sorted({kind.split(".")[0] for kind in kinds})}


class _Stateless(torch.optim.Optimizer):
    """Without moments, as a framework for reinforcement learning puts in the place of the host's Adam."""

    def __init__(self, params: Any, lr: float = 1e-3, eps: float = 1e-8, weight_decay: float = 0.0, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    update = self.update_of(param.grad, group["eps"])
                    param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])

    def update_of(self, grad: Tensor, eps: float) -> Tensor:
        return grad / (grad.abs() + eps)


class _Clipped(_Stateless):
    """Looks across params."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        super().step(closure)


def _with_adam(adam: type, optimizer: str, source: str = "auto") -> Facts:
    """Trains after a class has taken the place of the host's Adam in its modules."""
    import megatron.core.optimizer as host
    from megatron.core.optimizer import distrib_optimizer

    from tests.support import gpt

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for module in (host, distrib_optimizer):
            patch.setattr(module, "Adam", adam, raising=False)
        # Without apex and TransformerEngine the host would take torch's class and not the name in its module.
        patch.setattr(host, "USING_PYTORCH_OPTIMIZER", False, raising=False)
        patch.setenv("MEGATRON_DISTOPT_ADAM", source)
        if optimizer == "distopt":
            stack.enter_context(_installed())
        with contextlib.closing(gpt.Training(CASE.of(optimizer=optimizer))) as training:
            losses = [training.step().loss for _ in range(CASE.steps)]
            kind = type(gpt.parts_of(training.optimizer)[0].optimizer).__name__
    return {"losses": losses, "kind": kind}


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    import megatron_distopt

    installed = megatron_distopt.install()
    try:
        yield
    finally:
        installed.undo()


def _required_without_flag() -> None:
    from tests.support import gpt

    copied, plain = _copied(), CASE.of(optimizer="host-plain")
    gpt.enter_layout(plain)
    with _installed(), pytest.MonkeyPatch.context() as patch, gpt.hosts_own_runs():
        patch.setenv("MEGATRON_DISTOPT", "require")
        copied(gpt.optimizer_config(plain), gpt.build_chunks(plain))


def _subclass() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from tests.support import gpt

    class Theirs(DistributedOptimizer):  # type: ignore[misc]
        pass

    factory = _copied()
    factory.__globals__["DistributedOptimizer"] = Theirs
    gpt.enter_layout(CASE)
    with _installed():
        factory(gpt.optimizer_config(CASE), gpt.build_chunks(CASE))


def _mixed_chain() -> None:
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    from tests.support import gpt

    with _installed():
        training = gpt.Training(CASE.of(optimizer="host-distributed"))
        (ours,) = gpt.parts_of(training.optimizer)
        with gpt.hosts_own_runs():
            (other,) = gpt.parts_of(gpt.Training(CASE.of(optimizer="host-plain")).optimizer)
        other.config = ours.config
        ChainedOptimizer([other, ours])


def _method_of_other_code() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedOptimizer, "zero_grad", lambda self, set_to_none=True: None)
        with _installed():
            pass


def _undone() -> bool:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    before = DistributedOptimizer.__init__, ChainedOptimizer.__init__
    with _installed():
        during = DistributedOptimizer.__init__, ChainedOptimizer.__init__
    unchanged = before == (DistributedOptimizer.__init__, ChainedOptimizer.__init__)
    return unchanged and not set(before) & set(during)


def _lines_when_not_used() -> list[str]:
    """Of a run whose flag the host has reset, as its arguments do for Muon."""
    from megatron_distopt import DistOptConfig
    from megatron_distopt.hosts.megatron_core.adapter import build

    log, handler = logging.getLogger("megatron_distopt"), logging.handlers.BufferingHandler(100)
    log.addHandler(handler)
    config = types.SimpleNamespace(use_distributed_optimizer=False, optimizer="muon")
    built = build(lambda config, model_chunks: "theirs", DistOptConfig(), config, [])
    log.removeHandler(handler)
    return [str(built), *(record.getMessage() for record in handler.buffer)]


@pytest.fixture(scope="module")
def found() -> list[Facts]:
    return run_ranks(_collect, 2, seconds=240, core=True)


FACTORIES = ["copied factory", "wrapped factory", "copied factory, required"]


@pytest.mark.parametrize("factory", [*FACTORIES, *(["copied factory, state on the host"] if OFFLOADS else [])])
def test_factory_when_copied_or_wrapped_then_it_builds_ours_and_every_bit_is_the_same(
    found: list[Facts], factory: str
) -> None:
    for facts in found:
        assert facts[factory]["kinds"] == ["megatron_distopt"]
        assert facts[factory]["losses"] == facts["own factory"]["losses"]
        assert facts[factory]["losses"][-1] < facts[factory]["losses"][0]


def test_factory_when_switched_off_then_it_builds_the_hosts_own(found: list[Facts]) -> None:
    assert found[0]["copied factory, switched off"]["kinds"] == ["megatron"]


def test_adam_when_a_framework_has_replaced_the_hosts_then_it_is_used_itself(found: list[Facts]) -> None:
    for facts in found:
        assert facts["another Adam"]["kind"] == facts["another Adam, host"]["kind"] == "_Stateless"
        # The norm by which both clip differs in its last bits.
        assert facts["another Adam"]["losses"] == pytest.approx(facts["another Adam, host"]["losses"], rel=1e-6)
        assert facts["another Adam"]["losses"] != pytest.approx(facts["own factory"]["losses"], rel=1e-3)


#: Until 0.11 a factory without the flag constructs nothing of which a copy of it could be told.
CHAINS_ALWAYS = core_mentions("optimizer/optimizer.py", "grads_states_parallel_group_is_shared")
REFUSED = {
    "required and not used": (ConfigError, "use_distributed_optimizer", "--use-distributed-optimizer"),
    "subclass": (ConfigError, "Theirs", "MEGATRON_DISTOPT=0"),
    "chained with another": (ConfigError, "FP32Optimizer", "adam or sgd"),
    "another Adam across params": (ConfigError, "_Clipped", "torch.optim.AdamW"),
    "another Adam, and one by name": (ConfigError, "_Stateless", "Drop --distopt-adam"),
    "method of other code": (HostMismatchError, "DistributedOptimizer.zero_grad", "Switch that patch off"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_host_when_its_class_cannot_become_ours_then_refused_on_all_ranks_by_name(
    found: list[Facts], what: str
) -> None:
    if what == "required and not used" and not CHAINS_ALWAYS:
        pytest.skip("this megatron-core puts no chain around one optimizer")
    kind, *parts = REFUSED[what]
    for facts in found:
        assert facts[what] is not None and facts[what][0] is kind
        assert_mentions(facts[what][1], *parts)


def test_constructors_when_undone_then_they_are_the_hosts_own_again(found: list[Facts]) -> None:
    assert [facts["undone"] for facts in found] == [True, True]


def test_run_when_the_host_reset_its_flag_then_one_line_on_rank_0_says_so(found: list[Facts]) -> None:
    theirs, line = found[0]["not used"]
    assert theirs == "theirs"
    assert "not used" in line
    assert "'muon'" in line
    assert found[1]["not used"] == ["theirs"]
