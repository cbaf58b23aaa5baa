"""The doctor's trial: another Python installs the package into a fork and imports its training
module."""

from __future__ import annotations

import os
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_distopt.cli import doctor, doctor_machine, doctor_trial
from megatron_distopt.cli.doctor_trial import try_start
from megatron_distopt.cli.show import Status
from megatron_distopt.device import CPU
from megatron_distopt.optimizer.accelerator import Accelerator
from tests.support.fork_trees import gathered_2023, write_tree

TRAINING = (
    "from megatron.optimizer import get_megatron_optimizer\nfrom megatron.arguments import "
    "parse_args\n"
)
IMPORTS = (
    "import sys\nfactory = get_megatron_optimizer\nassert "
    "type(factory).__module__.startswith('megatron_distopt')\n"
)
VISION = {
    "megatron/data/__init__.py": "",
    "megatron/data/vit_dataset.py": "import torchvision.transforms as T\n",
}

#: What is changed in a copy of the fork, and a part of what is said about it; empty where it
#: starts.
COPIES: dict[str, tuple[dict[str, str], str]] = {
    "a package is missing": (
        {"megatron/training.py": f"import apex.absent\n{TRAINING}"},
        "NVIDIA apex from its sources",
    ),
    "it exits with status 0": (
        {"megatron/training.py": f"{TRAINING}raise SystemExit(0)\n"},
        "SystemExit: 0. ",
    ),
    "what our adapter imports is gone": ({"megatron/model/module.py": ""}, "param_is_not_shared"),
    "a fix is made": (
        {
            **VISION,
            "megatron/training.py": f"import megatron.data.vit_dataset\n{TRAINING}{IMPORTS}",
        },
        "",
    ),
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("MEGATRON_DISTOPT")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("MEGATRON_DISTOPT_ACCELERATOR", "torch")  # DeepSpeed takes seconds to ask
    monkeypatch.setenv("RANK", "1")  # of a launcher, whose other rank is not there
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(
        doctor_machine, "find_accelerator", lambda choice: Accelerator(CPU, "torch")
    )


def files_of(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize(
    "name",
    [
        "a package is missing",
        pytest.param("it exits with status 0", marks=pytest.mark.long),
        pytest.param("what our adapter imports is gone", marks=pytest.mark.long),
        "a fix is made",
    ],
)
def test_doctor_when_it_tries_a_copy_then_its_verdict_is_what_happens_and_nothing_is_left(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, said = COPIES[name]
    fork = write_tree(
        gathered_2023(tmp_path / "fork"), {"megatron/training.py": TRAINING, **changes}
    )
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    before = files_of(tmp_path)
    findings = doctor.diagnose(fork, [])
    assert files_of(tmp_path) == before
    problems = [finding.text for finding in findings if finding.status is Status.PROBLEM]
    assert findings[-1].section == "trial"
    if said:
        assert len(problems) == 1 and said in problems[0], problems
    else:
        assert not problems and findings[-1].status is Status.OK


def test_trial_when_the_import_hangs_then_given_up_and_what_it_started_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = (
        f"import subprocess, time\nother = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(other.pid))\ntime.sleep(600)\n"
    )
    # what comes before it takes long on a busy machine
    monkeypatch.setattr(doctor_trial, "_CHILD", hanging)
    found = try_start(tmp_path, "megatron.training", timeout_s=1)
    assert (
        found.status is Status.PROBLEM and "within 1 s" in found.text and "--no-trial" in found.text
    )
    other = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    deadline = time.monotonic() + 10
    # an ended one may wait for init
    while other.exists() and other.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("variable", "value"), [("MEGATRON_DISTOPT_FIXES", "no"), ("MEGATRON_DISTOPT", "0")]
)
@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_doctor_when_fixes_are_needed_and_switched_off_then_a_problem_for_each(
    variable: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork = write_tree(gathered_2023(tmp_path), VISION)
    (note,) = [
        each for each in doctor.diagnose(fork, [], has_trial=False) if each.subject == "host fix"
    ]
    assert note.status is Status.NOTE and "torchvision" in note.text
    monkeypatch.setenv(variable, value)
    (problem,) = [
        each for each in doctor.diagnose(fork, [], has_trial=False) if each.subject == "host fix"
    ]
    assert problem.status is Status.PROBLEM and "MEGATRON_DISTOPT_FIXES" in problem.text


def test_doctor_when_a_real_fork_is_tried_then_its_training_module_is_imported() -> None:
    if "MEGATRON_FORK" not in os.environ:
        pytest.skip("MEGATRON_FORK names no checkout of a fork")
    found = try_start(Path(os.environ["MEGATRON_FORK"]), "megatron.training")
    assert found.status is Status.OK, found.text
