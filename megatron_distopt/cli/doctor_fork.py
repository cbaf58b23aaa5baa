"""What `megatron-distopt doctor` reads in a fork's source: whether the adapter fits, and which options are refused."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from megatron_distopt.cli.show import Finding, noted, ok, problem
from megatron_distopt.hosts.detect import MEGATRON_CORE
from megatron_distopt.hosts.megatron_2023.forks import FLAG
from megatron_distopt.hosts.megatron_core.facts import REFUSED
from megatron_distopt.hosts.megatron_core.fields import judged
from megatron_distopt.hosts.source.survey import ClassInSource, ParserOption, PatchPointState, Survey
from megatron_distopt.hosts.source.tree import SourceTree, classes_of
from megatron_distopt.version import MEGATRON_CORE as SERVED

_SECTION = "fork"
_FILES = {
    "per-rank files": "per-rank files: every data-parallel rank keeps its state in its own file",
    "gathered file": "gathered file: one file by the fork, a folder that loads at any size by ours",
}
#: The configs whose fields are judged, as `Refused.where` names them: module and class.
_CONFIGS = {
    "config": ("megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
    "ddp_config": ("megatron.core.distributed.distributed_data_parallel_config", "DistributedDataParallelConfig"),
}


def describe_fork(found: Survey, tree: SourceTree) -> Iterator[Finding]:
    """Yields a finding for everything that the adapter will ask of the fork."""
    yield ok(_SECTION, "source", ", ".join(found.roots))
    generation = found.generation
    yield _refused("generation", generation.refusal(), f"{generation.name}, as {generation.examples}")
    if not generation.is_supported:
        return
    for point in found.patch_points:
        with_block = ", with the look-up for entry points after it" * (point.state is PatchPointState.PATCHED)
        text = f"free in {point.place}{with_block}: ({', '.join(point.parameters)})"
        yield _refused(point.patch_point.attribute, point.refusal(), text)
    if found.optimizer_class is not None:
        yield from _class(found.optimizer_class)
    flags = [option for option in found.options if option.flag == flag_of_host(found.options)]
    if flags:
        yield ok(_SECTION, "flag", f"{flags[0].flag} ({flags[0].place})")
    else:
        text = "no parser here spells it; your script sets use_distributed_optimizer in its config"
        yield noted(_SECTION, "flag", text)
    if generation is MEGATRON_CORE:
        yield from _describe_core(tree)


def flag_of_host(options: Sequence[ParserOption]) -> str:
    """Returns the host's flag as its parser spells it, or in the usual spelling where it has no parser."""
    return next((option.flag for option in options if option.name == FLAG), f"--{FLAG.replace('_', '-')}")


def _refused(subject: str, reason: str | None, text: str) -> Finding:
    """Returns a problem where there is a reason, and otherwise the finding that all is well."""
    return ok(_SECTION, subject, text) if reason is None else problem(_SECTION, subject, reason)


def _class(found: ClassInSource) -> Iterator[Finding]:
    if found.bound_in:
        text = f"bound while {found.bound_in} runs, so it is looked at when training starts"
        yield noted(_SECTION, found.name, text)
        return
    yield _refused(found.name, found.refusal(), f"constructor as expected in {found.place}")
    if found.files:
        yield ok(_SECTION, "checkpoints", _FILES[found.files])


def _describe_core(tree: SourceTree) -> Iterator[Finding]:
    """Yields the release of megatron-core, the options that are refused, and those that nobody has judged."""
    file = tree.file_of("megatron.core.package_info")
    text = file.read_text("utf-8", errors="replace") if file is not None else ""
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = '?\"?(\w*)", text, re.MULTILINE))
    if {"MAJOR", "MINOR", "PATCH"} <= numbers.keys():
        release = f"{numbers['MAJOR']}.{numbers['MINOR']}.{numbers['PATCH']}{numbers.get('PRE_RELEASE', '')}"
        oldest, after = ((int(major), int(minor)) for major, minor in re.findall(r"(\d+)\.(\d+)", SERVED))
        if oldest <= (int(numbers["MAJOR"]), int(numbers["MINOR"])) < after:
            yield ok(_SECTION, "megatron-core", f"{release}, served are {SERVED}")
        else:
            said = f"{release}, tried are {SERVED}; what differs is refused when the optimizer is built"
            yield noted(_SECTION, "megatron-core", said)
    fields = {where: _fields_of(tree, *place) for where, place in _CONFIGS.items()}
    refused = [each.option for each in REFUSED if each.option in fields[each.where]]
    if refused:
        yield noted(_SECTION, "refused options", f"{', '.join(dict.fromkeys(refused))}: refused where they are on")
    unknown = sorted(name for where, names in fields.items() for name in names - judged(where))
    if unknown:
        said = f"{', '.join(unknown)}: refused where they are not at their defaults"
        yield noted(_SECTION, "unknown options", said)


def _fields_of(tree: SourceTree, module: str, name: str) -> frozenset[str]:
    file = tree.file_of(module)
    definition = classes_of(tree.parse(file)).get(name) if file is not None else None
    body = definition.body if definition is not None else []
    named = (node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name))
    return frozenset(field for field in named if not field.startswith("_"))
