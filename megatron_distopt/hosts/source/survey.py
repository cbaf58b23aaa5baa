"""Reads from a host's source what the adapters need to know, without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_distopt.hosts.detect import MEGATRON_2023, MEGATRON_CORE, Generation, recognise
from megatron_distopt.hosts.megatron_2023 import facts as megatron_2023
from megatron_distopt.hosts.megatron_core import facts as megatron_core
from megatron_distopt.hosts.patch_points import PatchPoint
from megatron_distopt.hosts.source.block import BEGIN, END, intact_block
from megatron_distopt.hosts.source.found import (
    ClassFound,
    Need,
    ParserOption,
    PatchPointFound,
    PatchPointState,
    SourceLine,
    Survey,
)
from megatron_distopt.hosts.source.tree import (
    SourceTree,
    UnreadableSourceError,
    bindings_of,
    classes_of,
    flags_added,
    imports_when_loaded,
    methods_of,
    parameters_of,
    required_of,
    resolved,
    values_given,
)

#: Process groups that the adapters ask for where a host has them.
GROUP_FUNCTIONS = (
    "get_data_parallel_group",
    "get_data_parallel_group_gloo",
    "get_sequence_data_parallel_group",
    "get_data_modulo_expert_parallel_group",
    "get_expert_data_parallel_group",
    "get_model_parallel_group",
    "get_tensor_model_parallel_group",
    "get_pipeline_model_parallel_group",
    "get_embedding_group",
)
_PARALLEL_STATE = ("megatron.core.parallel_state", "megatron.mpu.initialize")
_PARSERS = ("megatron.arguments", "megatron.training.arguments")
#: Packages with CUDA kernels.
_KERNELS = ("amp_C", "apex", "transformer_engine")


#: What the adapter of a generation knows about the class that the factory builds.
_FACTS = {MEGATRON_2023.name: megatron_2023, MEGATRON_CORE.name: megatron_core}


def survey(tree: SourceTree) -> Survey:
    """Reads the whole tree.

    Raises:
        UnknownHostError: no generation has these modules.
        UnreadableSourceError: a file that has a patch point, or what belongs to it, cannot be read.
    """
    generation = recognise(tree.has)
    aliases = _find_aliases(tree, [patch_point.attribute for patch_point in generation.patch_points])
    patch_points = (
        replace(
            find_patch_point(tree, patch_point),
            importers=tuple(aliases.importers[patch_point.attribute]),
            assigners=tuple(aliases.assigners[patch_point.attribute]),
        )
        for patch_point in generation.patch_points
    )
    return Survey(
        roots=tuple(map(str, tree.roots)),
        generation=generation,
        patch_points=tuple(patch_points),
        optimizer_class=_find_class(tree, generation),
        group_functions=_find_group_functions(tree),
        options=tuple(_find_options(tree)),
        needs=tuple(_find_needs(tree, generation)),
        unreadable=aliases.unreadable,
    )


def find_patch_point(tree: SourceTree, patch_point: PatchPoint) -> PatchPointFound:
    """Looks for a patch point in the file that defines it; who imports it is left out.

    Raises:
        UnreadableSourceError: that file cannot be read.
    """
    file = tree.file_of(patch_point.module)
    if file is None:
        return PatchPointFound(patch_point, PatchPointState.MISSING)
    module = tree.parse(file)
    ours = _lines_of_our_block(file)
    bindings = [node for node in bindings_of(module, patch_point.attribute) if node.lineno not in ours]
    if not bindings:
        return PatchPointFound(patch_point, PatchPointState.MISSING)
    last = bindings[-1]
    if not isinstance(last, ast.FunctionDef):
        return PatchPointFound(patch_point, PatchPointState.REPLACED, SourceLine(tree.shown(file), last.lineno))
    return PatchPointFound(
        patch_point,
        _state_of(last, patch_point, is_patched=bool(ours)),
        SourceLine(tree.shown(file), last.lineno),
        parameters_of(last),
        is_at_top=last in module.body,
        end=last.end_lineno or last.lineno,
    )


def _state_of(function: ast.FunctionDef, patch_point: PatchPoint, *, is_patched: bool) -> PatchPointState:
    if parameters_of(function)[: len(patch_point.parameters)] != patch_point.parameters:
        return PatchPointState.DIFFERENT
    return PatchPointState.PATCHED if is_patched else PatchPointState.FREE


def _lines_of_our_block(file: Path) -> range:
    content = file.read_bytes()
    if intact_block(content) is None:
        return range(0)
    lines = content.splitlines()
    return range(lines.index(BEGIN.encode()) + 1, lines.index(END.encode()) + 2)


def _find_class(tree: SourceTree, generation: Generation) -> ClassFound | None:
    if generation.name not in _FACTS:
        return None
    facts, factory = _FACTS[generation.name], generation.patch_points[0].module
    file = _file_of_class(tree, factory, facts.CLASS)
    definition = classes_of(tree.parse(file)).get(facts.CLASS) if file is not None else None
    if file is None or definition is None:
        is_bound = file is not None and bool(bindings_of(tree.parse(file), facts.CLASS))
        bound_in = tree.shown(file) if file is not None and is_bound else None
        return ClassFound(facts.CLASS, None, (), (), facts.CLASS_PARAMETERS, bound_in=bound_in)
    methods = methods_of(definition)
    constructor = methods.get("__init__")
    gathers = megatron_2023.GATHERS_STATE in methods
    may_take = megatron_core.CLASS_MAY_TAKE if facts is megatron_core else ()
    return ClassFound(
        facts.CLASS,
        SourceLine(tree.shown(file), definition.lineno),
        parameters_of(constructor)[1:] if constructor else (),
        required_of(constructor)[1:] if constructor else (),
        facts.CLASS_PARAMETERS + tuple(name for name in may_take if constructor and name in parameters_of(constructor)),
        is_exact=facts is megatron_core,
        kind=None if facts is megatron_core else ("gathered file" if gathers else "per-rank files"),
    )


def _file_of_class(tree: SourceTree, factory: str, name: str) -> Path | None:
    """Finds the file of a class that the factory's module imports by name."""
    file = tree.file_of(factory)
    if file is None:
        return None
    package = factory if file.name == "__init__.py" else factory.rpartition(".")[0]
    for node in bindings_of(tree.parse(file), name):
        if isinstance(node, ast.ImportFrom):
            return tree.file_of(resolved(node, package))
        if isinstance(node, ast.ClassDef):
            return file
    return None


def _find_group_functions(tree: SourceTree) -> tuple[str, ...]:
    files = [file for file in map(tree.file_of, _PARALLEL_STATE) if file is not None]
    defined = {node.name for file in files for node in tree.parse(file).body if isinstance(node, ast.FunctionDef)}
    return tuple(name for name in GROUP_FUNCTIONS if name in defined)


def _find_options(tree: SourceTree) -> Iterator[ParserOption]:
    for file in filter(None, map(tree.file_of, _PARSERS)):
        for call, flags in flags_added(tree.parse(file)):
            given = values_given(call)
            name = str(given.get("dest") or flags[0].lstrip("-").replace("-", "_"))
            value = {"store_true": True, "store_false": False}.get(str(given.get("action")))
            place = SourceLine(tree.shown(file), call.lineno)
            yield from (ParserOption(flag, name, value, place, given.get("default")) for flag in flags)


def _find_needs(tree: SourceTree, generation: Generation) -> Iterator[Need]:
    factory = tree.file_of(generation.patch_points[0].module) if generation.patch_points else None
    for file in sorted(factory.parent.glob("*.py")) if factory is not None else ():
        for package, line, is_conditional in imports_when_loaded(tree.parse(file)):
            if package in _KERNELS:
                yield Need(package, SourceLine(tree.shown(file), line), is_conditional)


@dataclass(frozen=True)
class _Aliases:
    """The lines that import a function of the host by value or assign it in another module, in order, by its name.

    Args:
        importers, assigners: of each function.
        unreadable: files that mention a name and could not be read, with the refusal of each.
    """

    importers: dict[str, list[SourceLine]]
    assigners: dict[str, list[SourceLine]]
    unreadable: dict[str, str]


def _find_aliases(tree: SourceTree, names: Sequence[str]) -> _Aliases:
    """Reads every file that mentions one of the names."""
    found = _Aliases({name: [] for name in names}, {name: [] for name in names}, {})
    words = [name.encode() for name in names]
    for file in tree.python_files() if words else ():
        content = _content(file)
        if any(word in content for word in words):
            try:
                _add_aliases(found, tree, file)
            except UnreadableSourceError as error:
                found.unreadable[tree.shown(file)] = str(error)
    return found


def _content(file: Path) -> bytes:
    """Returns the content of a file, or nothing where it cannot be read, such as a dangling link."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def _add_aliases(found: _Aliases, tree: SourceTree, file: Path) -> None:
    module = tree.module_of(file)
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree.parse(file)):
        if isinstance(node, ast.ImportFrom) and resolved(node, package).partition(".")[0] == "megatron":
            places, names = found.importers, [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            places, names = found.assigners, [node.attr]
        else:
            continue
        for name in names:
            if name in places:
                places[name].append(SourceLine(tree.shown(file), node.lineno))
