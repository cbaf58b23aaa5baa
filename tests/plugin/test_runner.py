"""A script under the runner behaves as if it had been started alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_distopt.errors import ConfigError
from megatron_distopt.plugin.runner import main, parse_target
from tests.support.mini_fork import launch

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain_gpt_core.py"

SCRIPT = """
import json, multiprocessing, os, sys
import neighbour

def square(number):
    return number * number

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        squares = pool.map(square, [2, 3])
    main = vars(sys.modules["__main__"])
    names = [__name__, __file__, __package__]
    facts = [sys.argv, sys.path[0], *names, __spec__ is None, main is globals()]
    print(json.dumps([facts, neighbour.VALUE, squares]))
    if __package__:
        sys.exit(7)

    def deep():
        try:
            {}["no such key"]
        except KeyError as error:
            raise ValueError("from the script") from error

    deep()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A script with a module beside it, and a package."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("VALUE = 5\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "train.py").write_text(SCRIPT)
    return tmp_path


def _run(
    *words: str, cwd: Path, program: tuple[str, ...] = ("-m", "megatron_distopt")
) -> subprocess.CompletedProcess[str]:
    """Without the host: what is tested is not what is installed."""
    environment = {**os.environ, "MEGATRON_DISTOPT": "0", "PYTHONPATH": str(EXAMPLE.parents[1])}
    command = [sys.executable, *program, *words]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize("is_module", [False, True], ids=["script", "module"])
def test_runner_when_a_target_runs_then_it_is_as_if_started_alone(
    is_module: bool, folder: Path
) -> None:
    """The script from another folder, with the rank that the DeepSpeed launcher puts first."""
    (folder / "elsewhere").mkdir()
    script, cwd = str(folder / "train.py"), folder if is_module else folder / "elsewhere"
    alone, words = [script, "--local_rank=0"], ["--local_rank=0", script]
    if is_module:
        alone = words = ["-m", "package.train"]
    wanted, ours = (
        _run(*alone, "--lr", "1", cwd=cwd, program=()),
        _run(*words, "--lr", "1", cwd=cwd),
    )
    assert (ours.stdout, ours.stderr) == (wanted.stdout, wanted.stderr)
    assert json.loads(ours.stdout)[1:] == [5, [4, 9]]
    assert ours.returncode == wanted.returncode == (7 if is_module else 1)
    assert ("from the script" in ours.stderr) is not is_module


@pytest.mark.parametrize(("call", "code"), [("sys.exit(3)", "3"), ("sys.exit()", "none")])
def test_runner_when_the_script_leaves_with_a_status_then_what_runs_at_the_exit_knows(
    call: str, code: str, tmp_path: Path
) -> None:
    """By which the memory of a run is freed or kept."""
    text = "import atexit, sys\nfrom megatron_distopt.comm.alive import ended_by\n"
    text += f"atexit.register(lambda: print(getattr(ended_by(), 'code', 'none')))\n{call}\n"
    (tmp_path / "train.py").write_text(text)
    assert _run("train.py", cwd=tmp_path).stdout == f"{code}\n"


@pytest.fixture
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For calls of `main` that end before anything runs: what they change is put back."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        ((), "No training script"),
        (("missing.py",), "'missing.py'"),
        (("--local_rank=1",), "No "),
        (("-m",), "No "),
    ],
)
def test_runner_when_there_is_no_target_then_refused(
    words: tuple[str, ...], found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    text = capsys.readouterr().err
    assert found in text and "the script's path, or -m and a module" in text
    assert (
        "usage: python -m megatron_distopt [--local_rank=N] SCRIPT.py|-m MODULE [ARGUMENTS]" in text
    )
    assert ended.value.code == 2
    with pytest.raises(ConfigError):
        parse_target(words)


@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize("is_safe", [False, True])
def test_runner_when_it_cannot_install_then_says_why_and_runs_nothing(
    is_safe: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By then the script's folder is the first of the path, but with PYTHONSAFEPATH."""
    monkeypatch.setenv("MEGATRON_DISTOPT", "maybe")
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "flags", SimpleNamespace(safe_path=is_safe))
        main(["train.py"])
    assert (sys.path[0] == str(folder)) is not is_safe
    said = capsys.readouterr()
    assert said.err == (
        "megatron_distopt: MEGATRON_DISTOPT is 'maybe'. It must be one of 0, 1, require.\n"
    )
    assert (ended.value.code, said.out) == (1, "")


def test_runner_when_torchrun_starts_it_then_a_script_of_megatron_core_gets_ours(
    tmp_path: Path,
) -> None:
    """The example without its own call of install(), and with MEGATRON_DISTOPT=require: it would
    stop without us.

    Under the DeepSpeed launcher, and in a fork of 2023:
    tests/hosts/test_megatron_2023_install_methods.py.
    """
    text = EXAMPLE.read_text(encoding="utf-8")
    line = "installation = megatron_distopt.install()"
    assert line in text
    script = tmp_path / "pretrain.py"
    script.write_text(
        text.replace(
            line,
            "from types import SimpleNamespace\ninstallation = SimpleNamespace(is_active=True)",
        )
    )
    environment = {"MEGATRON_DISTOPT": "require", "PYTHONPATH": str(EXAMPLE.parent)}
    words = [
        str(script),
        "--use-distributed-optimizer",
        "--bf16",
        "--train-iters",
        "3",
        "--data",
        str(EXAMPLE),
    ]
    done = launch(
        "torchrun",
        1,
        ["-m", "megatron_distopt", *words],
        environment=environment,
        seconds=240.0,
        folder=tmp_path,
    )
    assert done.status == 0, done.output
    losses = [float(loss) for loss in re.findall(r"\| loss ([\d.]+) \|", done.output)]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert "is active in megatron-core" in done.output
