"""Pickles of other software: read without executing anything that they say, and written as they were.

`torch.load(weights_only=True)` calls nothing but what is given to it here. The software need not be installed, because
its classes are never looked for. What stands for their objects depends on whether a file is written again:

- `load_kept` is for the forks of 2023. What their files may name is a short list. Arguments and random states are what
  they were; a member of one of the fork's enums knows its class by name, and `save_whole` writes it as what it was.
- `load_file` and `load_bytes` are for everything else. An object of Megatron or DeepSpeed becomes an `Inert`, which
  keeps what the file says of it and can do nothing.
"""

from __future__ import annotations

import argparse
import io
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, ClassVar

import torch

from megatron_distopt.checkpoint import disk
from megatron_distopt.errors import CheckpointError, refusal

#: How Python 3.11.0 to 3.11.3 pickles a member of an enum, by its name; other versions call the class with the value.
_BY_NAME = "builtins.getattr"
#: Modules that torch refuses, whatever is allowed.
_BLOCKED = ("sys.", "os.", "posix.", "nt.")
#: Classes below these names become an `Inert`, whatever the version of the software calls them.
_PACKAGES = ("deepspeed.", "megatron.")
#: The same for single names: arguments of a run, random states, and how new pickles refer to devices and paths.
_NAMES = frozenset(
    (
        "argparse.Namespace",
        "types.SimpleNamespace",
        "_io.BytesIO",
        "pathlib.Path",
        "pathlib.PosixPath",
        "signal.Signals",
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
        "numpy.ndarray",
        "numpy.dtype",
        "numpy.dtypes.UInt32DType",
        "numpy.dtypes.Int64DType",
        "numpy.dtypes.Float64DType",
        "_codecs.encode",
    )
)
#: What `.metadata` of a distributed checkpoint of torch consists of.
_METADATA = frozenset(
    (
        "torch.distributed.checkpoint.metadata.Metadata",
        "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
        "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
        "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
        "torch.distributed.checkpoint.metadata.TensorProperties",
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.metadata.MetadataIndex",
        "torch.distributed.checkpoint.metadata.StorageMeta",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        # megatron-core leaves the plans of its ranks in, and before 0.15 shapes of its own.
        "torch.distributed.checkpoint.planner.SavePlan",
        "torch.distributed.checkpoint.planner.WriteItem",
        "torch.distributed.checkpoint.planner.WriteItemType",
        "torch.distributed.checkpoint.planner.TensorWriteData",
        "torch.distributed.checkpoint.planner.BytesIOWriteData",
        "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
        "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
        # torch 2.3 and before keep the properties of its older sharded tensors.
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
        "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        "torch.serialization._get_layout",
        "pathlib.PosixPath",
    )
)


class Inert:
    """Stands for an object of a class that is not looked for.

    Args:
        arguments: that its class would have been called with.
    """

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, Mapping) else {"state": state})


class _InertMember(Inert):
    """A member of an enum that is pickled by its name: stands in the place of `getattr`."""

    def __init__(self, of: Any, name: str) -> None:
        super().__init__(name)


def attribute(thing: Any, name: str, default: Any = None) -> Any:
    """What the file says of an object; the default where it says nothing."""
    return vars(thing).get(name, default) if isinstance(thing, Inert) else default


def as_number(thing: Any) -> Any:
    """A number, from itself, a tensor with one element, or the member of an enum; its name where a file says that."""
    if isinstance(thing, Inert):
        return next(iter(attribute(thing, "arguments", ())), None)
    return thing.item() if torch.is_tensor(thing) and thing.numel() == 1 else thing


@dataclass(frozen=True)
class _EnumClass:
    """An enum of a fork, by name; calling it gives one of its members."""

    module: str
    name: str

    def __call__(self, value: object) -> _EnumMember:
        return _EnumMember(self, value)


@dataclass(frozen=True)
class _EnumMember:
    """A member of an enum of a fork that is pickled by its value."""

    of: _EnumClass
    value: object

    def __reduce__(self) -> tuple[_EnumClass, tuple[object]]:
        return self.of, (self.value,)


@dataclass(frozen=True)
class _NamedMember:
    """A member of an enum of a fork that is pickled by its name: stands in the place of `getattr`."""

    of: _EnumClass
    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.of, _EnumClass) or not isinstance(self.name, str):
            raise ValueError("it asks for an attribute of something that is no enum")

    def __reduce__(self) -> tuple[Any, tuple[_EnumClass, str]]:
        return getattr, (self.of, self.name)


#: Enums in the arguments that a fork saves.
_ENUMS = (
    _EnumClass("megatron.core.enums", "ModelType"),  # args.model_type since 23.04
    _EnumClass("megatron.model.enums", "ModelType"),  # the same before
    _EnumClass("megatron.model.enums", "PositionEmbeddingType"),  # args.position_embedding_type of bigcode and epfLLM
    _EnumClass("megatron.enums", "PositionEmbeddingType"),  # the same in bigscience
)


def _kept(_: Iterable[str]) -> Iterator[tuple[Any, str]]:
    """What a file that is written again may name in addition to tensors; each only makes a value."""
    yield argparse.Namespace, "argparse.Namespace"  # the arguments of the run
    yield from ((each, f"{each.module}.{each.name}") for each in _ENUMS)
    yield _NamedMember, _BY_NAME
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


def _inert(names: Iterable[str]) -> Iterator[tuple[Any, str]]:
    """The same for a file that is only read."""
    yield _InertMember, _BY_NAME
    yield from ((Inert, name) for name in names if name in _NAMES or name.startswith(_PACKAGES))


@dataclass(frozen=True)
class _Reading:
    """What a file may name.

    Args:
        stand_ins: from the names in a file to what may be there and stands for it, each with its name.
        rule: what a file must be, for errors.
        remedy: what to do about another one.
    """

    stand_ins: Callable[[Iterable[str]], Iterator[tuple[Any, str]]]
    rule: str
    remedy: str

    def refused(self, what: str, got: str, rule: str = "", remedy: str = "") -> CheckpointError:
        """The error for a file."""
        return CheckpointError(refusal(what, got, rule or self.rule, remedy or self.remedy))

    def load(self, source: Path | io.BytesIO, what: str) -> Any:
        """What `torch.save` wrote; tensors are on the CPU, those of a file are read when their values are used.

        Raises:
            CheckpointError: it cannot be read, or names what has no stand-in.
        """
        if not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"):
            rule, remedy = "be at least 2.6, which can say what a file names", "Convert with a newer torch"
            raise self.refused("torch", torch.__version__, rule, remedy)
        try:
            names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(source))
            allowed = list(self.stand_ins(names))
            self._check_names(names, {name for _, name in allowed}, what)
            if isinstance(source, io.BytesIO):
                source.seek(0)
            known = torch.serialization.get_safe_globals()  # by the user, which stays so
            with torch.serialization.safe_globals([each for each in allowed if each not in known]):
                return torch.load(source, map_location="cpu", weights_only=True, mmap=isinstance(source, Path))
        except CheckpointError:
            raise
        except pickle.UnpicklingError as error:  # torch's text goes on with the advice to execute what the file says
            said = re.search(r"WeightsUnpickler error: *(.*)", str(error))
            raise self.refused(what, said[1].rstrip(". ") if said else "it asks for more") from error
        except Exception as error:  # whatever a damaged or malicious file makes torch raise
            first_line = (str(error) or repr(error)).splitlines()[0].rstrip(". ")
            raise self.refused(what, f"{first_line} while reading it", "be readable") from error

    def _check_names(self, names: Iterable[str], allowed: set[str], what: str) -> None:
        foreign = next((name for name in names if name not in allowed), None)
        if foreign is not None:
            allow = f"If you trust it, convert it in Python after torch.serialization.add_safe_globals([{foreign}])"
            remedy = self.remedy if foreign.startswith(_BLOCKED) else allow
            raise self.refused(what, f"it names {foreign}", remedy=remedy)


_KEPT = _Reading(
    _kept,
    "name nothing but tensors, plain values and what Megatron saves",
    "Give a file that a Megatron wrote, undamaged",
)
_INERT = _Reading(
    _inert,
    "hold tensors, plain values, and what Megatron and DeepSpeed save",
    "Give a file that the training wrote, unchanged",
)


def load_kept(path: Path) -> Any:
    """Reads a file of a fork of 2023 or of `save_whole` that may be written again.

    Raises:
        CheckpointError: it cannot be read, or names what is not in the list above.
    """
    return _KEPT.load(path, f"file {path}")


def load_file(path: Path) -> Any:
    """Reads a file of any other software.

    Raises:
        CheckpointError: it cannot be read, or names more than tensors, plain values and classes.
    """
    return _INERT.load(path, f"file {path}")


def load_bytes(data: bytes, what: str) -> Any:
    """Reads from memory what `load_file` reads from a file; errors call it `what`."""
    return _INERT.load(io.BytesIO(data), what)


class _MetadataUnpickler(pickle.Unpickler):
    """Finds no function, and no class but a stand-in, torch.Size and torch's dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        """Called for every name in a pickle."""
        if f"{module}.{name}" in _METADATA:
            return Inert
        if f"{module}.{name}" == _BY_NAME:
            return _InertMember
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def load_metadata(path: Path) -> Inert:
    """The `.metadata` of a distributed checkpoint of torch.

    Raises:
        CheckpointError: it cannot be read, or names anything that such a file does not need.
    """
    rule = "be the metadata of a torch checkpoint"
    try:
        with open(path, "rb") as file:
            found = _MetadataUnpickler(file).load()
    except Exception as error:  # whatever damaged bytes make an unpickler raise
        got = error if isinstance(error, pickle.UnpicklingError) else f"{error!r} while reading it"
        raise _INERT.refused(f"file {path}", str(got), rule) from error
    if not isinstance(found, Inert):
        raise _INERT.refused(f"file {path}", f"a {type(found).__name__}", rule)
    return found


@contextmanager
def understood(where: Path, rule: str) -> Iterator[None]:
    """Turns what strange content leads to into a refusal.

    Args:
        where: path of the checkpoint.
        rule: what its content must be.

    Raises:
        CheckpointError: the block raised it, or raised what missing keys and other types lead to.
    """
    try:
        yield
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        got, remedy = f"{type(error).__name__}({error}) while reading it", "Give a checkpoint as it was written"
        raise CheckpointError(refusal(f"checkpoint {where}", got, rule, remedy)) from error


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

    def _save_enum(self, each: _EnumClass) -> None:
        self.write(pickle.GLOBAL + f"{each.module}\n{each.name}\n".encode())  # type: ignore[attr-defined]
        self.memoize(each)  # type: ignore[attr-defined]

    dispatch: ClassVar[dict[type, Any]] = {**pickle._Pickler.dispatch, _EnumClass: _save_enum}


#: What `torch.save` asks of a pickle module.
_PICKLE = SimpleNamespace(Pickler=_Pickler, dumps=pickle.dumps, __name__=pickle.__name__)
