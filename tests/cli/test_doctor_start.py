"""Would the training script start: imports are followed by reading, and fixes are listed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_distopt.cli.doctor_start import describe_start
from megatron_distopt.cli.show import Finding, Status
from megatron_distopt.hosts.source import imports
from megatron_distopt.hosts.source.survey import survey
from megatron_distopt.hosts.source.tree import fork_at
from tests.support.fork_trees import core, gathered_2023, write_tree


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in [name for name in os.environ if name.startswith("MEGATRON_DISTOPT")]:
        monkeypatch.delenv(variable)
    yield


def start(folder: Path, *launch: str) -> list[Finding]:
    tree = fork_at(folder)
    return list(describe_start(survey(tree), tree, launch))


def problems(findings: list[Finding]) -> list[str]:
    return [finding.text for finding in findings if finding.status is Status.PROBLEM]


def hide(monkeypatch: pytest.MonkeyPatch, *hidden: str) -> None:
    """Lets modules look as if they were not installed."""
    monkeypatch.setattr(imports, "find_spec", lambda name: None if name in hidden else find_spec(name))


def with_script(folder: Path, text: str, **more: str) -> Path:
    files = {f"megatron/{name}.py": content for name, content in more.items()}
    return write_tree(gathered_2023(folder), {"pretrain_gpt.py": text, **files})


#: Each import of a module whose name has "absent" in it fails.
FAILING = """
import absent_package
import json.absent
from absent_of_part.part import thing
class A:
    import absent_in_class
try:
    import absent_unguarded
except ValueError:
    pass
try:
    import absent_raised
except ImportError:
    print(1)
    raise
with open('x'):
    import absent_in_with
import megatron.absent
from megatron.absent_of_thing import thing
"""
GUARDED_OR_THERE = """
try:
    import absent_package
except ImportError:
    absent_package = None
try:
    import absent_bare
except:
    pass
try:
    import absent_of_some
except (ValueError, ModuleNotFoundError):
    pass
if False:
    import absent_in_branch
def later():
    import absent_in_function
import json.decoder, os.path, importlib
from megatron import training
from helper_beside import thing
"""


def test_start_when_imports_would_fail_then_a_problem_with_its_line_for_each(tmp_path: Path) -> None:
    found = problems(start(with_script(tmp_path, FAILING)))
    lines = [(number, line) for number, line in enumerate(FAILING.splitlines(), 1) if "absent" in line]
    assert len(found) == len(lines) == 9
    for text, (number, line) in zip(found, lines, strict=True):
        assert f"pretrain_gpt.py:{number} " in text and line.split()[1].removesuffix(".part") in text


def test_start_when_imports_are_guarded_or_can_be_found_then_no_problem(tmp_path: Path) -> None:
    write_tree(tmp_path, {"helper_beside.py": "thing = 1\n"})
    findings = start(with_script(tmp_path, GUARDED_OR_THERE))
    assert not problems(findings)
    assert "imports" in [finding.subject for finding in findings]


def test_start_when_a_module_of_the_fork_fails_then_it_is_found_on_the_way(tmp_path: Path) -> None:
    fork = with_script(
        tmp_path,
        "from megatron.first import run\n",
        first="from .second import run\nimport torchvision_absent\n",
        second="from megatron import third\nrun = 1\n",
        third="import torchvision_absent\nimport megatron.first\n",
    )
    (found,) = problems(start(fork))
    assert "megatron/third.py:1" in found


def test_start_when_a_package_is_known_then_it_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "torchvision", "yaml")
    (found,) = problems(start(with_script(tmp_path, "import yaml\n")))
    assert "pip install pyyaml" in found


def test_start_when_another_script_is_named_then_that_one_is_followed(tmp_path: Path) -> None:
    fork = with_script(tmp_path, "import absent_package\n")
    write_tree(fork, {"mine/train.py": "import neighbour\n", "mine/neighbour.py": "import absent_other\n"})
    (found,) = problems(start(fork, "mine/train.py", "--use-distributed-optimizer"))
    assert "absent_other" in found


def test_start_when_there_is_no_script_then_the_hosts_own_modules_are_followed(tmp_path: Path) -> None:
    write_tree(core(tmp_path), {"megatron/core/__init__.py": "import absent_kernels\n"})
    findings = start(tmp_path)
    assert [finding.subject for finding in findings] == ["script", "import"]
    assert "absent_kernels" in problems(findings)[0]


VISION = {"training": "import megatron.data.vit_dataset\n\n\ndef pretrain():\n    pass\n"}


@pytest.mark.parametrize(("variable", "mended"), [("", True), ("MEGATRON_DISTOPT_FIXES", False)])
def test_start_when_a_fix_is_declared_then_it_is_listed_or_a_problem_where_it_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, mended: bool
) -> None:
    monkeypatch.setattr("megatron_distopt.hosts.fixes.first_missing", lambda name: name)
    hide(monkeypatch, "torchvision", "yaml")
    fork = with_script(tmp_path, "from megatron.training import pretrain\n", **VISION)
    write_tree(fork, {"megatron/data/__init__.py": "", "megatron/data/vit_dataset.py": "import torchvision\n"})
    if variable:
        monkeypatch.setenv(variable, "no")
    findings = start(fork)
    (fix,) = [finding for finding in findings if finding.subject == "host fix"]
    assert "torchvision" in fix.text
    assert (fix.status is not Status.PROBLEM) is mended
    assert bool(problems(findings)) is not mended


def test_start_when_the_same_package_is_needed_elsewhere_too_then_the_fix_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_distopt.hosts.fixes.first_missing", lambda name: name)
    hide(monkeypatch, "torchvision", "yaml")
    fork = with_script(tmp_path, "import megatron.data.vit_dataset\nimport torchvision\n")
    write_tree(fork, {"megatron/data/__init__.py": "", "megatron/data/vit_dataset.py": "import torchvision\n"})
    (found,) = problems(start(fork))
    assert "pretrain_gpt.py:2" in found
