"""Every call that changes a disk, in one place: what a crash can come between. Tests kill the process between them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from megatron_distopt.errors import CheckpointError, refusal

__all__ = ["create", "lock", "make_folder", "remove", "replace", "sync", "sync_folder", "unlock", "write", "written"]

try:
    import fcntl
except ImportError:  # not a POSIX system: nobody is kept from saving to the same place
    fcntl = None  # type: ignore[assignment]

#: Large writes go past it, small ones (the framing of a tensor) are joined.
_BUFFER_NBYTES = 1 << 20


def make_folder(path: Path) -> None:
    """With its parents, where it is not there."""
    path.mkdir(parents=True, exist_ok=True)


def create(path: Path) -> BinaryIO:
    """A new file; one of that name must not be there."""
    return open(path, "xb", buffering=_BUFFER_NBYTES)


def write(file: BinaryIO, data: bytes | memoryview) -> None:
    """Appends."""
    file.write(data)


def sync(file: BinaryIO) -> None:
    """Down to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Names that were created or replaced in it are then there after a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems refuse it for folders, and need it not
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(source: Path, target: Path) -> None:
    """Gives a file another name in one step; what had that name is gone."""
    os.replace(source, target)


def remove(path: Path) -> None:
    """A file that may be gone already."""
    path.unlink(missing_ok=True)


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A new file that is on the disk when the block ends, and is removed where the block fails."""
    file = create(path)
    try:
        yield file
        sync(file)
        file.close()
    except BaseException:
        with suppress(OSError):
            file.close()
        with suppress(OSError):
            remove(path)
        raise


def lock(path: Path) -> int | None:
    """Held until `unlock`, or until this process ends, however it ends.

    Returns:
        For `unlock`; None where the file system has no locks.

    Raises:
        CheckpointError: another process holds it.
    """
    if fcntl is None:
        return None
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        rule, remedy = "be written by one run at a time", "Give each run a --save folder of its own"
        raise CheckpointError(
            refusal(f"checkpoint {path.parent}", "another run is saving there now", rule, remedy)
        ) from None
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def unlock(descriptor: int | None) -> None:
    """Lets go of what `lock` returned."""
    if descriptor is not None:
        os.close(descriptor)
