"""megatron-core from the oldest to the newest that is served; `scripts/test_hosts.sh` runs all
tests on all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
#: Where scripts/test.sh unpacks them.
_FOLDERS = Path(sys.prefix) / "megatron-core"


def _environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join(map(str, (folder, _ROOT, _ROOT / "examples")))
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST", "MEGATRON"))
    }
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


#: That process imports the host itself, once, and its ranks are forked from it.
_PLUGINS = ("-p", "no:cacheprovider", "-p", "tests.support.preloaded_core")
#: The oldest and the newest, and those between them but for the installed one.
_ENDS = ("0.9.0", "0.19.2")
_OTHERS = ("0.10.0", "0.11.0", "0.12.1", "0.13.1", "0.14.0", "0.15.3", "0.17.1", "0.18.2")


@pytest.mark.parametrize(
    "version", [*_ENDS, *(pytest.param(each, marks=pytest.mark.long) for each in _OTHERS)]
)
def test_version_when_it_is_served_then_the_tests_of_the_host_pass(version: str) -> None:
    """What differs most between versions is what they read off an optimizer; the rest runs on the
    installed one."""
    _passes(version, "contract")


@pytest.mark.long
@pytest.mark.parametrize("version", [*_ENDS, *_OTHERS])
def test_version_when_it_is_served_then_factories_refusals_and_owners_are_the_same(
    version: str,
) -> None:
    _passes(version, "factories", "refusals", "owners")


def _passes(version: str, *names: str) -> None:
    folder = _FOLDERS / version
    if not folder.exists():
        pytest.skip(f"needs megatron-core {version}, which scripts/test_hosts.sh {version} unpacks")
    files = [str(_ROOT / "tests" / "hosts" / f"test_megatron_core_{name}.py") for name in names]
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "pytest",
        "-q",
        "-m",
        "not long",
        *_PLUGINS,
        *files,
    ]
    done = subprocess.run(
        command,
        env=_environment(folder),
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
