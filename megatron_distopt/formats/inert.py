"""Pickles of other software, read without executing anything that they say.

What a file calls a class of Megatron or DeepSpeed becomes an `Inert`: it keeps what the file says of the object and can
do nothing. The class itself is never looked for, so that the software need not be installed.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_distopt.errors import CheckpointError, refusal

__all__ = ["Inert", "as_number", "attribute", "load_bytes", "load_file", "load_metadata", "understood"]

_REMEDY = "Give a file that the training wrote, unchanged"
#: Classes below these names become an `Inert`, whatever the version of the software calls them.
_PACKAGES = ("deepspeed.", "megatron.")
#: What an `InertMember` stands for.
_BY_NAME = "builtins.getattr"
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
        _BY_NAME,
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


class InertMember(Inert):
    """A member of an enum whose pickle says its name and not its value, as that of Python 3.11.0 to 3.11.3 does: by
    `getattr`, in whose place this is.
    """

    def __init__(self, of: Any, name: str) -> None:
        super().__init__(name)


def attribute(thing: Any, name: str, default: Any = None) -> Any:
    """What the file says of an object; the default where it says nothing."""
    return vars(thing).get(name, default) if isinstance(thing, Inert) else default


def as_number(thing: Any) -> Any:
    """A number, from itself, a tensor with one element, or the member of an enum; of an `InertMember` its name."""
    if isinstance(thing, Inert):
        return next(iter(attribute(thing, "arguments", ())), None)
    return thing.item() if torch.is_tensor(thing) and thing.numel() == 1 else thing


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
        got = f"{type(error).__name__}({error}) while reading it"
        raise CheckpointError(
            refusal(f"checkpoint {where}", got, rule, "Give a checkpoint as it was written")
        ) from error


def load_file(path: Path) -> Any:
    """What `torch.save` wrote; tensors are on the CPU and are read from the disk when they are used.

    Raises:
        CheckpointError: it cannot be read, or names what is neither a tensor, a plain value, nor a class that can be
            left out.
    """
    return _load(path, f"file {path}", mmap=zipfile.is_zipfile(path))


def load_bytes(data: bytes, what: str) -> Any:
    """The same from memory.

    Args:
        data: as `torch.save` wrote it.
        what: it is, for errors.

    Raises:
        CheckpointError: as of `load_file`.
    """
    return _load(io.BytesIO(data), what, mmap=False)


def _load(source: Any, what: str, *, mmap: bool) -> Any:
    if not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"):
        rule = "be 2.6 or later, which can say what a file names"
        raise CheckpointError(refusal("torch", torch.__version__, rule, "Convert with a later torch"))
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(source)
        _check_names(unknown, what)
        if isinstance(source, io.BytesIO):
            source.seek(0)
        with _stand_ins(unknown):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:  # torch's text recommends to execute what the file says
        rule = "hold tensors, plain values, and what Megatron and DeepSpeed save"
        raise CheckpointError(refusal(what, "it asks for more", rule, _REMEDY)) from error
    except Exception as error:  # whatever a damaged or malicious file makes torch raise
        raise CheckpointError(refusal(what, f"{error!r} while reading it", "be readable", _REMEDY)) from error


def _check_names(names: Iterable[str], what: str) -> None:
    foreign = [name for name in sorted(names) if not (name in _NAMES or name.startswith(_PACKAGES))]
    if foreign:
        rule = "hold tensors, plain values, and what Megatron and DeepSpeed save"
        remedy = f"If you trust it, convert it in Python after torch.serialization.add_safe_globals([{foreign[0]}])"
        raise CheckpointError(refusal(what, f"it names {foreign[0]}", rule, remedy))


def _stand_ins(names: Iterable[str]) -> AbstractContextManager[None]:
    allowed: list[Any] = [(InertMember if name == _BY_NAME else Inert, name) for name in names]
    manager: AbstractContextManager[None] = torch.serialization.safe_globals(allowed)
    return manager


class _MetadataUnpickler(pickle.Unpickler):
    """Finds no function, and no class but a stand-in, torch.Size and torch's dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        """Called for every name in a pickle."""
        if f"{module}.{name}" in _METADATA:
            return Inert
        if f"{module}.{name}" == _BY_NAME:
            return InertMember
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
    try:
        with open(path, "rb") as file:
            found = _MetadataUnpickler(file).load()
    except Exception as error:  # whatever damaged bytes make an unpickler raise
        got = error if isinstance(error, pickle.UnpicklingError) else f"{error!r} while reading it"
        raise CheckpointError(refusal(f"file {path}", got, "be the metadata of a torch checkpoint", _REMEDY)) from error
    if not isinstance(found, Inert):
        got = f"a {type(found).__name__}"
        raise CheckpointError(refusal(f"file {path}", got, "be the metadata of a torch checkpoint", _REMEDY))
    return found
