"""State in low precision in both Megatrons: what users do with remainders, and checkpoints that cross precisions.

A user's program with main params as remainders has the effect that it has with fp32 main params, or is refused. A
training of a fork of 2023 at tensor-parallel size 2 or 1 is saved in one precision, and resumed at the other size in
another one; what each of two ranks owns after the load is compared with the saved tensors of the whole model.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import pytest

from megatron_distopt.checkpoint.source import Source
from megatron_distopt.checkpoint.whole_model import WholeModel, owned_pieces
from megatron_distopt.optimizer.low_precision.low_precision_tensor import Precision
from tests.checkpoint.test_precision_resume import ERRORS, PRECISIONS
from tests.hosts import promises, test_promise_2023, test_promise_core
from tests.hosts import test_megatron_2023_reshard as reshard_2023
from tests.hosts.promises import Act, Outcome, Program
from tests.hosts.test_state_precision import asked_for
from tests.support.mini_fork import MiniFork, core_folder
from tests.support.spawn import run_ranks

REMAINDER = Precision("remainder")


def _write_data(user: Any) -> None:
    """By `.data`, which torch's count of writes does not see."""
    for param in user.params.values():
        param.data.mul_(0.5)


def _read_and_keep_data(user: Any) -> None:
    """As a host that logs the norm of the params; more often than aliases are held."""
    user.noted["norm"] = sum(float(param.data.float().norm()) for param in user.params.values() for _ in range(20))
    user.noted["aliases"] = [param.data for param in user.params.values()]


def _freeze_and_edit_the_groups(user: Any) -> None:
    promises.freeze(user)
    promises.edit_the_groups(user)


def _change_and_fail(change: Act) -> Act:
    def act(user: Any) -> None:
        change(user)
        nowhere = "/nowhere/mp_rank_00/distrib_optim.pt"
        user.noted["load"] = promises.raised(lambda: user.optimizer.load_parameter_state(nowhere))

    return act


#: In a setting with bf16 params.
PROGRAMS: dict[str, Act] = {
    "changes weights": promises.halve,
    "changes them by .data": _write_data,
    "changes them before a load that fails": _change_and_fail(promises.halve),
    "a load fails": _change_and_fail(bool),
    "reads them by .data and keeps it": _read_and_keep_data,
    "freezes and edits options": _freeze_and_edit_the_groups,
}
REFUSED = tuple(name for name in PROGRAMS if name.startswith("changes"))
#: By program, the one that comes to the same with fp32 main params, where that is another.
ALIKE = dict.fromkeys(("a load fails", "reads them by .data and keeps it"), "nothing")


@dataclass(frozen=True)
class Compared:
    """Of a program: whether fp32 main params and remainders end alike, what remainders raised, and what was noted."""

    are_equal: bool
    error: str
    noted: Mapping[str, Any]

    @classmethod
    def of(cls, plain: Outcome | None, ours: Outcome) -> Compared:
        noted = {key: value for key, value in ours.noted.items() if key != "aliases"}
        return cls(plain is not None and promises._same(plain, ours), ours.error, noted)


def act_in(rank: int, size: int, host: str) -> dict[str, Compared]:
    """Collective: each program with remainders, and once what it comes to with fp32 main params."""
    with redirect_stdout(io.StringIO()):
        if host == "megatron_2023":
            fork = MiniFork.imported(file_layout="gathered", adam="fused")
            train: Callable[[Program], Outcome] = partial(test_promise_2023._train, fork, ours=True)
            options = {"setting": test_promise_2023.BF16, "base": import_module("megatron.optimizer").Adam}
        else:
            train, options = partial(test_promise_core._train, ours=True), {"setting": test_promise_core.BF16}
        plain: dict[str, Outcome] = {}
        with asked_for(Precision()):
            for name in (ALIKE.get(name, name) for name in PROGRAMS if name not in REFUSED):
                plain[name] = plain.get(name) or train(Program(PROGRAMS.get(name), at=1, **options))
        assert {outcome.error for outcome in plain.values()} == {""}
        with asked_for(REMAINDER):
            return {
                name: Compared.of(plain.get(ALIKE.get(name, name)), train(Program(act, at=1, **options)))
                for name, act in PROGRAMS.items()
            }


@pytest.fixture(scope="module", params=["megatron_2023", "megatron_core"])
def acted(request: pytest.FixtureRequest) -> list[dict[str, Compared]]:
    core_folder()
    return run_ranks(act_in, 2, request.param, seconds=200, core=request.param == "megatron_core")


@pytest.mark.parametrize("name", PROGRAMS)
def test_remainders_when_a_user_of_a_megatron_acts_then_training_is_that_of_fp32_or_refused(
    acted: list[dict[str, Compared]], name: str
) -> None:
    for of_rank in acted:
        compared = of_rank[name]
        if name in REFUSED:
            assert "remainder" in compared.error and "reload_model_params()" in compared.error
        else:
            assert (compared.error, compared.are_equal) == ("", True)
        assert "Error" in compared.noted.get("load", "Error")


# --- checkpoints


@dataclass(frozen=True)
class Resume:
    """A training that is saved at one tensor-parallel size and loaded at the other of 1 and 2."""

    saved: str  # name of a precision
    tp: int
    loaded: str  # name of a precision

    def __str__(self) -> str:
        return f"{self.saved} tp{self.tp} to {self.loaded} tp{self.other_tp}"

    @property
    def other_tp(self) -> int:
        return 3 - self.tp

    @property
    def folder(self) -> str:
        return f"{self.saved} {self.tp}"


RESUMES = (Resume("fp32", 2, "remainder"), Resume("int8", 1, "fp8"))
#: Of losses of 4 in the first two steps after the load. Tensor-parallel ranks that add up otherwise move them by 1e-3
#: at most, and what low precision rounds by 3.5e-3 in eight steps (docs/precision.md). Lost moments move those of the
#: small fork by 6e-3 and more.
TOLERANCE = 0.005


@dataclass(frozen=True)
class Loaded:
    """What one rank found after a load."""

    numels: dict[str, int]  # by kind, how many elements of it the rank owns
    errors: dict[str, float]  # by kind, the largest error, relative to the largest value of the param
    num_wrong: int  # model params that are not what the main params of this rank round to
    losses: list[float]  # of the steps after it


#: Losses of the trainings that were saved, and what came of the resumes.
Found = tuple[dict[Resume, list[float]], dict[Resume, Loaded]]


def _compare(model: WholeModel, source: Source) -> Loaded:
    """What this rank owns, with what was saved."""
    numels, errors, num_wrong = dict[str, int](), dict[str, float](), 0
    for owned in owned_pieces(model):
        for key, tensor in owned.tensors():
            kind, whole = key.partition("/")[0], source.read(key).float()
            mine = tensor.float()
            error = (mine - whole[owned.piece.in_global.as_slices()]).abs().max() / whole.abs().max().clamp(min=1e-30)
            numels[kind] = numels.get(kind, 0) + mine.numel()
            errors[kind] = max(errors.get(kind, 0.0), float(error))
        num_wrong += owned.flat.differs_from_model()
    return Loaded(numels, errors, num_wrong, [])


def resume_2023(rank: int, size: int, folder: str) -> Found:
    """Collective."""
    fork, saved, loaded = reshard_2023._Fork(rank, folder), {}, {}

    def words(tp: int) -> tuple[str, ...]:
        layout = reshard_2023.Layout(dp=2 // tp, tp=tp)
        return reshard_2023.Saved(layout, is_exact=False, batch=4).flags(layout)

    for resume in RESUMES:
        with asked_for(PRECISIONS[resume.saved]):
            run = fork.train_and_save(resume.folder, *words(resume.tp))
        saved[resume] = run.losses[reshard_2023.SAVED_AT :]
        loaded[resume] = _resume_2023(fork, resume, words(resume.other_tp))
    return saved, loaded


def _resume_2023(fork: Any, resume: Resume, words: tuple[str, ...]) -> Loaded:
    from megatron_distopt.hosts.megatron_2023.checkpoint import whole_model_of

    folder, compared = fork.folder / resume.folder, list[Loaded]()
    source = reshard_2023._Reader(reshard_2023._folder_in(reshard_2023._saved_at(folder))).source
    look = fork.first(lambda optimizer: compared.append(_compare(whole_model_of(optimizer), source)))
    load = mock.patch.object(fork.fork.training, "load_checkpoint", reshard_2023._load_across)
    with look, load, asked_for(PRECISIONS[resume.loaded]):
        run = fork.train(*words, "--load", str(folder))
    return dataclasses.replace(compared[0], losses=run.losses)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    core_folder()
    return run_ranks(resume_2023, 2, str(tmp_path_factory.mktemp("crossed")), seconds=300)


def _allowed(kind: str, loaded: Precision) -> float:
    """The relative error that rounding leaves."""
    field = "main_params_dtype" if kind == "main" else f"{kind}_dtype"
    return ERRORS[getattr(loaded, field)] * (2 if kind == "exp_avg_sq" else 1)  # the root is rounded


@pytest.mark.parametrize("resume", RESUMES, ids=str)
def test_load_when_precision_and_tensor_parallel_size_differ_then_values_are_those_saved_as_the_new_one_rounds_them(
    found: list[Found], resume: Resume
) -> None:
    for _, resumes in found:
        assert resumes[resume].numels.keys() == {"main", "exp_avg", "exp_avg_sq"}
        for kind, error in resumes[resume].errors.items():
            assert error <= _allowed(kind, PRECISIONS[resume.loaded]), kind
        assert resumes[resume].num_wrong == 0


@pytest.mark.parametrize("resume", RESUMES, ids=str)
def test_resume_when_precision_and_tensor_parallel_size_differ_then_training_goes_on(
    found: list[Found], resume: Resume
) -> None:
    for saved, resumes in found:
        assert len(saved[resume]) == len(resumes[resume].losses)
        assert resumes[resume].losses == pytest.approx(saved[resume], abs=TOLERANCE)
