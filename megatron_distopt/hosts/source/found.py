"""The findings of `survey.py` about a host's source tree, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from megatron_distopt.errors import refusal
from megatron_distopt.hosts.detect import Generation
from megatron_distopt.hosts.patch_points import PatchPoint


@dataclass(frozen=True)
class SourceLine:
    """A line of a file.

    Args:
        file: from the fork's folder.
        line: from 1.
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


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
class PatchPointFound:
    """A patch point, as the source has it.

    Args:
        patch_point: what was looked for.
        state: what it is bound to.
        place: of the function, or of what replaced it; None where it is missing.
        parameters: of the function.
        importers: lines that import it by value, which makes another alias of it.
        assigners: lines that assign it in another module.
        is_at_top: whether the function stands by itself, and not under an `if` or a `try`.
        end: last line of the function.
    """

    patch_point: PatchPoint
    state: PatchPointState
    place: SourceLine | None = None
    parameters: tuple[str, ...] = ()
    importers: tuple[SourceLine, ...] = ()
    assigners: tuple[SourceLine, ...] = ()
    is_at_top: bool = False
    end: int = 0

    def refusal(self) -> str | None:
        """Why it cannot be replaced, None where it can; the same words as `PatchPoint.find` has at run time."""
        remedy = "Use a Megatron that docs/hosts.md lists"
        if self.state is PatchPointState.MISSING:
            return refusal(str(self.patch_point), "missing", "exist", remedy)
        if self.state is PatchPointState.DIFFERENT:
            rule = f"start with ({', '.join(self.patch_point.parameters)})"
            got = f"({', '.join(self.parameters)}) in {self.place}"
            return refusal(f"signature of {self.patch_point}", got, rule, remedy)
        if self.state is PatchPointState.REPLACED:
            remedy = "Take the other patcher out, or install megatron_distopt before it"
            return refusal(str(self.patch_point), f"bound to something else in {self.place}", "be untouched", remedy)
        return None


@dataclass(frozen=True)
class ClassFound:
    """The class that the factory builds.

    Args:
        name: as the factory calls it.
        place: None where the factory imports no such class.
        parameters: of its constructor, without self.
        required: those of them without a default.
        wanted: the parameters that the adapter gives.
        is_exact: whether it may have no others, not even with a default.
        kind: "per-rank files" or "gathered file" in a Megatron of 2023.
        bound_in: file that binds the name to something else than a class; what that is shows only when it runs.
    """

    name: str
    place: SourceLine | None
    parameters: tuple[str, ...]
    required: tuple[str, ...]
    wanted: tuple[str, ...]
    is_exact: bool = True
    kind: str | None = None
    bound_in: str | None = None

    def refusal(self) -> str | None:
        """Why the factory cannot build our class in its place, None where it can."""
        remedy = "Use a Megatron that docs/hosts.md lists"
        if self.place is None:
            return refusal("factory", f"no {self.name} in its module", "know its classes", remedy)
        takes_all = set(self.required) <= set(self.wanted) <= set(self.parameters)
        if self.parameters == self.wanted if self.is_exact else takes_all:
            return None
        got = f"({', '.join(self.parameters)}) in {self.place}"
        rule = f"be ({', '.join(self.wanted)})" if self.is_exact else f"take {', '.join(self.wanted)}"
        return refusal(f"constructor of {self.name}", got, rule, remedy)


@dataclass(frozen=True)
class Need:
    """A package with CUDA kernels, without which the host's optimizer cannot be imported.

    Args:
        package: its importable name.
        place: where it is imported.
        is_conditional: whether an `if` decides, which usually asks for CUDA.
    """

    package: str
    place: SourceLine
    is_conditional: bool


@dataclass(frozen=True)
class ParserOption:
    """A flag of the host's parser.

    Args:
        flag: as it is typed.
        name: in `args`.
        value: what it stores, True or False; None where it takes a value.
        place: where it is added.
        default: what it stores where the flag is not given, as far as the source spells it out.
    """

    flag: str
    name: str
    value: bool | None
    place: SourceLine
    default: object = None


@dataclass(frozen=True)
class Survey:
    """Everything that was found in the source.

    Args:
        roots: the folders that were read.
        generation: which Megatron it is.
        patch_points: the factory first.
        optimizer_class: None where the generation is not supported.
        group_functions: those of `survey.GROUP_FUNCTIONS` that it has.
        options: of its parser; empty where it has none, as megatron-core from PyPI.
        needs: packages with CUDA kernels.
        unreadable: files that could not be read, other than those with a patch point, with the refusal of each.
    """

    roots: tuple[str, ...]
    generation: Generation
    patch_points: tuple[PatchPointFound, ...]
    optimizer_class: ClassFound | None
    group_functions: tuple[str, ...]
    options: tuple[ParserOption, ...]
    needs: tuple[Need, ...]
    unreadable: Mapping[str, str]

    def problems(self) -> tuple[str, ...]:
        """Why files of the host's own package cannot be read; files beside it may be of no use for training."""
        return tuple(reason for file, reason in self.unreadable.items() if file.startswith("megatron/"))
