"""Compiles native_adam.c with the C compiler of the machine, once, into a cache folder of the user.

[Note: compiled once] The folder may be on a disk that many machines share, and all ranks of all of them may come at
once. The name of a library therefore says what it was made of: the source, the command, the version of the compiler and
the CPU. It is made in a folder of its own and then renamed, so nobody loads half of one; whoever comes second replaces
it by an equal one.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from ctypes import CDLL
from functools import cache
from pathlib import Path

#: The first includes the second.
_SOURCES = tuple(Path(__file__).with_name(name) for name in ("native_adam.c", "native_codes.c"))
_COMPILERS = ("cc", "gcc", "clang")
#: A product must not be fused with a sum, because torch's operators round it. Nobody asks for errno or for traps.
#: fp32 numbers are handled as their bits. Loops over a block are not written out, which takes twice as long to compile.
_FLAGS = (
    *("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"),
    *("--param=max-completely-peel-times=0", "-fPIC"),
)
#: Compilers take half of what the registers hold where nobody asks; whole ones take a fifth less time.
_FLAGS_OF = {"x86_64": ("-mprefer-vector-width=512",)}
#: With threads and without. No OpenMP library is linked, so the threads are those of the one that torch has loaded.
_THREADS = ("-fopenmp", "-fopenmp-simd")
_SECONDS = 120.0


class CannotBuild(Exception):
    """There is no library, and the message says why."""


def load() -> CDLL:
    """Loads the library, and compiles it before if this machine has not done so.

    Raises:
        CannotBuild: there is no compiler, it fails, the folder cannot be written, or the library cannot be loaded.
    """
    reasons = []
    for threads in _THREADS:
        try:
            return CDLL(os.fspath(_library([*_compiler(), *_FLAGS, *_FLAGS_OF.get(platform.machine(), ()), threads])))
        except subprocess.CalledProcessError as error:
            reasons.append(str(error.stderr).strip() or str(error))
        except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
            reasons.append(str(error))
    raise CannotBuild(reasons[0])


def cache_folder() -> Path:
    """Where libraries are kept: below XDG_CACHE_HOME, or ~/.cache where that is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_distopt"


def _compiler() -> list[str]:
    named = shlex.split(os.environ.get("CC", ""))
    for each in [named] if named else [[name] for name in _COMPILERS]:
        if (found := shutil.which(each[0])) is not None:
            return [found, *each[1:]]
    raise CannotBuild(f"there is no C compiler: {' '.join(named) or ', '.join(_COMPILERS)}")


def _library(command: list[str]) -> Path:
    """The library that a command makes; see [Note: compiled once]."""
    sources = [source.read_text(encoding="utf-8") for source in _SOURCES]
    made_of = [*sources, *command, _run([command[0], "--version"]), _cpu()]
    name = f"codes-{hashlib.sha256(chr(0).join(made_of).encode()).hexdigest()[:24]}.so"
    path = cache_folder() / name
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            code, library = os.path.join(folder, "codes.o"), os.path.join(folder, name)
            _run([*command, "-c", os.fspath(_SOURCES[0]), "-o", code])
            _run([command[0], "-shared", code, "-lm", "-o", library])
            os.replace(library, path)
    return path


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS).stdout


@cache
def _cpu() -> str:
    """What decides the instructions that a CPU has: its model and its flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    known = ("model name", "flags", "Features", "CPU implementer", "CPU part", "isa")
    return "\n".join([platform.machine(), *(line for line in lines if line.startswith(known))])
