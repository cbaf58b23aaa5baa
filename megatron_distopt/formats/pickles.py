"""Pickles of other software, read without executing anything that they say, and written again.

`torch.load(weights_only=True)` makes tensors and plain values. What else a file names must be on
the lists below; each name is replaced by a stand-in that only keeps what it is given: an `Inert`,
which can be read, and written again only where it stands for an enum in the arguments of a run.
"""

from __future__ import annotations

import argparse
import io
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import torch

from megatron_distopt.checkpoint import disk
from megatron_distopt.errors import CheckpointError

#: How Python 3.11.0 to 3.11.3 pickles a member of an enum, by its name; other versions call the
#: class with the value.
_BY_NAME = "builtins.getattr"
#: Modules that torch refuses, whatever is allowed.
_BLOCKED = ("sys.", "os.", "posix.", "nt.")
#: Classes below these names become an `Inert`, whatever the version of the software calls them.
_PACKAGES = ("deepspeed.", "megatron.")
#: The same for single names: arguments of a run, random states, and how new pickles refer to
#: devices and paths.
_NAMES = (
    "types.SimpleNamespace",
    "_io.BytesIO",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",  # in Python 3.13
    "signal.Signals",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "_codecs.encode",
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
        "pathlib._local.PosixPath",  # in Python 3.13
    )
)
_REMEDY = (
    "Give a file that the training wrote, unchanged, or start from the weights with "
    "--no-load-optim."
)


class Inert:
    """Stands for an object of a class that is not looked for; keeps the arguments that its class is
    called with."""

    stands_for: ClassVar[str] = "an object"
    arguments: tuple[Any, ...] = ()

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, Mapping) else {"state": state})

    def __reduce__(self) -> tuple[type[Inert], tuple[Any, ...]]:
        """Pickles it like a member of an enum, by its value; `_Pickler` refuses all other
        stand-ins."""
        return type(self), self.arguments


@dataclass(frozen=True)
class _NamedMember:
    """A member of an enum that is pickled by its name: stands in the place of `getattr`."""

    of: Any  # a subclass of Inert
    name: str

    def __post_init__(self) -> None:
        if not (
            isinstance(self.of, type) and issubclass(self.of, Inert) and isinstance(self.name, str)
        ):
            raise ValueError("it asks for an attribute of something that is not an enum")

    def __reduce__(self) -> tuple[Any, tuple[Any, str]]:
        return getattr, (self.of, self.name)


#: Enums in the arguments that a fork saves, which are written again.
_ENUMS = (
    "megatron.core.enums.ModelType",  # args.model_type since 23.04
    "megatron.model.enums.ModelType",  # the same before
    # args.position_embedding_type of bigcode and epfLLM
    "megatron.model.enums.PositionEmbeddingType",
    "megatron.enums.PositionEmbeddingType",  # the same in bigscience
)
_DTYPES = ("bool", "uint8", "uint32", "int32", "int64", "float32", "float64")
_RECONSTRUCT = numpy.zeros(1).__reduce__()[0]
#: What a file that is written again names in addition to tensors; each only makes a value.
_WRITABLE: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace,  # the arguments of the run
    _BY_NAME: _NamedMember,
    # numpy's random state is an array of uint32; numpy 2 has moved the function that makes one.
    "numpy.core.multiarray._reconstruct": _RECONSTRUCT,
    "numpy._core.multiarray._reconstruct": _RECONSTRUCT,
    "numpy.ndarray": numpy.ndarray,
    "numpy.dtype": numpy.dtype,
    # Files do not name the classes of its instances, which torch asks for.
    **{f"numpy.dtypes.{type(each).__name__}": type(each) for each in map(numpy.dtype, _DTYPES)},
}


def attribute(thing: Any, name: str, default: Any = None) -> Any:
    """An attribute of an object in the file; the default where it has none."""
    return (
        vars(thing).get(name, default)
        if isinstance(thing, (Inert, argparse.Namespace))
        else default
    )


def as_number(thing: Any) -> Any:
    """A number, from itself or from a tensor with one element."""
    return thing.item() if torch.is_tensor(thing) and thing.numel() == 1 else thing


def load_file(source: Path | io.BytesIO, what: str = "") -> Any:
    """Reads a file of another software, or of `save_whole`; tensors are read when their values are
    used.

    `what` names the source in errors, if it is in memory already.
    """
    what = what or f"File {source}"
    try:
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(source))
        stand_ins = list(_stand_ins(names, what))
        if isinstance(source, io.BytesIO):
            source.seek(0)
        with _named(stand_ins):
            return torch.load(
                source, map_location="cpu", weights_only=True, mmap=isinstance(source, Path)
            )
    except CheckpointError:
        raise
    # torch's text goes on with the advice to execute what the file says
    except pickle.UnpicklingError as error:
        said = re.search(r"WeightsUnpickler error: *(.*)", str(error))
        raise _strange(
            what,
            said[1].rstrip(". ") if said else "it asks for something that is not a plain value",
        ) from error
    except Exception as error:  # whatever a damaged or malicious file makes torch raise
        first_line = (str(error) or repr(error)).splitlines()[0].rstrip(". ")
        raise CheckpointError(
            f"{what} is damaged: reading it failed with {first_line}. {_REMEDY}"
        ) from error


@contextmanager
def _named(stand_ins: Sequence[tuple[Any, str]]) -> Iterator[None]:
    """Makes torch find the stand-ins under their names, and nothing else there.

    megatron-core makes its own enums known to torch when it is imported, and of two things with one
    name torch finds either. What was known before is known again afterwards.
    """
    known, ours = torch.serialization.get_safe_globals(), {name for _, name in stand_ins}
    names = [
        each[1] if isinstance(each, tuple) else f"{each.__module__}.{each.__qualname__}"
        for each in known
    ]
    others = [each for each, name in zip(known, names, strict=True) if name not in ours]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*others, *stand_ins])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(known)


def _stand_ins(names: Iterable[str], what: str) -> Iterator[tuple[Any, str]]:
    """What torch finds under the names in a file."""
    yield from ((each, name) for name, each in _WRITABLE.items())
    # torch leaves out names that megatron-core has made known to it
    for name in dict.fromkeys((*_ENUMS, *names)):
        if name in _WRITABLE:
            continue
        if name in _NAMES or name.startswith(_PACKAGES):
            yield type("Inert", (Inert,), {"stands_for": name}), name
        else:
            allow = (
                "If you trust it, convert it in Python after "
                f"torch.serialization.add_safe_globals([{name}])."
            )
            raise _strange(
                what, f"it names {name}", _REMEDY if name.startswith(_BLOCKED) else allow
            )


def _strange(what: str, got: str, remedy: str = _REMEDY) -> CheckpointError:
    return CheckpointError(
        f"{what} is refused because {got}. It may hold only tensors, plain values, and what "
        f"Megatron and DeepSpeed save. {remedy}"
    )


class _MetadataUnpickler(pickle.Unpickler):
    """Finds no function, and no class but a stand-in, torch.Size and torch's dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in _METADATA:
            return Inert
        if f"{module}.{name}" == _BY_NAME:
            return _NamedMember
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def load_metadata(path: Path) -> Inert:
    try:
        with open(path, "rb") as file:
            found = _MetadataUnpickler(file).load()
            if isinstance(found, Inert):
                return found
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
    except Exception as error:  # whatever damaged bytes make an unpickler raise
        got = (
            error
            if isinstance(error, pickle.UnpicklingError)
            else f"reading it failed with {error!r}"
        )
        raise CheckpointError(
            f"File {path} is not the metadata of a torch checkpoint: {got}. {_REMEDY}"
        ) from error


@contextmanager
def understood(
    where: Path, rule: str, remedy: str = "Give a checkpoint as it was written"
) -> Iterator[None]:
    """Turns what missing keys and other types raise into a `CheckpointError`, which goes on with
    "It must {rule}. {remedy}."
    """
    try:
        yield
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"Checkpoint {where} could not be understood: {type(error).__name__}({error}). It must "
            f"{rule}. {remedy}."
        ) from error


def save_whole(state: Mapping[Any, Any], path: Path) -> None:
    """Writes a file as the fork would; complete or not at all."""
    unfinished, writer = path.with_name(f"{path.name}.unfinished"), disk.Writer(io.BytesIO())
    try:
        disk.make_folder(path.parent)
        disk.remove(unfinished)
        with disk.written(unfinished) as writer.file:
            # it asks for `write` and `flush`
            torch.save(state, writer, pickle_module=_PICKLE)  # type: ignore[arg-type]
        disk.replace(unfinished, path)
    except (OSError, RuntimeError, pickle.PicklingError) as error:
        with suppress(OSError):
            disk.remove(unfinished)
        is_content = isinstance(error, pickle.PicklingError)
        remedy = (
            "Convert to distopt or torch."
            if is_content
            else "Free space there, or write elsewhere."
        )
        raise CheckpointError(
            f"File {path} cannot be written: {writer.error or error}. {remedy}"
        ) from error


class _Pickler(pickle._Pickler):  # the pickler in Python, because the one in C cannot be extended
    """Writes enums of a fork by the names of their classes, and refuses other stand-ins."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if not (isinstance(obj, type) and issubclass(obj, Inert)):
            super().save_global(obj, name)  # type: ignore[misc]
        elif obj.stands_for not in _ENUMS:
            raise pickle.PicklingError(
                f"{obj.stands_for} was not read, so it cannot be written again"
            )
        else:
            self.write(pickle.GLOBAL + "{}\n{}\n".format(*obj.stands_for.rsplit(".", 1)).encode())  # type: ignore[attr-defined]
            self.memoize(obj)  # type: ignore[attr-defined]


#: What `torch.save` asks of a pickle module.
_PICKLE = SimpleNamespace(Pickler=_Pickler, dumps=pickle.dumps, __name__=pickle.__name__)
