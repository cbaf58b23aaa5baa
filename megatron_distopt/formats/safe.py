"""Reading and writing the pickles of a fork without executing what they say.

`torch.load(weights_only=True)` calls nothing but what is listed here. A member of one of the fork's enums becomes an
`EnumMember`, which knows its class by name only and is written as what it was, so that the fork need not be installed.
"""

from __future__ import annotations

import argparse
import io
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, ClassVar

import torch

from megatron_distopt.checkpoint import disk
from megatron_distopt.errors import CheckpointError, refusal

__all__ = ["EnumClass", "EnumMember", "load_safely", "save_whole"]

_REMEDY = "Give a file that a Megatron wrote, undamaged"


@dataclass(frozen=True)
class EnumClass:
    """An enum of a fork, by name; calling it gives one of its members."""

    module: str
    name: str

    def __call__(self, value: object) -> EnumMember:
        return EnumMember(self, value)


@dataclass(frozen=True)
class EnumMember:
    """A member of an enum of a fork."""

    of: EnumClass
    value: object

    def __reduce__(self) -> tuple[EnumClass, tuple[object]]:
        return self.of, (self.value,)


@dataclass(frozen=True)
class NamedMember:
    """A member of an enum of a fork of which a file says the name and not the value, as Python 3.11.0 to 3.11.3 does.

    Args:
        of: its class; anything else is what `getattr` must not be asked of.
        name: of the member.
    """

    of: EnumClass
    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.of, EnumClass) or not isinstance(self.name, str):
            raise ValueError("it asks for an attribute of something that is no enum")

    def __reduce__(self) -> tuple[Any, tuple[EnumClass, str]]:
        return getattr, (self.of, self.name)


#: Enums in the arguments that a fork saves.
_ENUMS = (
    EnumClass("megatron.core.enums", "ModelType"),  # args.model_type since 23.04
    EnumClass("megatron.model.enums", "ModelType"),  # the same before
    EnumClass("megatron.model.enums", "PositionEmbeddingType"),  # args.position_embedding_type of bigcode and epfLLM
    EnumClass("megatron.enums", "PositionEmbeddingType"),  # the same in bigscience
)


def _allowed() -> Iterator[tuple[Any, str]]:
    """What a file may name in addition to tensors, with the names; each only makes a value."""
    yield argparse.Namespace, "argparse.Namespace"  # the arguments of the run
    yield from ((each, f"{each.module}.{each.name}") for each in _ENUMS)
    yield NamedMember, "builtins.getattr"
    try:
        numpy = import_module("numpy")
    except ImportError:  # then this run cannot have the arrays of numpy's random state, and says so
        return
    reconstruct = numpy.zeros(1).__reduce__()[0]
    # numpy's random state is an array of uint32; numpy 2 has moved the function that makes one.
    yield reconstruct, "numpy.core.multiarray._reconstruct"
    yield reconstruct, "numpy._core.multiarray._reconstruct"
    yield numpy.ndarray, "numpy.ndarray"
    yield numpy.dtype, "numpy.dtype"
    yield type(numpy.dtype("uint32")), "numpy.dtypes.UInt32DType"


def load_safely(path: Path) -> Any:
    """What a file holds; tensors are read from the disk when their values are used, and are on the CPU.

    Raises:
        CheckpointError: it is missing or damaged, or names something that is not in the list above.
    """
    try:
        with _safe_globals():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged or malicious file makes torch raise
        raise CheckpointError(_refused(f"file {path}", str(error) or repr(error))) from error


def _refused(what: str, text: str) -> str:
    """torch's own text goes on with the advice to execute what the file says."""
    rule, remedy = "name nothing but tensors, plain values and what Megatron saves", _REMEDY
    named = re.search(r"GLOBAL (\S+)", text)
    if named is not None and "was not an allowed global" in text:
        remedy = f"If you trust it, convert it in Python after torch.serialization.add_safe_globals([{named[1]}])"
    if named is not None:
        return refusal(what, f"it names {named[1]}", rule, remedy)
    unsafe = re.search(r"WeightsUnpickler error: *(.*)", text)
    if unsafe is not None:
        return refusal(what, unsafe[1].rstrip(". "), rule, remedy)
    return refusal(what, f"{text.splitlines()[0].rstrip('. ')} while reading it", "be readable", remedy)


def _safe_globals() -> Any:
    """Allows the list for the time of one load; what the user has allowed stays so."""
    if not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"):
        got, rule = torch.__version__, "be at least 2.6, which can be told what a file may name"
        raise CheckpointError(refusal("torch for reading a fork's files", got, rule, "Convert with a newer torch"))
    known = torch.serialization.get_safe_globals()
    return torch.serialization.safe_globals([each for each in _allowed() if each not in known])


def save_whole(state: Mapping[Any, Any], path: Path) -> None:
    """Writes a file as the fork would; complete or not at all.

    Raises:
        CheckpointError: the disk is full, or fails.
    """
    unfinished, writer = path.with_name(f"{path.name}.unfinished"), _Writer()
    try:
        disk.make_folder(path.parent)
        disk.remove(unfinished)
        with disk.written(unfinished) as writer.file:
            torch.save(state, writer, pickle_module=_PICKLE)  # type: ignore[arg-type]  # it asks for `write` and `flush`
        disk.replace(unfinished, path)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            disk.remove(unfinished)
        rule, remedy = "be writable", "Free space there, or write elsewhere"
        raise CheckpointError(refusal(f"file {path}", writer.error or error, rule, remedy)) from error


class _Writer:
    """Keeps the error of the disk, which `torch.save` replaces by one about a position in the file."""

    def __init__(self) -> None:
        self.file: BinaryIO = io.BytesIO()
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Appends."""
        try:
            disk.write(self.file, data)
        except OSError as error:
            self.error = error
            raise
        return memoryview(data).nbytes

    def flush(self) -> None:
        """`disk.written` flushes once at the end."""


class _Pickler(pickle._Pickler):  # Python's own, because C's cannot be taught another class
    """Writes an enum of a fork by the name of its class."""

    def _save_enum(self, each: EnumClass) -> None:
        self.write(pickle.GLOBAL + f"{each.module}\n{each.name}\n".encode())  # type: ignore[attr-defined]
        self.memoize(each)  # type: ignore[attr-defined]

    dispatch: ClassVar[dict[type, Any]] = {**pickle._Pickler.dispatch, EnumClass: _save_enum}


#: What `torch.save` asks of a pickle module.
_PICKLE = SimpleNamespace(Pickler=_Pickler, dumps=pickle.dumps, __name__=pickle.__name__)
