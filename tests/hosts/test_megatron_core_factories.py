"""Whoever constructs megatron-core's distributed optimizer gets ours: copied factories, wrapped
ones, those below.

All of it runs in one spawn of two ranks.

Exercises hosts/megatron/flag.py, hosts/megatron/refused.py, hosts/megatron/saving.py.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt.errors import ConfigError, DistOptError, HostMismatchError
from tests.support.cases import Case
from tests.support.core_version import core_mentions
from tests.support.facts import Facts, facts_of, outcomes
from tests.support.refusals import assert_mentions, logged
from tests.support.stand_ins import around, dropping_float64, of_module, type_remedy

CASE = Case("distopt", dp=2, steps=3, num_microbatches=1)
#: Then a copied factory builds the host's HybridDeviceOptimizer first.
OFFLOADS = core_mentions("optimizer/optimizer_config.py", "optimizer_cpu_offload")
OFFLOADED = (("optimizer_cpu_offload", True), ("optimizer_offload_fraction", 0.5))


def collect_facts(rank: int, size: int) -> dict[str, str]:
    return outcomes(CHECKS)


def _refused(make: Callable[[], Any], kind: type[DistOptError], *parts: str) -> Callable[[], None]:
    def check() -> None:
        with pytest.raises(kind) as error:
            make()
        assert_mentions(error.value, *parts)

    return check


def _copied() -> Callable[..., Any]:
    """As a framework has it that copied the module: its own functions over names that it imported
    by value."""
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


def _with_factory(
    make: Callable[[], Callable[..., Any] | None], case: Case = CASE, *, switch: str = "1"
) -> dict[str, Any]:
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
            # which installs nothing itself
            training = gpt.Training(case.of(optimizer="host-distributed"))
            losses = [training.step().loss for _ in range(case.steps)]
        kinds = [
            type(each).__module__
            for each in (training.optimizer, *gpt.parts_of(training.optimizer))
        ]
    return {"losses": losses, "kinds": sorted({kind.split(".")[0] for kind in kinds})}


class _Stateless(torch.optim.Optimizer):
    """Without moments, as a framework for reinforcement learning puts in the place of the host's
    Adam."""

    def __init__(
        self, params: Any, lr: float = 1e-3, eps: float = 1e-8, weight_decay: float = 0.0, **_: Any
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    update = self.update_of(param.grad, group["eps"])
                    param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(
                        update, alpha=group["lr"]
                    )

    def update_of(self, grad: Tensor, eps: float) -> Tensor:
        return grad / (grad.abs() + eps)


class _Clipped(_Stateless):
    """Looks across params."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        super().step(closure)


def _with_adam(
    adam: type, optimizer: str, source: str = "auto", updates: str = "elements"
) -> dict[str, Any]:
    """Trains after a class has taken the place of the host's Adam in its modules."""
    import megatron.core.optimizer as host
    from megatron.core.optimizer import distrib_optimizer

    from tests.support import gpt

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for module in (host, distrib_optimizer):
            patch.setattr(module, "Adam", adam, raising=False)
        # Without apex and TransformerEngine the host would take torch's class and not the name in
        # its module.
        patch.setattr(host, "USING_PYTORCH_OPTIMIZER", False, raising=False)
        patch.setenv("MEGATRON_DISTOPT_ADAM", source)
        patch.setenv("MEGATRON_DISTOPT_UPDATES", updates)
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


def _never(self: Any, *args: Any, **options: Any) -> Any:
    raise AssertionError("called, and ours is there")


@contextlib.contextmanager
def _replaced_by(modules: dict[str, str]) -> Iterator[Any]:
    """Methods of the host's classes, by name, in whose place functions of these modules are; those
    with a "*" wrap the host's own."""
    import megatron.core.optimizer.optimizer as host
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    with pytest.MonkeyPatch.context() as patch:
        for place, module in modules.items():
            name, method = place.split(".")
            kind = getattr(host, name, None) or DistributedOptimizer
            theirs = of_module(module.strip("*"), _never)
            if module.endswith("*"):
                theirs = around(module.strip("*"), vars(kind)[method])
            patch.setattr(kind, method, theirs)
        yield patch


_OF_ADAPTOR = {
    "DistributedOptimizer.load_state_dict": "mindspeed.core.megatron_basic.megatron_basic",
    "DistributedOptimizer.load_parameter_state": "mindspeed.core.optimizer.distrib_optimizer",
    "DistributedOptimizer.state_dict": "mindspeed.core.optimizer.distrib_optimizer",
    "DistributedOptimizer.step_with_ready_grads": (
        "mindspeed.core.optimizer.fix_duplicate_allgather*"
    ),
    "ChainedOptimizer.step": "mindspeed.core.megatron_basic.count_zero_fix",
    "ChainedOptimizer.load_parameter_state": "mindspeed.core.optimizer.optimizer",
}


def _adaptor_in_place() -> None:
    """What an adaptor to another device puts into every run may be there, before and after an
    installation."""
    own = _with_factory(lambda: None)
    with _replaced_by(_OF_ADAPTOR):
        assert _with_factory(lambda: None) == own
    with _installed(), _replaced_by(_OF_ADAPTOR):
        from tests.support import gpt

        with contextlib.closing(gpt.Training(CASE)) as training:
            assert [training.step().loss for _ in range(CASE.steps)] == own["losses"]


def _methods_of_other_code(modules: dict[str, str], *, decorate: bool = False) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    with _replaced_by(modules) as patch:
        if decorate:
            patch.setattr(DistributedOptimizer, "state_dict", torch.no_grad()(_never))
        with _installed():
            pass


def _put_back() -> None:
    """What the error says to type for a wrapper works."""
    import megatron.core.optimizer

    place = "MixedPrecisionOptimizer.step_with_ready_grads"
    kind = megatron.core.optimizer.optimizer.MixedPrecisionOptimizer
    own = kind.step_with_ready_grads
    with _replaced_by({place: "adaptor.steps*"}):
        with pytest.raises(HostMismatchError) as error:
            _methods_of_other_code({})
        name = f"megatron.core.optimizer.optimizer.{place}"
        assert_mentions(error.value, name, "NAME = NAME.__wrapped__")
        exec(f"import megatron.core.optimizer; {name} = {name}.__wrapped__", {})
        assert kind.step_with_ready_grads is own
        _methods_of_other_code({})


def _sums_dropped() -> None:
    """An all-reduce that loses the norm: refused, and what the error says to type mends it."""
    from tests.support import gpt

    own = _with_factory(lambda: None)
    with pytest.MonkeyPatch.context() as patch, _installed():
        patch.setattr(dist, "all_reduce", dropping_float64(dist.all_reduce))
        with pytest.raises(ConfigError) as error:
            gpt.Training(CASE)
        assert_mentions(error.value, "torch.distributed.all_reduce", "float64", "stand_ins.py")
        type_remedy(str(error.value))
        with contextlib.closing(gpt.Training(CASE)) as training:
            assert [training.step().loss for _ in range(CASE.steps)] == own["losses"]


def _groups_in_another_order() -> None:
    """A saved param group goes to the one with its multipliers, as in the host since 0.13."""
    from tests.support import gpt

    with contextlib.closing(gpt.Training(CASE)) as training:
        (optimizer,) = gpt.parts_of(training.optimizer)
        state = optimizer.state_dict()
        groups = state["optimizer"]["param_groups"]
        assert [group["wd_mult"] for group in groups] == [1.0, 0.0]
        for group in groups:
            group["weight_decay"] = 0.25 + group["wd_mult"]
        groups.reverse()
        optimizer.load_state_dict(state)
        found = [(group["wd_mult"], group["weight_decay"]) for group in optimizer.param_groups]
        assert found == [(1.0, 1.25), (0.0, 0.25)]
        # Multipliers of another run: by number, and those of this one stay.
        for group in groups:
            group["wd_mult"] += 2.0
        optimizer.load_state_dict(state)
        found = [(group["wd_mult"], group["weight_decay"]) for group in optimizer.param_groups]
        assert found == [(1.0, 0.25), (0.0, 1.25)]


def _not_used() -> None:
    """A run whose flag the host has reset, as its arguments do for Muon: one line on rank 0 says
    so."""
    from megatron_distopt import DistOptConfig
    from megatron_distopt.hosts.megatron_core.get_in import build

    config = types.SimpleNamespace(use_distributed_optimizer=False, optimizer="muon")
    with logged() as lines:
        assert build(lambda config, model_chunks: "theirs", DistOptConfig(), config, []) == "theirs"
    assert len(lines) == (dist.get_rank() == 0)
    for line in lines:
        assert_mentions(line, "not used", "'muon'")


def _same_as_own() -> None:
    """Copied and wrapped factories build ours, and every bit is the same."""
    own = _with_factory(lambda: None)
    found = [
        _with_factory(_copied),
        _with_factory(_wrapped),
        _with_factory(_copied, switch="require"),
    ]
    if OFFLOADS:
        found.append(_with_factory(_copied, CASE.of(fields=OFFLOADED)))
    for each in (own, *found):
        assert each == {"losses": own["losses"], "kinds": ["megatron_distopt"]}
    assert own["losses"][-1] < own["losses"][0]
    # An Adam class of a framework in place of the host's is used itself.
    ours, theirs = (
        _with_adam(_Stateless, optimizer) for optimizer in ("distopt", "host-distributed")
    )
    assert ours["kind"] == theirs["kind"] == "_Stateless"
    # The norm by which both clip differs in its last bits.
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    assert ours["losses"] != pytest.approx(own["losses"], rel=1e-3)


#: Until 0.11 a factory without the flag constructs nothing of which a copy of it could be told.
CHAINS_ALWAYS = core_mentions("optimizer/optimizer.py", "grads_states_parallel_group_is_shared")
CHECKS: dict[str, Callable[[], None]] = {
    "copied and wrapped": _same_as_own,
    "subclass": _refused(_subclass, ConfigError, "Theirs", "MEGATRON_DISTOPT=0"),
    "chained with another": _refused(_mixed_chain, ConfigError, "FP32Optimizer", "adam or sgd"),
    "methods of other code": _refused(
        lambda: _methods_of_other_code(
            {
                "DistributedOptimizer.state_dict": "other",
                "DistributedOptimizer._copy_model_grads_to_main_grads": "quantized",
                "ChainedOptimizer.step": "other",
                "MixedPrecisionOptimizer.step": "other*",
                "DistributedOptimizer.load_state_dict": "mindspeed.elsewhere",
            }
        ),
        HostMismatchError,
        "distrib_optimizer.DistributedOptimizer.state_dict",
        "distrib_optimizer.DistributedOptimizer._copy_model_grads_to_main_grads",
        "optimizer.ChainedOptimizer.step",
        "optimizer.MixedPrecisionOptimizer.step",
        "distrib_optimizer.DistributedOptimizer.load_state_dict",
        "mindspeed.elsewhere, other, quantized",
        "Switch the patches off",
    ),
    "method of other code under a decorator of torch's": _refused(
        lambda: _methods_of_other_code({}, decorate=True),
        HostMismatchError,
        "DistributedOptimizer.state_dict",
        __name__,
    ),
    "adaptor in place": _adaptor_in_place,
    "wrapper put back": _put_back,
    "sums dropped": _sums_dropped,
    "groups in another order": _groups_in_another_order,
    "another Adam across params": _refused(
        lambda: _with_adam(_Clipped, "distopt", updates="params"),
        ConfigError,
        "_Clipped",
        "torch.optim.AdamW",
    ),
    "another Adam, and one by name": _refused(
        lambda: _with_adam(_Stateless, "distopt", source="torch_fused"),
        ConfigError,
        "_Stateless",
        "Drop --distopt-adam",
    ),
    "not used": _not_used,
}
if CHAINS_ALWAYS:
    CHECKS["required and not used"] = _refused(
        _required_without_flag,
        ConfigError,
        "use_distributed_optimizer",
        "--use-distributed-optimizer",
    )


facts = facts_of(collect_facts, 2, seconds=240, core=True)


@pytest.mark.parametrize("name", CHECKS)
def test_host_when_others_construct_its_class_then_ours_or_refused(facts: Facts, name: str) -> None:
    facts.assert_passed(name)
