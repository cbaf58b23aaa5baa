"""Whose value an option of a param group has after a resume, in each host: the table in
docs/checkpoint.md, by line.

The run that loads has other values than the one that saved. In the ranks each value is set in the
live param groups, where the hosts set it from their flags.

Exercises checkpoint/param_groups.py.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import megatron_distopt
from megatron_distopt.errors import CheckpointError, RanksDisagreeError
from megatron_distopt.optimizer.sharded import ShardedOptimizer
from tests.support.cases import Case
from tests.support.refusals import logged
from tests.support.spawn import run_ranks

SAVED = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "max_lr": 1e-3,
    "min_lr": 1e-4,
}
SAVED |= {"lr_mult": 1.0, "wd_mult": 1.0, "start_wd": 0.1, "end_wd": 0.1}
OF_RUN = {
    "lr": 5e-4,
    "weight_decay": 0.2,
    "betas": (0.8, 0.9),
    "eps": 1e-6,
    "max_lr": 5e-4,
    "min_lr": 5e-5,
}
OF_RUN |= {"lr_mult": 2.0, "wd_mult": 0.5, "start_wd": 0.2, "end_wd": 0.3}
HOSTS = {"plain torch": 0, "Megatron of 2023": 1, "megatron-core": 2}  # columns of the table
MULTIPLIERS = ("lr_mult", "wd_mult")  # by which a fork of 2023 tells its groups apart
USE_CHECKPOINT = "--use-checkpoint-opt_param-scheduler"
PAGE = Path(__file__).parents[2] / "docs" / "checkpoint.md"


def _whose(groups: list[dict[str, Any]], keys: Collection[str] = SAVED.keys()) -> dict[str, str]:
    """By option the owner of the value that all groups have."""
    owners = dict[str, str]()
    for key in [key for key in keys if all(key in group for group in groups)]:
        values = {group[key] for group in groups if group["params"]}
        if values in ({SAVED[key]}, {OF_RUN[key]}):
            owners[key] = "checkpoint" if values == {SAVED[key]} else "run"
    return owners


def _set(
    groups: list[dict[str, Any]], values: Mapping[str, Any], given: Iterable[ShardedOptimizer] = ()
) -> None:
    """Sets options in live groups, and as if the optimizers had been built with them."""
    for group in groups:
        group.update(values)
    for sharded in given:
        built = [replace(each, options={**each.options, **values}) for each in sharded.plan.groups]
        sharded.plan = replace(sharded.plan, groups=built)


# In the ranks: by name of the case, the owners and the lines.

Found = dict[str, tuple[dict[str, str], list[str]]]


class _Counting(torch.optim.AdamW):
    """Counts its steps in its groups, which is no option."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def _in_torch(rank: int, size: int, folder: Path) -> Found:
    found: Found = {}
    model = torch.nn.Linear(4, 3)
    optimizer = megatron_distopt.distribute(
        model, _Counting(model.parameters()), updates="elements"
    )
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    # Groups of a Megatron have a wd_mult, by which its scheduler is known.
    for name, left_out in (("folder", "wd_mult"), ("state_dict", "max_lr")):
        for values in (SAVED, OF_RUN):
            optimizer.param_groups[0].pop(left_out, None)
            _set(
                optimizer.param_groups,
                {key: value for key, value in values.items() if key != left_out},
                [optimizer.sharded],
            )
            if values is SAVED:
                optimizer.save(folder / name)
                state = copy.deepcopy(optimizer.state_dict())
                optimizer.step()
        with logged() as lines:
            optimizer.load(folder / name) if name == "folder" else optimizer.load_state_dict(state)
        found[name] = (_whose(optimizer.param_groups), lines)
    return found


def _in_2023(rank: int, size: int, folder: Path, file_layout: str) -> Found:
    from tests.support.mini_fork import InstalledFork

    fork, found = InstalledFork.imported(file_layout=file_layout), Found()

    def loop(
        forward_step: Any, model: Any, optimizer: Any, scheduler: Any, iterator: Any
    ) -> list[Any]:
        from megatron import get_args

        fork.training.train_step(forward_step, iterator, model, optimizer, scheduler)
        found["its groups"] = (
            dict.fromkeys(SAVED.keys() - optimizer.param_groups[0].keys(), "none"),
            [],
        )
        kept = optimizer.param_groups[0].keys() - set(MULTIPLIERS)
        _set(optimizer.param_groups, {key: value for key, value in SAVED.items() if key in kept})
        name = str(folder / file_layout / "mp_rank_00" / "distrib_optim.pt")
        state = optimizer.state_dict()
        optimizer.save_parameter_state(name)
        for case, flag in (("run's schedule", False), (USE_CHECKPOINT, True)):
            _set(
                optimizer.param_groups, {key: value for key, value in OF_RUN.items() if key in kept}
            )
            with (
                mock.patch.object(
                    get_args(), "use_checkpoint_opt_param_scheduler", flag, create=True
                ),
                logged() as lines,
            ):
                optimizer.load_state_dict(state)
                optimizer.load_parameter_state(name)
            found[case] = (_whose(optimizer.param_groups, SAVED.keys() & kept), lines)
        for key in MULTIPLIERS:
            before = [group[key] for group in optimizer.param_groups]
            _set(optimizer.param_groups, {key: OF_RUN[key]})
            with pytest.raises(
                (CheckpointError, RanksDisagreeError), match="This run has a param group with"
            ):
                optimizer.load_state_dict(state)
            found[f"other {key}"] = ({key: "refused"}, [])
            for group, value in zip(optimizer.param_groups, before, strict=True):
                group[key] = value
        return []

    with mock.patch.object(fork.training, "train", loop):
        fork.train("--bf16", "--use-distributed-optimizer")
    return found


def _in_core(rank: int, size: int, folder: Path) -> Found:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from tests.support.gpt import Training

    found: Found = {}
    with contextlib.closing(Training(Case("distopt", dp=size, num_microbatches=1))) as training:
        optimizer = training.optimizer
        training.step()
        given = [each.sharded for each in optimizer.ours()]
        _set(optimizer.param_groups, SAVED, given)
        optimizer.save(folder / "core")
        head = optimizer.state_dict()
        for case, flag in (("run's schedule", False), (USE_CHECKPOINT, True)):
            args = SimpleNamespace(
                _GLOBAL_ARGS=SimpleNamespace(use_checkpoint_opt_param_scheduler=flag)
            )
            with mock.patch.dict(sys.modules, {"megatron.training.global_vars": args}):
                for way in ("head", "folder"):
                    _set(optimizer.param_groups, OF_RUN, given)
                    with logged() as lines:
                        optimizer.load_state_dict(head) if way == "head" else optimizer.load(
                            folder / "core"
                        )
                    found[f"{case}, {way}"] = (_whose(optimizer.param_groups), lines)
        numbers = {
            "init_lr": 0.0,
            "max_lr": 5e-4,
            "min_lr": 5e-5,
            "lr_warmup_steps": 0,
            "lr_decay_steps": 100,
        }
        weight_decay = {
            "start_wd": 0.1,
            "end_wd": 0.1,
            "wd_incr_steps": 100,
            "wd_incr_style": "constant",
        }
        _set(optimizer.param_groups, {**OF_RUN, "lr_mult": 1.0, "end_wd": 0.2})
        optimizer.load(folder / "core")
        scheduler = OptimizerParamScheduler(
            optimizer,
            lr_decay_style="linear",
            **numbers,
            **weight_decay,
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )
        scheduler.load_state_dict(
            {**scheduler.state_dict(), "max_lr": 1e-3, "min_lr": 1e-4, "num_steps": 50}
        )
        lr = {group["lr"] for group in optimizer.param_groups}
        found["scheduler that overrides"] = ({"lr": str([round(each, 9) for each in lr])}, [])
    return found


@cache
def _found() -> dict[str, Found]:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = {
            "plain torch": run_ranks(_in_torch, 1, folder)[0],
            "megatron-core": run_ranks(_in_core, 2, folder, core=True)[0],
        }
        for layout in ("gathered", "per_rank"):
            by_case = run_ranks(_in_2023, 2, folder, layout)[0]
            found.setdefault("Megatron of 2023", {}).update(
                {f"{case}, {layout}": each for case, each in by_case.items()}
            )
        return found


def _table() -> dict[str, list[str]]:
    """The lines of the table by option: who has the say in each host."""
    rows = [
        line.strip("| ").split(" | ")
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line[:1] == "|"
    ]
    return {
        key: row[1:]
        for row in rows
        if len(row) == 4
        for key in row[0].replace("`", "").split(", ")
        if key in SAVED
    }


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("key", SAVED)
def test_option_when_a_run_with_another_value_resumes_then_it_is_whose_the_page_says(
    key: str, host: str
) -> None:
    wanted = _table()[key][HOSTS[host]].split()[-1]
    cases = {
        case: owners for case, (owners, _) in _found()[host].items() if "overrides" not in case
    }
    assert any(key in owners for owners in cases.values()), f"{key} was not tried in {host}"
    for case, owners in cases.items():
        of_flag = "checkpoint" if USE_CHECKPOINT in case else wanted
        assert owners.get(key, of_flag) == of_flag, f"{key} in {host}, {case}"


@pytest.mark.parametrize("host", HOSTS)
def test_resume_when_it_changed_options_then_each_is_told_in_one_line(host: str) -> None:
    for case, (owners, logged_lines) in _found()[host].items():
        lines = [line for line in logged_lines if line.startswith("resumed: ")]
        # Megatron logs what its scheduler sets.
        silent = {"lr", "weight_decay"} if host != "plain torch" or "wd_mult" in owners else set()
        told = {
            line.split()[1]: "run" if "in this run;" in line else "checkpoint" for line in lines
        }
        wanted = {key: owner for key, owner in owners.items() if key not in silent}
        if lines or (not {"none", "refused"} & {*wanted.values()} and "overrides" not in case):
            assert (told, len(lines)) == (wanted, len(told)), f"{case}: {lines}"


def test_scheduler_when_it_overrides_that_of_the_checkpoint_then_lr_follows_the_run() -> None:
    # Half of a linear decay from 5e-4 to 5e-5.
    assert _found()["megatron-core"]["scheduler that overrides"][0]["lr"] == "[0.000275]"
