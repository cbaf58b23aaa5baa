"""The doctor's verdict on broken copies of a fork, compared with what happens when they are started."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_distopt.cli import doctor, doctor_machine
from megatron_distopt.cli.show import Status
from megatron_distopt.device import CPU
from megatron_distopt.optimizer.accelerator import Accelerator
from tests.support.fork_trees import FACTORY_OF_2023, gathered_2023, write_tree

SCRIPT = "from megatron.initialize import initialize_megatron\nfrom megatron.training import train\n\n"
START = "initialize_megatron()\n"
INITIALIZE = "import os\n\nimport torch\n\nfrom .arguments import parse_args\n\n\ndef initialize_megatron():\n    {}\n"
TRAINING = "from megatron.optimizer import get_megatron_optimizer\n\n\ndef train():\n    pass\n"
REMOVED = "removed"

#: What is changed in a copy of the fork, and whether it starts then.
COPIES: dict[str, tuple[dict[str, str], bool]] = {
    "unchanged": ({}, True),
    "a module is removed": ({"megatron/training.py": REMOVED}, False),
    "a module has a syntax error": ({"megatron/training.py": "def train(:\n    pass\n"}, False),
    "the patch point has another name": (
        {
            "megatron/optimizer/__init__.py": FACTORY_OF_2023.replace("get_megatron_optimizer", "build_optimizer"),
            "megatron/training.py": TRAINING.replace("get_megatron_optimizer", "build_optimizer"),
        },
        False,
    ),
    "a package is missing": ({"megatron/training.py": f"import absent_package\n{TRAINING}"}, False),
    "a package is missing, behind try and except": (
        {"megatron/training.py": f"try:\n    import absent_package\nexcept ImportError:\n    pass\n{TRAINING}"},
        True,
    ),
    "a package is missing, behind an except that raises": (
        {"megatron/training.py": f"try:\n    import absent_package\nexcept ImportError:\n    raise\n{TRAINING}"},
        False,
    ),
    "a package is missing, behind a function": (
        {"megatron/training.py": f"{TRAINING}\n\ndef plot():\n    import absent_package\n"},
        True,
    ),
    "a relative import names no file": ({"megatron/training.py": f"from .timing import Timer\n{TRAINING}"}, False),
    "a function that is imported is gone": ({"megatron/training.py": TRAINING.replace("train", "run")}, False),
    "a device is asserted": (
        {"megatron/initialize.py": INITIALIZE.format("assert torch.xpu.is_available(), 'needs it'")},
        False,
    ),
    "an environment variable is demanded": (
        {
            "megatron/initialize.py": INITIALIZE.format(
                "if os.environ.get('FORK_CONNECTIONS') != '1':\n        raise RuntimeError('FORK_CONNECTIONS')"
            )
        },
        False,
    ),
    "what our own adapter imports is gone": ({"megatron/model/module.py": ""}, False),
}

#: Starts each folder's script under the runner in a process of its own, which has torch already.
STARTER = """
import os, sys, traceback
import torch
from megatron_distopt.plugin.runner import main

for folder in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        try:
            main(["pretrain_gpt.py", "--use-distributed-optimizer"])
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0)
"""


def copy(folder: Path, changes: Mapping[str, str]) -> Path:
    files = {"pretrain_gpt.py": SCRIPT + START, "megatron/initialize.py": INITIALIZE.format("parse_args()")}
    write_tree(gathered_2023(folder), {**files, "megatron/training.py": TRAINING, **changes})
    parser = folder / "megatron/arguments.py"
    parser.write_text(parser.read_text().replace("return parser", "return None"))
    for file in [file for file, text in changes.items() if text == REMOVED]:
        (folder / file).unlink()
    return folder


#: A copy that starts by a fix where torchvision is not installed.
MENDED = {
    "megatron/data/__init__.py": "",
    "megatron/data/vit_dataset.py": "import torchvision.transforms as T\n",
    "megatron/training.py": f"import megatron.data.vit_dataset\n{TRAINING}",
}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, bool]]:
    """Each copy, and whether it started."""
    all_changes = {**{name: changes for name, (changes, _) in COPIES.items()}, "mended": MENDED}
    folders = [copy(tmp_path_factory.mktemp("copy"), changes) for changes in all_changes.values()]
    command = [sys.executable, "-c", STARTER, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    outcomes = [line == "True" for line in done.stdout.splitlines() if line in ("True", "False")]
    return dict(zip(all_changes, zip(folders, outcomes, strict=True), strict=True))


@pytest.mark.parametrize("name", COPIES)
def test_doctor_when_a_copy_is_broken_then_its_verdict_is_what_happens(
    name: str, started: dict[str, tuple[Path, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_machine, "find_accelerator", lambda choice: Accelerator(CPU, "torch"))
    folder, has_started = started[name]
    findings = doctor.diagnose(folder, ["pretrain_gpt.py", "--use-distributed-optimizer"])
    problems = [finding.text for finding in findings if finding.status is Status.PROBLEM]
    assert (not problems, has_started) == (COPIES[name][1], COPIES[name][1]), problems


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_doctor_when_a_fix_mends_a_copy_then_it_starts(
    started: dict[str, tuple[Path, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_machine, "find_accelerator", lambda choice: Accelerator(CPU, "torch"))
    folder, has_started = started["mended"]
    findings = doctor.diagnose(folder, ["pretrain_gpt.py", "--use-distributed-optimizer"])
    assert not [each for each in findings if each.status is Status.PROBLEM]
    assert has_started
