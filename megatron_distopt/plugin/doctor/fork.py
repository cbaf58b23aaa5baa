"""What the doctor says about a fork, from its survey."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_distopt.errors import refusal
from megatron_distopt.hosts.source.found import ClassFound, PatchPointFound, PatchPointState, Place, Survey
from megatron_distopt.hosts.source.survey import GROUP_FUNCTIONS
from megatron_distopt.plugin.doctor.findings import Finding, noted, ok, problem, refused
from megatron_distopt.plugin.doctor.launch_flags import flag_of

__all__ = ["describe_fork"]

_SECTION = "fork"
_KINDS = {
    "per-rank files": "per-rank files: every data-parallel rank keeps its state in its own file",
    "gathered file": "gathered file: one file by the fork, a folder that loads at any size by ours",
}


def describe_fork(found: Survey) -> Iterator[Finding]:
    """One finding for everything that the adapter will ask of the fork."""
    yield ok(_SECTION, "source", ", ".join(found.roots))
    yield _generation(found)
    if not found.generation.is_supported:
        return
    for patch_point in found.patch_points:
        yield from _patch_point(patch_point)
    if found.optimizer_class is not None:
        yield from _class(found.optimizer_class)
    yield _groups(found)
    yield _flag(found)
    for each in found.unreadable:
        make = problem if each.file.startswith("megatron/") else noted
        yield make(_SECTION, "unreadable", each.reason)


def _generation(found: Survey) -> Finding:
    generation = found.generation
    return refused(_SECTION, "generation", generation.refusal(), f"{generation.name}, as {generation.examples}")


def _patch_point(found: PatchPointFound) -> Iterator[Finding]:
    name = found.patch_point.attribute
    with_block = ", with the look-up for entry points after it" if found.state is PatchPointState.PATCHED else ""
    text = f"free in {found.place}{with_block}: ({', '.join(found.parameters)})"
    yield refused(_SECTION, name, found.refusal(), text)
    if found.importers:
        yield ok(_SECTION, f"{name} by value", f"in {_places(found.importers)}; each is rebound")
    if found.assigners:
        yield noted(_SECTION, f"{name} assigned", f"in {_places(found.assigners)}; what runs last wins")


def _class(found: ClassFound) -> Iterator[Finding]:
    if found.bound_in is not None:
        yield noted(_SECTION, found.name, f"bound while {found.bound_in} runs, so it is looked at when training starts")
        return
    yield refused(_SECTION, found.name, found.refusal(), f"constructor as expected in {found.place}")
    if found.kind is not None:
        yield ok(_SECTION, "checkpoints", _KINDS[found.kind])


def _groups(found: Survey) -> Finding:
    if not found.group_functions:
        return noted(_SECTION, "process groups", "its parallel state is not in this tree, so it was not looked at")
    there = ", ".join(name for name in GROUP_FUNCTIONS if name in found.group_functions)
    absent = ", ".join(name for name in GROUP_FUNCTIONS if name not in found.group_functions)
    if GROUP_FUNCTIONS[0] in found.group_functions:
        return ok(_SECTION, "process groups", there + (f"; without {absent}" if absent else ""))
    remedy = "Use a Megatron that docs/hosts.md lists"
    got = f"no {GROUP_FUNCTIONS[0]}" + (f", only {there}" if there else "")
    return problem(_SECTION, "process groups", refusal("parallel state", got, "name the data-parallel group", remedy))


def _flag(found: Survey) -> Finding:
    spelt = [option for option in found.options if option.flag == flag_of(found)]
    if spelt:
        return ok(_SECTION, "flag", f"{spelt[0].flag} ({spelt[0].place})")
    return noted(_SECTION, "flag", "no parser here spells it; your script sets use_distributed_optimizer in its config")


def _places(places: Sequence[Place]) -> str:
    return ", ".join(map(str, places))
