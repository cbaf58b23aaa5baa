"""Would training start here, and with what: the fork, this machine, the environment and the launch flags."""

from __future__ import annotations

import dataclasses
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_distopt.cli import doctor, doctor_machine
from megatron_distopt.cli.doctor import describe_fork
from megatron_distopt.cli.patch import plan_apply, write
from megatron_distopt.cli.show import Finding, Status, noted, ok, problem
from megatron_distopt.config import DistOptConfig
from megatron_distopt.device import CPU
from megatron_distopt.hosts.source.block import GROUP
from megatron_distopt.hosts.source.found import Need, SourceLine, Survey
from megatron_distopt.hosts.source.survey import survey
from megatron_distopt.hosts.source.tree import fork_at
from megatron_distopt.optimizer.accelerator import CUDA, Accelerator
from tests.support.fork_trees import core, early_core, gathered_2023, neox, per_rank_2023, pre_distopt, write_tree
from tests.support.refusals import Said

OURS = EntryPoint("distopt", "megatron_distopt.plugin.entry_point:distopt", GROUP)
FLAG = "--use-distributed-optimizer"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of ours, our entry point registered, the CPU named by torch (DeepSpeed takes seconds to ask)."""
    for variable in [name for name in os.environ if name.startswith("MEGATRON_DISTOPT")]:
        monkeypatch.delenv(variable)
    entries(monkeypatch, OURS)
    monkeypatch.setattr(doctor_machine, "find_accelerator", lambda choice: Accelerator(CPU, "torch"))
    yield


def entries(monkeypatch: pytest.MonkeyPatch, *registered: EntryPoint) -> None:
    monkeypatch.setattr(doctor, "entry_points", EntryPoints(registered).select)


def read(folder: Path) -> Survey:
    return survey(fork_at(folder))


def of(findings: list[Finding], subject: str) -> Finding:
    (found,) = [finding for finding in findings if finding.subject == subject]
    return found


def problems(findings: list[Finding]) -> list[str]:
    return [finding.text for finding in findings if finding.status is Status.PROBLEM]


@pytest.mark.parametrize("make", [per_rank_2023, gathered_2023, core])
def test_doctor_when_a_fork_is_supported_then_training_could_start(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    findings = doctor.diagnose(make(tmp_path), [])
    assert problems(findings) == []
    assert not problems(findings)
    assert of(findings, "source").text == str(tmp_path.resolve())
    assert {finding.section for finding in findings} == {"fork", "start", "machine", "environment"}
    subjects = {"generation", "get_megatron_optimizer", "DistributedOptimizer", "flag", "python", "torch", "torchrun"}
    assert subjects <= {finding.subject for finding in findings}


@pytest.mark.parametrize("make", [early_core, pre_distopt, neox])
def test_doctor_when_a_generation_has_no_adapter_then_a_problem_with_what_to_do(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    found = read(make(tmp_path))
    findings = doctor.diagnose(tmp_path, [FLAG])
    rule = "Must be one that an adapter exists for; megatron-distopt hosts lists them."
    assert problems(findings) == [f"Invalid host: {found.generation.name}. {rule} {found.generation.remedy}."]
    assert not [finding for finding in findings if finding.section == "launch"]  # they would not be read by us


def test_doctor_when_the_path_is_no_fork_then_a_problem_and_the_machine_is_described_all_the_same(
    tmp_path: Path,
) -> None:
    findings = doctor.diagnose(tmp_path / "nowhere", [])
    assert problems(findings) == [
        Said(f"Invalid fork: {tmp_path / 'nowhere'} does not exist", "Write the path of your Megatron's checkout.")
    ]
    assert of(findings, "torch").status is Status.OK


def test_doctor_when_no_fork_is_named_then_the_working_directorys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(gathered_2023(tmp_path))
    findings = doctor.diagnose(None, [])
    assert of(findings, "source").text == str(tmp_path.resolve())
    assert (
        of(findings, "checkpoints").text
        == "gathered file: one file by the fork, a folder that loads at any size by ours"
    )


def test_doctor_when_other_code_touches_the_patch_points_then_it_says_where(tmp_path: Path) -> None:
    findings = list(describe_fork(read(per_rank_2023(tmp_path))))
    assert of(findings, "get_megatron_optimizer").text == (
        "free in megatron/optimizer/__init__.py:4: (model, no_weight_decay_cond, scale_lr_cond, lr_mult)"
    )
    assert of(findings, "get_megatron_optimizer by value").text == "in megatron/training.py:1; each is rebound"
    assigned = of(findings, "parse_args assigned")
    assert (assigned.status, assigned.text) == (Status.NOTE, "in tools/convert.py:2; what runs last wins")
    assert of(findings, "flag").text == f"{FLAG} (megatron/arguments.py:7)"


def test_doctor_when_another_patcher_is_in_the_file_then_a_problem(tmp_path: Path) -> None:
    file = per_rank_2023(tmp_path) / "megatron/optimizer/__init__.py"
    file.write_text(file.read_text() + "get_megatron_optimizer = wrap(get_megatron_optimizer)\n")
    assert problems(list(describe_fork(read(tmp_path)))) == [
        Said(
            "Invalid megatron.optimizer.get_megatron_optimizer: bound to something else in "
            "megatron/optimizer/__init__.py:6",
            "Take the other patcher out, or install megatron_distopt before it.",
        )
    ]


@pytest.mark.parametrize(("file", "status"), [("megatron/bad.py", Status.PROBLEM), ("tools/bad.py", Status.NOTE)])
def test_doctor_when_a_file_is_no_python_then_a_problem_only_inside_the_package(
    file: str, status: Status, tmp_path: Path
) -> None:
    write_tree(per_rank_2023(tmp_path), {file: "x = 1\nparse_args = = 2\n"})
    found = of(list(describe_fork(read(tmp_path))), "unreadable")
    said = Said(f"Invalid source: {file}:2 (invalid syntax)", "Correct that line.")
    assert (found.status, found.text) == (status, said)


def test_doctor_when_the_data_parallel_group_has_no_name_then_a_problem(tmp_path: Path) -> None:
    write_tree(per_rank_2023(tmp_path), {"megatron/core/parallel_state.py": "def get_embedding_group(): ...\n"})
    assert problems(list(describe_fork(read(tmp_path)))) == [
        Said(
            "Invalid parallel state: no get_data_parallel_group, only get_embedding_group",
            "Use a Megatron that docs/hosts.md lists.",
        )
    ]


def test_doctor_when_patched_and_not_registered_then_a_problem_because_the_fork_would_ask_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(plan_apply(fork_at(per_rank_2023(tmp_path))))
    assert of(doctor.diagnose(tmp_path, []), "entry point").text == (
        "distopt is registered in megatron.optimizer_factories; the fork asks for it"
    )
    entries(monkeypatch)
    findings = doctor.diagnose(tmp_path, [])
    assert problems(findings) == [
        Said("Invalid entry point distopt: not registered", "Run pip install megatron-distopt in this Python.")
    ]


def test_doctor_when_others_are_registered_or_installed_then_it_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries(monkeypatch, OURS, EntryPoint("other", "package:factory", GROUP))
    monkeypatch.syspath_prepend(write_tree(tmp_path / "path", {"mindspeed/__init__.py": "raise OSError\n"}))
    findings = doctor.diagnose(per_rank_2023(tmp_path / "fork"), [])
    texts = [finding.text for finding in findings if finding.section == "environment"]
    assert "also other = package:factory; they are used in order of names" in texts
    assert "mindspeed (MindSpeed) replaces functions of Megatron too; install megatron_distopt before it" in texts
    assert not problems(findings)


@pytest.mark.parametrize(
    ("variables", "status", "text"),
    [
        ({}, Status.OK, "no MEGATRON_DISTOPT variable is set"),
        ({"MEGATRON_DISTOPT_NONFINITE": "skip"}, Status.OK, "MEGATRON_DISTOPT_NONFINITE=skip"),
        ({"MEGATRON_DISTOPT": "0"}, Status.NOTE, "MEGATRON_DISTOPT=0: switched off, the host's own optimizer runs"),
        (
            {"MEGATRON_DISTOPT": "2"},
            Status.PROBLEM,
            Said("Invalid MEGATRON_DISTOPT: '2'", "Write MEGATRON_DISTOPT=1."),
        ),
    ],
)
def test_doctor_when_variables_are_set_then_shows_and_checks_them(
    variables: dict[str, str], status: Status, text: str | Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = of(doctor.diagnose(per_rank_2023(tmp_path), []), "variables")
    assert (found.status, found.text) == (status, text)


def test_doctor_when_a_variable_is_misspelt_then_a_problem_that_names_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_DISTOPT_ADMA", "apex")
    (text,) = problems(doctor.diagnose(per_rank_2023(tmp_path), []))
    assert text.startswith("Invalid environment variable: MEGATRON_DISTOPT_ADMA. Must be one of MEGATRON_DISTOPT, ")
    assert text.endswith(" Write MEGATRON_DISTOPT_ADAM.")


def test_doctor_when_torch_is_not_installed_then_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    findings = doctor.diagnose(per_rank_2023(tmp_path), [])
    assert problems(findings) == [Said("Invalid torch: not installed", "Run pip install torch.")]


def describe(config: DistOptConfig | None = None, found: Survey | None = None) -> list[Finding]:
    return list(doctor_machine.describe_machine(config or DistOptConfig(), found))


def test_machine_when_adam_is_asked_for_by_name_and_cannot_be_had_then_a_problem() -> None:
    found = of(describe(DistOptConfig(adam="transformer_engine")), "inner optimizer")
    assert (found.status, found.text) == (
        Status.PROBLEM,
        Said("Invalid adam 'transformer_engine': has no kernels for cpu", "Install it, or write adam='auto'."),
    )


def test_machine_when_a_better_adam_is_not_there_then_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "find_accelerator", lambda choice: Accelerator("npu", "torch"))
    assert "no fused AdamW for npu" in of(describe(), "inner optimizer").text


def test_machine_when_deepspeed_fails_then_a_problem_and_the_rest_is_still_described(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(choice: str) -> Accelerator:
        raise RuntimeError("no driver")

    monkeypatch.setattr(doctor_machine, "find_accelerator", fail)
    findings = describe()
    assert problems(findings) == [
        Said(
            "Invalid accelerator: deepspeed fails (no driver)",
            "Repair deepspeed, or set MEGATRON_DISTOPT_ACCELERATOR=torch.",
        )
    ]
    assert of(findings, "torchrun")


@pytest.fixture
def impostor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unrelated project that `pip install apex` gets."""
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    monkeypatch.syspath_prepend(write_tree(tmp_path / "pypi", {"apex/__init__.py": ""}))


@pytest.mark.usefixtures("impostor")
def test_machine_when_apex_is_the_unrelated_project_then_it_says_so() -> None:
    found = of(describe(), "apex")
    assert found.status is Status.NOTE
    assert "the installed 'apex' is not NVIDIA's but an unrelated project of that name from PyPI" in found.text


def with_needs(tmp_path: Path, *needs: Need) -> Survey:
    return dataclasses.replace(read(per_rank_2023(tmp_path / "fork")), needs=needs)


@pytest.mark.usefixtures("impostor")
def test_machine_when_the_fork_imports_apex_in_any_case_then_a_problem(tmp_path: Path) -> None:
    found = with_needs(tmp_path, Need("apex", SourceLine("megatron/optimizer/__init__.py", 3), False))
    assert problems(describe(found=found)) == [
        Said(
            "Invalid package apex: not importable",
            "Build NVIDIA apex from its sources; pip install apex gets an unrelated project.",
        )
    ]


@pytest.mark.parametrize(("device_type", "status"), [(CPU, Status.NOTE), (CUDA, Status.PROBLEM)])
def test_machine_when_a_condition_decides_then_a_problem_only_where_it_is_true(
    device_type: str, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_machine, "find_accelerator", lambda choice: Accelerator(device_type, "torch"))
    found = with_needs(tmp_path, Need("amp_C", SourceLine("a.py", 1), True))
    assert of(describe(found=found), "needs amp_C").status is status


def test_machine_when_the_backend_of_the_device_is_missing_then_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "find_accelerator", lambda choice: Accelerator(CUDA, "torch"))
    monkeypatch.setattr(doctor_machine, "available_backends", lambda: ("gloo",))
    assert of(describe(), "process groups").text == Said(
        "Invalid process group backends: gloo", "Install a torch that was built with it."
    )


def test_machine_when_launchers_are_missing_or_anothers_then_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchrun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = describe()
    assert of(findings, "torchrun").text == (
        f"{tmp_path / 'torchrun'}, which is not in the folder of this Python ({sys.executable})"
    )
    assert of(findings, "deepspeed") == noted("machine", "deepspeed", "not on PATH")


def test_doctor_when_a_flag_names_an_adam_then_that_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_DISTOPT_ADAM", "torch_foreach")
    found = of(doctor.diagnose(per_rank_2023(tmp_path), [FLAG, "--distopt-adam", "apex"]), "inner optimizer")
    assert found.status is Status.PROBLEM  # the flag wins
    text = of(doctor.diagnose(tmp_path, [FLAG]), "inner optimizer").text
    assert text == "torch_foreach (asked for by name)"


def report(findings: list[Finding], width: int | None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(doctor, "diagnose", lambda fork, launch: findings)
    return doctor.answer(Namespace(fork=None, launch=[])).as_text(width).splitlines()


def test_report_when_shown_then_a_line_a_finding_and_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [ok("fork", "source", "/fork"), noted("machine", "torchrun", "absent"), problem("machine", "a", "Bad.")]
    lines = [line.split() for line in report(findings, None, monkeypatch)]
    for row in (["fork"], ["ok", "source", "/fork"], ["machine"], ["note", "torchrun", "absent"]):
        assert row in lines
    assert ["problem", "a", "Bad."] in lines
    assert lines[-1][:2] == ["1", "problem:"]


def test_report_when_narrow_then_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = report([ok("fork", "source", "word " * 20)], 60, monkeypatch)
    assert all(len(line) <= 60 for line in lines)
    assert sum(line.count("word") for line in lines) == 20


def test_doctor_when_it_looks_then_no_host_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork = per_rank_2023(tmp_path)
    for file in fork.rglob("*.py"):
        file.write_text(f"{file.read_text()}\nraise SystemExit('was imported')\n")
    monkeypatch.chdir(fork)
    monkeypatch.syspath_prepend(str(fork))
    assert not problems(doctor.diagnose(None, []))


def test_doctor_when_a_stand_in_without_a_spec_is_loaded_then_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in: Any = ModuleType("primus")
    stand_in.__spec__ = None
    monkeypatch.setitem(sys.modules, "primus", stand_in)
    texts = [finding.text for finding in doctor.diagnose(per_rank_2023(tmp_path), [])]
    assert "primus (Primus) replaces functions of Megatron too; install megatron_distopt before it" in texts


def test_doctor_when_a_real_fork_is_given_then_only_kernels_can_be_a_problem() -> None:
    if "MEGATRON_FORK" not in os.environ:
        pytest.skip("MEGATRON_FORK names no checkout of a fork")
    findings = doctor.diagnose(Path(os.environ["MEGATRON_FORK"]), [FLAG, "--bf16"])
    assert [each for each in findings if each.status is Status.PROBLEM and not each.subject.startswith("needs")] == []


def test_entry_point_when_named_then_it_is_there() -> None:
    module, _, attribute = OURS.value.partition(":")
    assert callable(getattr(import_module(module), attribute))
