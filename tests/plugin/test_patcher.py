"""Replacing functions of code that is not ours, and putting them back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import megatron_distopt
from megatron_distopt.errors import DistOptError, HostMismatchError, UnknownHostError
from megatron_distopt.patch_points import PatchPoint, Undos, apply
from tests.support.refusals import assert_mentions

HOST = """
def make_optimizer(config, model_chunks, no_weight_decay=None):
    return f"host's for {config}"

def make_scheduler(optimizer):
    return "host's scheduler"
"""
OPTIMIZER = PatchPoint("fake_host", "make_optimizer", ("config", "model_chunks"))
SCHEDULER = PatchPoint("fake_host", "make_scheduler", ("optimizer",))

REMEDY = "Remove the other patch, or install megatron_distopt before it."


def module_of(
    name: str, monkeypatch: pytest.MonkeyPatch, code: str = "", **attributes: object
) -> Any:
    """A loaded module with what `code` defines and the attributes."""
    module = ModuleType(name)
    exec(code, vars(module))
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    return module_of("fake_host", monkeypatch, HOST)


@pytest.fixture
def trainer(host: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A training module that imported both functions by value."""
    return module_of(
        "fake_trainer", monkeypatch, "from fake_host import make_optimizer, make_scheduler"
    )


def ours(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: f"ours in place of {original(*args, **kwargs)}"


def put_in(*patch_points: PatchPoint) -> Undos:
    undos = Undos()
    apply([(patch_point, ours) for patch_point in patch_points], undos)
    return undos


def snapshot(*modules: Any) -> list[tuple[object, object]]:
    return [(module.make_optimizer, module.make_scheduler) for module in modules]


def refused(*patch_points: PatchPoint) -> DistOptError:
    with pytest.raises(DistOptError) as error:
        put_in(*patch_points)
    return error.value


def test_apply_when_the_patch_point_fits_then_importers_by_value_are_rebound(
    host: Any, trainer: Any
) -> None:
    put_in(OPTIMIZER)
    assert trainer.make_optimizer is host.make_optimizer
    assert trainer.make_optimizer("config", []) == "ours in place of host's for config"
    assert trainer.make_scheduler is host.make_scheduler
    assert trainer.make_scheduler(None) == "host's scheduler"


def test_apply_when_a_module_has_another_object_of_that_name_then_it_is_left_alone_by_undo_as_well(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = module_of("fake_other", monkeypatch, HOST)
    before = own.make_optimizer
    undo = put_in(OPTIMIZER).undo
    assert own.make_optimizer is before
    late = module_of("fake_late", monkeypatch, HOST)
    of_late = late.make_optimizer
    undo()
    assert (own.make_optimizer, late.make_optimizer) == (before, of_late)


def test_undo_when_a_module_imported_ours_by_value_since_then_it_has_the_original_too(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(host)
    undo = put_in(OPTIMIZER, SCHEDULER).undo
    late = module_of(
        "fake_late", monkeypatch, "from fake_host import make_optimizer, make_scheduler"
    )
    assert snapshot(late) == snapshot(host) != before
    undo()
    assert snapshot(host, late) == before * 2


@pytest.mark.parametrize("patch_point", [OPTIMIZER, SCHEDULER])
def test_undo_when_somebody_replaced_ours_since_then_refused_and_nothing_changes(
    patch_point: PatchPoint, host: Any, trainer: Any
) -> None:
    before = snapshot(host, trainer)
    undo = put_in(OPTIMIZER, SCHEDULER).undo
    installed = getattr(host, patch_point.attribute)
    setattr(host, patch_point.attribute, ours(installed))
    replaced = snapshot(host, trainer)
    with pytest.raises(HostMismatchError) as error:
        undo()
    assert_mentions(error.value, str(patch_point), "Undo that replacement first.")
    assert snapshot(host, trainer) == replaced
    setattr(host, patch_point.attribute, installed)
    undo()
    assert snapshot(host, trainer) == before
    undo()
    assert snapshot(host, trainer) == before


def test_apply_when_the_second_replacement_cannot_be_made_then_the_first_is_not_put_in(
    host: Any, trainer: Any
) -> None:
    before = snapshot(host, trainer)
    seen: list[object] = []

    def fail(original: object) -> object:
        seen.extend([original, *snapshot(host, trainer)])
        raise RuntimeError("cannot be made")

    with pytest.raises(RuntimeError, match=r"^cannot be made$"):
        apply([(OPTIMIZER, ours), (SCHEDULER, fail)], Undos())
    assert seen == [host.make_scheduler, *before]
    assert snapshot(host, trainer) == before
    # Nothing is left behind that would be taken for somebody else's.
    put_in(OPTIMIZER, SCHEDULER).undo()
    assert snapshot(host, trainer) == before


SIGNATURE = "(config, model_chunks, no_weight_decay)"
REFUSED: dict[str, tuple[PatchPoint, type[DistOptError], tuple[str, ...]]] = {
    "no module": (
        PatchPoint("no_such_host.core", "make_optimizer", ()),
        UnknownHostError,
        ("no_such_host.core", "No module named 'no_such_host'", "Start in the folder"),
    ),
    "no attribute": (
        PatchPoint("fake_host", "no_such_function", ()),
        HostMismatchError,
        ("fake_host.no_such_function is missing", "docs/hosts.md"),
    ),
    "the attribute is None": (
        PatchPoint("fake_host", "nothing", ()),
        HostMismatchError,
        ("fake_host.nothing", "NoneType", REMEDY),
    ),
    "somebody else replaced it": (
        PatchPoint("fake_host", "replaced", ()),
        HostMismatchError,
        ("fake_host.replaced", "other_patcher", REMEDY),
    ),
    **{
        f"takes {parameters}": (
            PatchPoint("fake_host", "make_optimizer", parameters),
            HostMismatchError,
            (
                f"fake_host.make_optimizer takes {SIGNATURE}",
                f"start with ({', '.join(parameters)})",
                "docs/hosts.md",
            ),
        )
        for parameters in (
            ("model_chunks", "config"),
            ("config", "model_chunks", "no_weight_decay", "more"),
        )
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_apply_when_the_patch_point_does_not_fit_then_refused(
    name: str, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a function replaced whose own patch point fits."""
    patch_point, kind, words = REFUSED[name]
    host.nothing, host.replaced = None, module_of("other_patcher", monkeypatch, HOST).make_optimizer
    before = snapshot(host)
    error = refused(SCHEDULER, patch_point)
    assert isinstance(error, kind)
    assert_mentions(error, *words)
    assert snapshot(host) == before


class CannotLookUp(ModuleType):
    """Modules that compute their attributes must not be asked for every name that somebody
    patches."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(f"asked for {name}")


def test_apply_when_a_loaded_module_computes_its_attributes_then_it_is_not_asked(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fake_lazy", CannotLookUp("fake_lazy"))
    monkeypatch.setitem(sys.modules, "fake_not_a_module", object())
    put_in(OPTIMIZER)
    assert host.make_optimizer("config", []) == "ours in place of host's for config"


def test_package_when_a_patcher_asks_it_for_a_class_without_its_host_then_it_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other patchers ask every loaded module, this package too, for the class that they patch."""
    monkeypatch.setitem(sys.modules, "megatron_distopt.hosts.megatron_2023.optimizer", None)
    assert not hasattr(megatron_distopt, "DistributedOptimizer")
    with pytest.raises(AttributeError, match="needs a Megatron of 2023"):
        _ = megatron_distopt.DistributedOptimizer
    monkeypatch.setitem(sys.modules, "megatron_distopt.layout", None)
    with pytest.raises(ImportError, match=r"megatron_distopt\.layout"):
        _ = megatron_distopt.MatrixSpec
