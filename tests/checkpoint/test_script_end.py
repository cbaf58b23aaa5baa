"""What is known at the exit of a process of how its script ended: scripts that end in every way.

They import one file of the package by its path, because importing torch takes longer than all of
them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_distopt.checkpoint.protect import script_end

_BEGIN = f"""
import atexit, importlib.util, os, signal, sys, threading
found = importlib.util.spec_from_file_location("script_end", {script_end.__file__!r})
script_end = importlib.util.module_from_spec(found)
found.loader.exec_module(script_end)
was_sent, script = threading.Event(), sys._getframe()
atexit.register(
    lambda: print(script_end.came_to_its_end(script), was_sent.is_set(), sys.exc_info()[1])
)
signal.signal(signal.SIGTERM, lambda number, frame: {{}})
script_end.note_sigterm(was_sent)
def main():
    {{}}
"""
#: What a handler of SIGTERM and the script do; whether it came to its end, and SIGTERM was noted.
_SCRIPTS = {
    "comes to its end": ("None", "pass", "\nmain()", "True False"),
    "sys.exit(0)": ("None", "sys.exit(0)", "\nmain()", "False False"),
    "sys.exit of a status": ("None", "return 3", "\nsys.exit(main())", "False False"),
    "a handler that exits": (
        "sys.exit(143)",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "\nmain()",
        "False True",
    ),
    "a handler that returns": (
        "None",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "\nmain()",
        "True True",
    ),
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each script knows at its exit; they run at the same time."""
    running = {}
    for name, (handler, act, end, _) in _SCRIPTS.items():
        file = tmp_path_factory.mktemp("script") / "script.py"
        file.write_text(_BEGIN.format(handler, act) + end)
        command = [sys.executable, "-S", str(file)]
        running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return {name: process.communicate(timeout=60)[0] for name, process in running.items()}


@pytest.mark.parametrize("name", _SCRIPTS)
def test_script_when_it_ends_then_known_whether_it_came_to_its_end(
    scripts: dict[str, str], name: str
) -> None:
    assert scripts[name] == f"{_SCRIPTS[name][-1]} None\n", "or Python tells of SystemExit"


def test_script_when_run_by_the_runner_then_status_0_comes_to_its_end(tmp_path: Path) -> None:
    """The end of `python -m megatron_distopt`, without the package's imports."""
    import megatron_distopt.__main__ as runner

    source = Path(str(runner.__file__)).read_text(encoding="utf-8")
    (tmp_path / "end.py").write_text(
        _BEGIN.format("None", "sys.exit(int(sys.argv[1]))")
        + source.partition("import main\n")[2]
        + "\n"
    )
    said = []
    for status in ("0", "5"):
        command = [sys.executable, "-S", str(tmp_path / "end.py"), status]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        said.append((done.returncode, done.stdout.split()[0]))
    assert said == [(0, "True"), (5, "False")]
