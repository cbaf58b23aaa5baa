"""A user's program in a Megatron with main params as remainders has the effect that it has with
fp32 main params, or is refused."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from megatron_distopt.optimizer.low_precision.low_precision_tensor import Precision
from tests.hosts import promises, test_promise_2023, test_promise_core
from tests.hosts.promises import Act, Outcome, Program
from tests.hosts.test_state_precision import asked_for
from tests.support.facts import facts_of
from tests.support.mini_fork import InstalledFork, core_folder

REMAINDER = Precision("remainder")


def _write_data(user: Any) -> None:
    """By `.data`, which torch's count of writes does not see."""
    for param in user.params.values():
        param.data.mul_(0.5)


def _read_and_keep_data(user: Any) -> None:
    """As a host that logs the norm of the params; more often than aliases are held."""
    user.noted["norm"] = sum(
        float(param.data.float().norm()) for param in user.params.values() for _ in range(20)
    )
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


def _change_and_put_back(user: Any) -> None:
    """Other weights, and then the same bits again, which nobody looks at."""
    own = {name: param.detach().clone() for name, param in user.params.items()}
    promises.halve(user)
    with torch.no_grad():
        for name, param in user.params.items():
            param.copy_(own[name])


def _change_and_save(user: Any) -> None:
    """What is saved would be neither the weights before nor those after."""
    promises.halve(user)
    user.noted["save"] = promises.raised(
        lambda: user.optimizer.save_parameter_state("/nowhere/distrib_optim.pt")
    )


#: In a setting with bf16 params.
PROGRAMS: dict[str, Act] = {
    "changes weights": promises.halve,
    "changes them by .data": _write_data,
    "changes them before a load that fails": _change_and_fail(promises.halve),
    "changes them and saves": _change_and_save,
    "changes them and puts them back": _change_and_put_back,
    "a load fails": _change_and_fail(bool),
    "reads them by .data and keeps it": _read_and_keep_data,
    "freezes and edits options": _freeze_and_edit_the_groups,
}
REFUSED = tuple(name for name in PROGRAMS if name.startswith("changes"))
#: By program, the one that comes to the same with fp32 main params, where that is another.
ALIKE = dict.fromkeys(("a load fails", "reads them by .data and keeps it"), "nothing")


@dataclass(frozen=True)
class Compared:
    """Of a program: whether fp32 main params and remainders end alike, what remainders raised, and
    what was noted."""

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
        leave: Callable[[], object] = bool
        if host == "megatron_2023":
            fork = InstalledFork.imported(file_layout="gathered", adam="fused")
            train: Callable[[Program], Outcome] = partial(test_promise_2023._train, fork, ours=True)
            leave = fork.uninstall  # what is asked for is read when the package is installed
            options = {
                "setting": test_promise_2023.BF16,
                "base": import_module("megatron.optimizer").Adam,
            }
        else:
            train, options = (
                partial(test_promise_core._train, ours=True),
                {"setting": test_promise_core.BF16},
            )
        plain: dict[str, Outcome] = {}
        with asked_for(Precision()):
            for name in (ALIKE.get(name, name) for name in PROGRAMS if name not in REFUSED):
                plain[name] = plain.get(name) or train(Program(PROGRAMS.get(name), at=1, **options))
        errors = {outcome.error for outcome in plain.values()}
        assert errors == {""}, errors
        leave()
        with asked_for(REMAINDER):
            return {
                name: Compared.of(
                    plain.get(ALIKE.get(name, name)), train(Program(act, at=1, **options))
                )
                for name, act in PROGRAMS.items()
            }


megatron_2023 = facts_of(act_in, 2, "megatron_2023", seconds=200, before=core_folder)
megatron_core = facts_of(act_in, 2, "megatron_core", seconds=200, core=True)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("host", ["megatron_2023", "megatron_core"])
def test_remainders_when_a_user_of_a_megatron_acts_then_training_is_that_of_fp32_or_refused(
    host: str, name: str, request: pytest.FixtureRequest
) -> None:
    for compared in request.getfixturevalue(host)[name]:
        if name in REFUSED:
            assert "remainder" in compared.error and "reload_model_params()" in compared.error
        else:
            assert (compared.error, compared.are_equal) == ("", True)
        assert "Error" in str(compared.noted.get("load", "Error"))
        assert "reload_model_params()" in str(compared.noted.get("save", "reload_model_params()"))
