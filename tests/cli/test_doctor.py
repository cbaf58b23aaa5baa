"""Would training start here, and with what: the fork, this machine, the environment and the launch
flags."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from megatron_distopt.cli import doctor, doctor_machine
from megatron_distopt.cli.doctor import check_launch_flags
from megatron_distopt.cli.show import Finding, Status, noted, ok
from megatron_distopt.config import DistOptConfig, Switch
from megatron_distopt.device import CPU
from megatron_distopt.optimizer.accelerator import CUDA, Accelerator
from megatron_distopt.plugin.detect import Generation, recognise
from megatron_distopt.plugin.entry_point_block import GROUP
from megatron_distopt.plugin.fork_edit import plan_apply, write
from megatron_distopt.plugin.fork_source import fork_at
from tests.support.fork_trees import (
    core,
    early_core,
    gathered_2023,
    neox,
    per_rank_2023,
    pre_distopt,
    write_tree,
)

OURS = EntryPoint("distopt", "megatron_distopt.plugin.entry_point:distopt", GROUP)
FLAG = "--use-distributed-optimizer"
Make = Callable[[Path], Path]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of ours, our entry point registered, the CPU named by torch (DeepSpeed takes
    seconds to ask)."""
    for variable in [name for name in os.environ if name.startswith("MEGATRON_DISTOPT")]:
        monkeypatch.delenv(variable)
    entries(monkeypatch, OURS)
    monkeypatch.setattr(
        doctor_machine, "find_accelerator", lambda choice: Accelerator(CPU, "torch")
    )
    yield


def entries(monkeypatch: pytest.MonkeyPatch, *registered: EntryPoint) -> None:
    monkeypatch.setattr(doctor, "entry_points", EntryPoints(registered).select)


def diagnose(fork: Path | None, *launch: str) -> list[Finding]:
    return doctor.diagnose(fork, launch, has_trial=False)


def read(folder: Path) -> Generation:
    return recognise(fork_at(folder).has)


def of(findings: Sequence[Finding], subject: str) -> Finding:
    (found,) = [finding for finding in findings if finding.subject == subject]
    return found


def problems(findings: Sequence[Finding]) -> list[str]:
    return [finding.text for finding in findings if finding.status is Status.PROBLEM]


def says(text: str, *parts: str) -> bool:
    return all(part in text for part in parts)


@pytest.mark.parametrize("make", [per_rank_2023, gathered_2023, core])
def test_doctor_when_a_fork_is_supported_then_there_is_no_problem(
    make: Make, tmp_path: Path
) -> None:
    findings = diagnose(make(tmp_path))
    assert not problems(findings)
    assert of(findings, "source").text == str(tmp_path.resolve())
    assert of(findings, "get_megatron_optimizer").text.startswith("free in megatron/")
    assert [finding.section for finding in findings if finding.section == "trial"] == ["trial"]
    subjects = {"generation", "get_megatron_optimizer", "python", "torch", "process groups"}
    assert subjects <= {finding.subject for finding in findings}


@pytest.mark.parametrize("make", [early_core, pre_distopt, neox])
def test_doctor_when_a_generation_has_no_adapter_then_a_problem_with_what_to_do(
    make: Make, tmp_path: Path
) -> None:
    generation = read(make(tmp_path))
    findings = diagnose(tmp_path, FLAG)
    (text,) = problems(findings)
    assert says(text, generation.name, generation.remedy)
    assert not {finding.section for finding in findings} & {"launch", "trial"}


def test_doctor_when_the_path_is_no_fork_then_a_problem_and_the_machine_is_described_all_the_same(
    tmp_path: Path,
) -> None:
    findings = diagnose(tmp_path / "nowhere")
    assert [str(tmp_path / "nowhere") in text for text in problems(findings)] == [True]
    assert of(findings, "torch").status is Status.OK


def test_doctor_when_no_fork_is_named_then_the_working_directorys_is_read_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork = gathered_2023(tmp_path)
    for file in fork.rglob("*.py"):
        file.write_text(f"{file.read_text()}\nraise SystemExit('was imported')\n")
    monkeypatch.chdir(fork)
    monkeypatch.syspath_prepend(str(fork))
    findings = diagnose(None)
    assert not problems(findings)
    assert of(findings, "source").text == str(tmp_path.resolve())


def test_doctor_when_patched_and_not_registered_then_a_problem_because_the_fork_would_ask_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(write_tree(tmp_path / "installed", {"ray.py": ""})))
    fork = per_rank_2023(tmp_path)
    assert says(
        of(diagnose(tmp_path), "ray").text,
        "the host's own",
        "patch --apply",
        "worker_process_setup_hook",
    )
    write(plan_apply(fork_at(fork)))
    assert says(of(diagnose(tmp_path), "ray").text, "entry point")
    assert of(diagnose(tmp_path), "entry point").text.endswith("; the fork asks for it")
    entries(monkeypatch)
    (text,) = problems(diagnose(tmp_path))
    assert says(text, "distopt", "not registered", "pip install megatron-distopt")


@pytest.mark.parametrize(
    ("variables", "status", "text"),
    [
        ({}, Status.OK, "none is set"),
        ({"MEGATRON_DISTOPT_NONFINITE": "skip"}, Status.OK, "MEGATRON_DISTOPT_NONFINITE=skip"),
        ({"MEGATRON_DISTOPT": "0"}, Status.NOTE, "MEGATRON_DISTOPT=0: switched off"),
        ({"MEGATRON_DISTOPT": "2"}, Status.PROBLEM, "It must be one of 0, 1, require."),
        ({"MEGATRON_DISTOPT_ADMA": "apex"}, Status.PROBLEM, "Did you mean MEGATRON_DISTOPT_ADAM?"),
    ],
)
def test_doctor_when_variables_are_set_then_shows_and_checks_them(
    variables: dict[str, str],
    status: Status,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = of(diagnose(per_rank_2023(tmp_path)), "variables")
    assert found.status is status and text in found.text


def test_doctor_when_torch_is_not_installed_then_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    (text,) = problems(diagnose(per_rank_2023(tmp_path)))
    assert "pip install torch" in text


def machine(config: DistOptConfig | None = None) -> list[Finding]:
    return list(doctor_machine.describe_machine(config or DistOptConfig()))


def test_machine_when_adam_is_asked_for_by_name_and_cannot_be_had_then_a_problem() -> None:
    found = of(machine(DistOptConfig(adam="transformer_engine")), "inner optimizer")
    assert found.status is Status.PROBLEM and says(found.text, "transformer_engine", CPU)


def test_machine_when_deepspeed_fails_then_a_problem_and_the_rest_is_still_described(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(choice: str) -> Accelerator:
        raise RuntimeError("no driver")

    monkeypatch.setattr(doctor_machine, "find_accelerator", fail)
    (text,) = problems(machine())
    assert says(text, "deepspeed", "no driver", "MEGATRON_DISTOPT_ACCELERATOR=torch")
    assert of(machine(), "process groups")


def test_machine_when_apex_is_the_unrelated_project_of_that_name_then_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "apex", None)  # so that the fake one is gone afterwards
    del sys.modules["apex"]
    monkeypatch.syspath_prepend(write_tree(tmp_path / "pypi", {"apex/__init__.py": ""}))
    found = of(list(doctor_machine.describe_machine(DistOptConfig(adam="apex"))), "inner optimizer")
    assert found.status is Status.PROBLEM
    assert "the 'apex' of PyPI is an unrelated project" in found.text


def test_machine_when_the_backend_of_the_device_is_missing_then_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        doctor_machine, "find_accelerator", lambda choice: Accelerator(CUDA, "torch")
    )
    monkeypatch.setattr(doctor_machine, "available_backends", lambda: ("gloo",))
    found = of(machine(), "process groups")
    assert found.status is Status.PROBLEM and says(found.text, "gloo", "nccl", CUDA)


def launch(words: str, found: Generation, switch: Switch = Switch.ON) -> list[Finding]:
    return list(check_launch_flags(words.split(), found, switch))


@pytest.mark.parametrize(
    ("make", "words", "remedy"),
    [
        (per_rank_2023, "--deepspeed", "Drop --deepspeed"),
        (per_rank_2023, "--DDP-impl torch", "Write --DDP-impl local"),
        (per_rank_2023, "--use-fsdp", "Drop --use-fsdp"),
    ],
)
def test_flags_when_they_conflict_then_a_problem_only_with_ours(
    make: Make, words: str, remedy: str, tmp_path: Path
) -> None:
    found = read(make(tmp_path))
    (text,) = problems(launch(f"{words} {FLAG}", found))
    assert remedy in text
    assert problems(launch(words, found)) == []


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("--use-distributed-optimiser", FLAG),  # others are in tests/plugin/test_arguments.py
        (f"{FLAG} --distopt-nonfinite explode", "raise, skip, log"),
    ],
)
def test_flags_when_one_is_wrong_then_a_problem_that_names_the_nearest(
    word: str, nearest: str, tmp_path: Path
) -> None:
    (text,) = problems(launch(word, read(per_rank_2023(tmp_path))))
    assert says(text, word.split("=")[0].split()[-1], nearest)


def test_flags_when_ours_is_not_given_then_inert_or_a_problem_where_it_is_required(
    tmp_path: Path,
) -> None:
    found = read(per_rank_2023(tmp_path))
    words = f"torchrun pretrain_gpt.py {FLAG} --DDP-impl local --distopt-adam auto"
    assert launch(words, found) == [ok("launch", FLAG, "given, so this optimizer is used")]
    text = f"not given, so this package does nothing; add {FLAG} to use it"
    assert launch("--bf16", found) == [noted("launch", FLAG, text)]
    (required,) = problems(launch("--bf16", found, Switch.REQUIRE))
    assert says(required, "MEGATRON_DISTOPT=require", f"Add {FLAG}")
    off = launch(FLAG, found, Switch.OFF)
    assert off == [
        noted(
            "launch",
            FLAG,
            "given, but with MEGATRON_DISTOPT=0 the host's own distributed optimizer runs",
        )
    ]
