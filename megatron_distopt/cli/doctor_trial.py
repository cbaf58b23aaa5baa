"""The trial of `megatron-distopt doctor`: a Python of its own installs the package and imports the
training module.

Nothing is trained, and no process group is made. What the import leaves on disk goes into a folder
that is removed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from traceback import format_exc

from megatron_distopt.cli.show import Finding, ok, problem

_SECTION = "trial"
#: Seconds; torch, DeepSpeed and a fork take up to a minute from a cold disk.
TIMEOUT_S = 300.0
#: A launcher's, which would let the package look for other ranks.
_OF_LAUNCHERS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|OMPI_.*|PMI_.*"
)
#: Where torch, Triton and others keep what they compile.
_CACHES = (
    "TMPDIR",
    "TORCH_EXTENSIONS_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "XDG_CACHE_HOME",
)
_CHILD = (
    "import sys; sys.path.append(sys.argv[1]); from megatron_distopt.cli.doctor_trial import main; "
    "main()"
)
#: How to get a module that pip does not install under its own name.
_INSTALL = {
    "amp_C": "Build NVIDIA apex from its sources with its CUDA extensions",
    "apex": (
        "Build NVIDIA apex from its sources, because pip install apex installs an unrelated project"
    ),
    "transformer_engine": "Run pip install transformer-engine[pytorch]",
}


def try_start(folder: Path, module: str, timeout_s: float = TIMEOUT_S) -> Finding:
    """Starts Python in the fork's folder, and says whether the package and a module of the fork are
    imported there."""
    what = f"megatron_distopt.install() and import {module}"
    with tempfile.TemporaryDirectory(prefix="distopt-doctor-") as scratch:
        environment = {
            name: value for name, value in os.environ.items() if not _OF_LAUNCHERS.fullmatch(name)
        }
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", **dict.fromkeys(_CACHES, scratch)}
        command = [sys.executable, "-c", _CHILD, str(Path(__file__).parents[2]), module]
        log = Path(scratch, "stderr")
        with log.open("wb") as stderr:  # a pipe would stay open in what the import starts
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            remedy = (
                f'Run python -X faulthandler -c "import {module}" in {folder}, or add --no-trial'
            )
            return problem(
                _SECTION, module, f"{what} did not end within {timeout_s:g} s. {remedy}."
            )
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with whatever the import started
            process.wait()
        lines = [
            line.strip()
            for line in log.read_text("utf-8", errors="replace").splitlines()
            if line.strip()
        ]
    if status == 0:
        return ok(_SECTION, module, f"{what} in a separate Python, in {folder}")
    last = lines[-1].rstrip(".") if lines else f"Python ended with status {status}"
    remedy = f'For the traceback, run python -c "import {module}" in that folder'
    missing = re.search(r"No module named '(\w+)", last)
    if missing and missing[1] != "megatron":
        remedy = _INSTALL.get(missing[1], f"Install the package that provides {missing[1]}")
    return problem(_SECTION, module, f"{what} failed: {last}. {remedy}.")


def main() -> None:
    """Ends the process of the trial, with status 0 where all imports worked."""
    status, module = 0, sys.argv[2]
    del sys.argv[1:]
    try:
        import_module("megatron_distopt.plugin.install").install()
        import_module(module)
    except BaseException:  # noqa: BLE001 - a fork may exit while it is imported
        sys.stderr.write(f"\n{format_exc()}")
        status = 1
    sys.stderr.flush()
    os._exit(status)  # threads and exit handlers of what was imported may wait for a device
