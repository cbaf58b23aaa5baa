"""What the adapters need to know about a host, read from its source without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from megatron_distopt.hosts.detect import MEGATRON_2023, MEGATRON_CORE, Generation, recognise
from megatron_distopt.hosts.megatron_2023 import forks as megatron_2023
from megatron_distopt.hosts.megatron_core import facts as megatron_core
from megatron_distopt.hosts.patch_points import PatchPoint
from megatron_distopt.hosts.source.block import BEGIN, END, intact_block
from megatron_distopt.hosts.source.tree import (
    SourceTree,
    bindings_of,
    classes_of,
    methods_of,
    parameters_of,
    required_of,
    resolved,
)

_REMEDY = "Use a Megatron that docs/hosts.md lists."


class PatchPointState(Enum):
    """The states of a patch point in the source."""

    #: The host's own function, as the host defines it.
    FREE = "free"
    #: The host's own function, with our entry-point block after it.
    PATCHED = "patched"
    #: Something else is bound to the name after the function.
    REPLACED = "replaced"
    #: The host's own function, with other parameters than the adapter gives.
    DIFFERENT = "different"
    #: No function of that name.
    MISSING = "missing"


@dataclass(frozen=True)
class PatchPointInSource:
    """A patch point, as the source has it."""

    patch_point: PatchPoint
    state: PatchPointState
    place: str = ""  # file and line of the function, or of what replaced it
    parameters: tuple[str, ...] = ()
    is_at_top: bool = False  # whether the function stands by itself, and not under an `if` or a `try`
    end: int = 0  # last line of the function

    def refusal(self) -> str | None:
        """Says why it cannot be replaced; None where it can."""
        if self.state is PatchPointState.MISSING:
            return f"{self.patch_point} is missing. {_REMEDY}"
        if self.state is PatchPointState.DIFFERENT:
            rule = f"its signature must start with ({', '.join(self.patch_point.parameters)})"
            return f"{self.patch_point} in {self.place} takes ({', '.join(self.parameters)}); {rule}. {_REMEDY}"
        if self.state is PatchPointState.REPLACED:
            remedy = "Take the other patcher out, or install megatron_distopt before it"
            return f"{self.patch_point} is bound to something else in {self.place}. {remedy}."
        return None


@dataclass(frozen=True)
class ClassInSource:
    """The class that the factory builds, as the source has it."""

    name: str  # as the factory calls it
    place: str  # file and line; empty where the factory imports no such class
    parameters: tuple[str, ...]  # of its constructor, without self
    required: tuple[str, ...]  # those of them without a default
    wanted: tuple[str, ...]  # the parameters that the adapter gives
    is_exact: bool = True  # whether it may have no others, not even with a default
    files: str = ""  # "per-rank files" or "gathered file" in a Megatron of 2023
    bound_in: str = ""  # file that binds the name to something else than a class, which shows only when it runs

    def refusal(self) -> str | None:
        """Says why the factory cannot build our class in its place; None where it can."""
        if not self.place:
            return f"The module of the factory has no {self.name}. {_REMEDY}"
        takes_all = set(self.required) <= set(self.wanted) <= set(self.parameters)
        if self.parameters == self.wanted if self.is_exact else takes_all:
            return None
        rule = f"must {'be' if self.is_exact else 'take'} ({', '.join(self.wanted)})"
        found = f"The constructor of {self.name} in {self.place} has ({', '.join(self.parameters)})"
        return f"{found}; its parameters {rule}. {_REMEDY}"


@dataclass(frozen=True)
class ParserOption:
    """A flag of the host's parser."""

    flag: str  # as it is typed
    name: str  # in `args`
    value: bool | None  # what it stores; None where it takes a value
    place: str


@dataclass(frozen=True)
class Survey:
    """Everything that was found in the source."""

    roots: tuple[str, ...]
    generation: Generation
    patch_points: tuple[PatchPointInSource, ...]  # the factory first
    optimizer_class: ClassInSource | None  # None where the generation is not supported
    options: tuple[ParserOption, ...]  # of its parser; empty where it has none, as megatron-core from PyPI


def survey(tree: SourceTree) -> Survey:
    """Reads the files that the adapter depends on.

    Raises:
        UnknownHostError: no generation has these modules.
        UnreadableSourceError: one of the files cannot be read.
    """
    generation = recognise(tree.has)
    return Survey(
        roots=tuple(map(str, tree.roots)),
        generation=generation,
        patch_points=tuple(find_patch_point(tree, patch_point) for patch_point in generation.patch_points),
        optimizer_class=_find_class(tree, generation),
        options=tuple(_find_options(tree)),
    )


def find_patch_point(tree: SourceTree, patch_point: PatchPoint) -> PatchPointInSource:
    """Looks for a patch point in the file that defines it.

    Raises:
        UnreadableSourceError: that file cannot be read.
    """
    file = tree.file_of(patch_point.module)
    if file is None:
        return PatchPointInSource(patch_point, PatchPointState.MISSING)
    module, content = tree.parse(file), file.read_bytes()
    ours = range(0)
    if intact_block(content) is not None:
        lines = content.splitlines()
        ours = range(lines.index(BEGIN.encode()) + 1, lines.index(END.encode()) + 2)
    bindings = [node for node in bindings_of(module, patch_point.attribute) if node.lineno not in ours]
    if not bindings:
        return PatchPointInSource(patch_point, PatchPointState.MISSING)
    last = bindings[-1]
    place = tree.shown(file, last.lineno)
    if not isinstance(last, ast.FunctionDef):
        return PatchPointInSource(patch_point, PatchPointState.REPLACED, place)
    parameters = parameters_of(last)
    state = PatchPointState.PATCHED if ours else PatchPointState.FREE
    if parameters[: len(patch_point.parameters)] != patch_point.parameters:
        state = PatchPointState.DIFFERENT
    end = last.end_lineno or last.lineno
    return PatchPointInSource(patch_point, state, place, parameters, is_at_top=last in module.body, end=end)


def _find_class(tree: SourceTree, generation: Generation) -> ClassInSource | None:
    """Finds the class that the factory's module imports or defines, and what its constructor takes."""
    if generation not in (MEGATRON_2023, MEGATRON_CORE):
        return None
    is_core = generation is MEGATRON_CORE
    facts = megatron_core if is_core else megatron_2023
    file = _file_of_class(tree, generation.factory.module, facts.CLASS)
    module = tree.parse(file) if file is not None else ast.Module(body=[], type_ignores=[])
    definition = classes_of(module).get(facts.CLASS)
    if file is None or definition is None:
        bound_in = tree.shown(file) if file is not None and bindings_of(module, facts.CLASS) else ""
        return ClassInSource(facts.CLASS, "", (), (), facts.CLASS_PARAMETERS, bound_in=bound_in)
    methods = methods_of(definition)
    constructor = methods.get("__init__")
    parameters = parameters_of(constructor)[1:] if constructor else ()
    may_take = megatron_core.CLASS_MAY_TAKE if is_core else ()
    gathers = megatron_2023.GATHERS_STATE in methods
    return ClassInSource(
        facts.CLASS,
        tree.shown(file, definition.lineno),
        parameters,
        required_of(constructor)[1:] if constructor else (),
        facts.CLASS_PARAMETERS + tuple(name for name in may_take if name in parameters),
        is_exact=is_core,
        files="" if is_core else "gathered file" if gathers else "per-rank files",
    )


def _file_of_class(tree: SourceTree, factory: str, name: str) -> Path | None:
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


def _find_options(tree: SourceTree) -> Iterator[ParserOption]:
    for file in filter(None, map(tree.file_of, ("megatron.arguments", "megatron.training.arguments"))):
        for call in ast.walk(tree.parse(file)):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
                words = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
                flags = [word for word in words if isinstance(word, str) and word.startswith("--")]
                given = {each.arg: each.value.value for each in call.keywords if isinstance(each.value, ast.Constant)}
                value = {"store_true": True, "store_false": False}.get(str(given.get("action")))
                for flag in flags:
                    name = str(given.get("dest") or flags[0].lstrip("-").replace("-", "_"))
                    yield ParserOption(flag, name, value, tree.shown(file, call.lineno))
