"""As a library: what `install()` returns, when it refuses, and the way back."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_distopt import DistOptConfig, Installation, install
from megatron_distopt.errors import ConfigError, HostMismatchError, UnknownHostError
from megatron_distopt.patch_points import PatchPoint, Undos
from megatron_distopt.plugin.detect import Generation
from tests.support.refusals import assert_mentions, raised
from tests.support.spawn import run_ranks

PATCH_POINT = PatchPoint("fake_megatron", "get_megatron_optimizer", ("config", "model_chunks"))


@pytest.fixture(autouse=True)
def nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of ours is set before a test, nothing is installed before and after it."""
    for variable in [name for name in os.environ if name.startswith("MEGATRON_DISTOPT")]:
        monkeypatch.delenv(variable)
    installed: list[Installation] = import_module("megatron_distopt.plugin.install")._installed
    assert installed == []
    yield
    for installation in list(installed):
        installation.undo()


def build(original: Callable[..., Any], config: DistOptConfig, *args: object) -> Any:
    return "ours", config, original


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A host that `install` finds: a module with a factory that says "host's"."""
    module = ModuleType("fake_megatron")
    exec('def get_megatron_optimizer(config, model_chunks):\n    return "host\'s"', vars(module))
    monkeypatch.setitem(sys.modules, "fake_megatron", module)
    installing = import_module("megatron_distopt.plugin.install")
    adapter: Any = ModuleType("fake_adapter")
    adapter.build = build
    monkeypatch.setitem(sys.modules, "fake_adapter", adapter)
    host = Generation("fake", "", (), (PATCH_POINT,), "fake_adapter")
    monkeypatch.setattr(installing, "find_host", lambda: host)
    return module


def test_install_when_a_host_is_there_then_its_factory_is_ours_with_the_options(host: Any) -> None:
    original = host.get_megatron_optimizer
    installation = install(DistOptConfig(nonfinite="skip"))
    assert installation.is_active
    assert installation.config == DistOptConfig(nonfinite="skip")
    assert host.get_megatron_optimizer(None, []) == ("ours", installation.config, original)


def test_install_when_variables_are_set_then_they_say_what_the_options_leave_open(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_DISTOPT_NONFINITE", "log")
    monkeypatch.setenv("MEGATRON_DISTOPT_DECAY", "l2")
    options = DistOptConfig(nonfinite="raise", lr=0.5)
    installation = install(options)
    assert installation.config == DistOptConfig(nonfinite="raise", decay="l2", lr=0.5)
    # A host reads variables behind its flags.
    assert host.get_megatron_optimizer(None, [])[1] is options


def test_install_when_switched_off_then_the_host_is_as_it_was_until_it_is_switched_on(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = host.get_megatron_optimizer
    monkeypatch.setenv("MEGATRON_DISTOPT", "0")
    installation = install(DistOptConfig(lr=0.5))
    assert not installation.is_active
    installation.undo()
    install(DistOptConfig(lr=0.5))
    assert host.get_megatron_optimizer is original
    monkeypatch.setenv("MEGATRON_DISTOPT", "1")
    assert install().is_active


@pytest.mark.parametrize("switch", ["1", "require"])
def test_install_when_there_is_no_host_then_refused(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_DISTOPT", switch)
    # of another test of this process
    for name in [name for name in sys.modules if name.startswith("megatron.")]:
        monkeypatch.delitem(sys.modules, name)
    # an import of it fails as if it were not installed
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(UnknownHostError) as error:
        install()
    assert_mentions(
        error.value, "Start in the folder of your fork", "megatron_distopt.distribute(...)"
    )


@pytest.mark.parametrize(
    ("variable", "value", "remedy"),
    [
        ("MEGATRON_DISTOPT", "requires", "require"),
        ("MEGATRON_DISTOPT_NONFINITE", "ignore", "raise"),
        ("MEGATRON_DISTOPT_NONFINIT", "skip", "MEGATRON_DISTOPT_NONFINITE"),
    ],
)
def test_install_when_a_variable_is_bad_then_refused_and_the_host_is_as_it_was(
    variable: str, value: str, remedy: str, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = host.get_megatron_optimizer
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as error:
        install()
    assert_mentions(error.value, variable, remedy)
    assert host.get_megatron_optimizer is original


def test_install_when_called_again_then_the_first_installation_or_refused_with_other_options(
    host: Any,
) -> None:
    first = install(DistOptConfig(nonfinite="skip"))
    ours = host.get_megatron_optimizer
    with pytest.raises(ConfigError) as error:
        install(DistOptConfig(nonfinite="log"))
    assert_mentions(error.value, "install()", "Call undo()")
    assert install(DistOptConfig(nonfinite="skip")) is first
    assert host.get_megatron_optimizer is ours


def test_undo_when_called_then_the_host_is_as_it_was_and_a_second_call_does_nothing(
    host: Any,
) -> None:
    original = host.get_megatron_optimizer
    first = install(DistOptConfig(nonfinite="skip"))
    first.undo()
    assert host.get_megatron_optimizer is original
    second = install(DistOptConfig(nonfinite="log"))
    first.undo()
    assert host.get_megatron_optimizer(None, []) == ("ours", second.config, original)
    assert install(DistOptConfig(nonfinite="log")) is second is not first


def test_undo_when_other_code_replaced_a_constructor_since_then_refused_and_all_of_it_stays(
    host: Any,
) -> None:
    class HostClass:
        pass

    def constructor(self: object) -> None:
        pass

    def take_over(options: DistOptConfig, undos: Undos) -> None:
        undos.replace(HostClass, "__init__", constructor)

    adapter: Any = sys.modules["fake_adapter"]
    adapter.take_over = take_over
    original = host.get_megatron_optimizer
    installation = install()
    ours = host.get_megatron_optimizer
    setattr(HostClass, "__init__", lambda self: None)  # noqa: B010
    with pytest.raises(HostMismatchError) as error:
        installation.undo()
    assert_mentions(error.value, "HostClass.__init__", "Undo that replacement first.")
    assert host.get_megatron_optimizer is ours is not original
    setattr(HostClass, "__init__", constructor)  # noqa: B010
    installation.undo()
    assert host.get_megatron_optimizer is original
    assert HostClass.__init__ is object.__init__


def test_install_when_the_host_looks_different_then_refused_and_nothing_is_installed(
    host: Any,
) -> None:
    exec("def get_megatron_optimizer(model):\n    pass", vars(host))
    with pytest.raises(HostMismatchError) as error:
        install()
    assert_mentions(
        error.value, "fake_megatron.get_megatron_optimizer takes (model)", "docs/hosts.md"
    )
    exec("def get_megatron_optimizer(config, model_chunks):\n    pass", vars(host))
    assert install().is_active


def _in_the_real_host(rank: int, size: int) -> tuple[str, str]:
    import megatron.core.optimizer as host

    install()
    return raised(
        lambda: host.get_megatron_optimizer(SimpleNamespace(use_distributed_optimizer=False), [])
    )


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_install_when_required_and_the_real_host_runs_without_its_flag_then_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEGATRON_DISTOPT", "require")
    monkeypatch.setenv("MEGATRON_DISTOPT_ACCELERATOR", "torch")
    ((kind, text),) = run_ranks(_in_the_real_host, 1)
    assert kind == "ConfigError"
    assert_mentions(text, "MEGATRON_DISTOPT=require", "Add --use-distributed-optimizer")
