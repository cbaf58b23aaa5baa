"""A script under the runner behaves as if it had been started alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_distopt.errors import ConfigError
from megatron_distopt.plugin.runner import main, parse_target

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain_gpt_core.py"

SCRIPT = """
import json, multiprocessing, os, sys
import neighbour

def square(number):
    return number * number

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        squares = pool.map(square, [2, 3])
    facts = [sys.argv[1:], os.path.basename(sys.argv[0]), os.path.basename(__file__), neighbour.VALUE, squares]
    print(json.dumps(facts))
    sys.exit(7)
"""
#: Says how it was started, and fails.
BROKEN = """
import sys

main = vars(sys.modules["__main__"])
print(sys.argv, sys.path[0], __name__, __file__, __package__, __spec__ is None, main is globals())

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
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "train.py").write_text(SCRIPT)
    return tmp_path


def _run(
    *words: str, cwd: Path, program: tuple[str, ...] = ("-m", "megatron_distopt")
) -> subprocess.CompletedProcess[str]:
    """Without the host: what is tested is not what is installed."""
    environment = {**os.environ, "MEGATRON_DISTOPT": "0"}
    command = [sys.executable, *program, *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("is_module", [False, True], ids=["script", "module"])
def test_runner_when_a_target_runs_then_it_is_as_if_started_alone(is_module: bool, folder: Path) -> None:
    """The script from another folder, with the rank that the DeepSpeed launcher puts first."""
    (folder / "elsewhere").mkdir()
    words = ["-m", "package.train"] if is_module else ["--local_rank=0", str(folder / "train.py")]
    done = _run(*words, "--lr", "1", cwd=folder if is_module else folder / "elsewhere")
    arguments = ["--lr", "1"] if is_module else ["--local_rank=0", "--lr", "1"]
    assert json.loads(done.stdout) == [arguments, "train.py", "train.py", 5, [4, 9]], done.stderr
    assert done.returncode == 7


def test_runner_when_the_script_raises_then_the_traceback_is_the_scripts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    alone, ours = _run("broken.py", cwd=folder, program=()), _run("broken.py", cwd=folder)
    assert (ours.stdout, ours.stderr) == (alone.stdout, alone.stderr)
    assert "from the script" in ours.stderr
    assert ours.returncode == alone.returncode == 1


@pytest.fixture
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For calls of `main` that end before anything runs: what they change is put back."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize(
    ("words", "found"),
    [((), "No training script"), (("missing.py",), "'missing.py'"), (("--local_rank=1",), "No "), (("-m",), "No ")],
)
def test_runner_when_there_is_no_target_then_refused(
    words: tuple[str, ...], found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    text = capsys.readouterr().err
    assert found in text and "Put the script's path, or -m and a module, first." in text
    assert "usage: python -m megatron_distopt [--local_rank=N] SCRIPT.py|-m MODULE [ARGUMENTS]" in text
    assert ended.value.code == 2
    with pytest.raises(ConfigError):
        parse_target(words)


@pytest.mark.usefixtures("in_folder")
def test_runner_when_it_cannot_install_then_says_why_and_runs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGATRON_DISTOPT", "maybe")
    with pytest.raises(SystemExit) as ended:
        main(["train.py"])
    said = capsys.readouterr()
    assert said.err == ("megatron_distopt: MEGATRON_DISTOPT is 'maybe'. It must be one of 0, 1, require.\n")
    assert (ended.value.code, said.out) == (1, "")


def test_runner_when_torchrun_starts_it_then_an_unchanged_script_of_megatron_core_gets_our_optimizer(
    tmp_path: Path,
) -> None:
    """The example without its own call of install(), and with MEGATRON_DISTOPT=require: it would stop without us.

    Under the DeepSpeed launcher, and in a fork of 2023: tests/hosts/test_megatron_2023_install_methods.py.
    """
    text = EXAMPLE.read_text(encoding="utf-8")
    line = "installation = megatron_distopt.install()"
    assert line in text
    script = tmp_path / "pretrain.py"
    script.write_text(
        text.replace(line, "from types import SimpleNamespace\ninstallation = SimpleNamespace(is_active=True)")
    )
    environment = {
        **os.environ,
        "MEGATRON_DISTOPT": "require",
        "PYTHONPATH": str(EXAMPLE.parent),
        "OMP_NUM_THREADS": "1",
    }
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "1"]
    words = [str(script), "--use-distributed-optimizer", "--bf16", "--train-iters", "3", "--data", str(EXAMPLE)]
    command = [*torchrun, "-m", "megatron_distopt", *words]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"\| loss ([\d.]+) \|", done.stdout)]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert "is active in megatron-core" in done.stdout + done.stderr
