"""Every call that changes a disk. A crash can come between any two of them; tests kill the process
there."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from megatron_distopt.errors import CheckpointError

try:
    import fcntl
except ImportError:  # not a POSIX system: two runs can save to the same place
    fcntl = None  # type: ignore[assignment]

#: Small writes (the framing of a tensor) are joined up to this size; large ones are not buffered.
_BUFFER_NBYTES = 1 << 16
#: Errors with which a file system says that it has no `fsync`. A disk that fails says another one.
_NO_FILE_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
#: Errors with which some network file systems refuse `fsync` of a folder; they do not need it.
_NO_FOLDER_SYNC = (*_NO_FILE_SYNC, errno.EBADF, errno.EACCES, errno.EPERM)


@contextmanager
def refused(action: str, remedy: str) -> Iterator[None]:
    """Turns an error of the disk into a `CheckpointError`: "Cannot ACTION: ERROR. REMEDY." """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"Cannot {action}: {error}. {remedy}.") from error


def make_folder(path: Path) -> None:
    """Makes a folder and those of its parents that are missing, so that they survive a power
    cut."""
    missing = [parent for parent in (path, *path.parents) if not parent.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for parent in missing:
        sync_folder(parent.parent)


def create(path: Path) -> BinaryIO:
    return open(path, "xb", buffering=_BUFFER_NBYTES)


def write(file: BinaryIO, data: bytes | memoryview) -> None:
    file.write(data)


class Writer:
    """A file for `torch.save`, which replaces an error of the disk by one about a position in the
    file."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: OSError | None = None  # of the disk

    def write(self, data: bytes | memoryview) -> int:
        try:
            write(self.file, data)
        except OSError as error:
            self.error = error
            raise
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Does nothing, because `written` flushes once at the end."""


def begin_sync(file: BinaryIO, start: int, nbytes: int) -> None:
    """Lets the disk begin with bytes that were written, so that `sync` does not wait for all of
    them at the end.

    POSIX_FADV_DONTNEED makes the kernel begin to write them; they stay in memory until they are
    written.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # a hint, which some file systems do not take
            os.posix_fadvise(file.fileno(), start, nbytes, os.POSIX_FADV_DONTNEED)


def sync(file: BinaryIO) -> None:
    """Waits until everything that was written is on the disk, where its file system can."""
    file.flush()
    try:
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in _NO_FILE_SYNC:
            raise


def sync_folder(path: Path) -> None:
    """Makes sure that names which were created or replaced in a folder are there after a power
    cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def replace(source: Path, target: Path) -> None:
    """Renames a file in one step; it replaces a file that has the new name."""
    os.replace(source, target)


def remove(path: Path) -> None:
    """Removes a file, which may be gone already."""
    path.unlink(missing_ok=True)


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A new file that is on the disk when the block ends, and is removed if the block fails."""
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


def write_file(path: Path, content: bytes) -> None:
    """Writes a new file, which is on the disk afterwards."""
    with written(path) as file:
        write(file, content)


def lock(path: Path) -> int | None:
    """Locks a file until `unlock` of what it returns, or until this process ends; None where there
    are no locks."""
    if fcntl is None:
        return None
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise CheckpointError(
            f"Another run is saving to checkpoint {path.parent} now, and only one run at a time "
            "can save there. Give each run a folder of its own."
        ) from None
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def unlock(descriptor: int | None) -> None:
    """Releases what `lock` returned.

    Closing alone is not enough: a process that was forked meanwhile, such as a data loader, has the
    descriptor, too.
    """
    if descriptor is not None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
