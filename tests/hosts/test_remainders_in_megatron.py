"""What users of a Megatron do, with main params as remainders: it has the effect that it has in fp32, or is refused."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import pytest

from megatron_distopt.optimizer.low_precision.state_precision import Precision
from tests.hosts import promises, test_promise_2023, test_promise_core
from tests.hosts.promises import Act, Outcome, Program
from tests.hosts.test_state_precision import asked_for
from tests.support.mini_fork import MiniFork, core_folder
from tests.support.spawn import run_ranks

REMAINDER = Precision("remainder")


def _write_data(user: Any) -> None:
    """By `.data`, which torch's count of writes does not see."""
    for param in user.params.values():
        param.data.mul_(0.5)


def _write_to_a_view(user: Any) -> None:
    for param in user.params.values():
        param.data.view(-1)[:1].zero_()


def _read_and_keep_data(user: Any) -> None:
    """As a host that logs the norm of the params; more often than aliases are held."""
    user.noted["norm"] = sum(float(param.data.float().norm()) for param in user.params.values() for _ in range(20))
    user.noted["aliases"] = [param.data for param in user.params.values()]


def _freeze_and_edit_the_groups(user: Any) -> None:
    promises.freeze(user)
    promises.edit_the_groups(user)


def _change_and_fail(change: Act, *, reloads: bool = False) -> Act:
    def act(user: Any) -> None:
        change(user)
        nowhere = "/nowhere/mp_rank_00/distrib_optim.pt"
        user.noted["load"] = promises.raised(lambda: user.optimizer.load_parameter_state(nowhere))
        if reloads:
            user.optimizer.reload_model_params()

    return act


#: In a setting with bf16 params.
PROGRAMS: dict[str, Act] = {
    "changes weights": promises.halve,
    "changes them by .data": _write_data,
    "changes a view of them by .data": _write_to_a_view,
    "changes them before a load that fails": _change_and_fail(promises.halve),
    "changes them by .data before a load that fails": _change_and_fail(_write_data),
    "changes them and reloads": promises.halve_and_reload,
    "changes them before a load that fails and reloads": _change_and_fail(promises.halve, reloads=True),
    "a load fails": _change_and_fail(bool),
    "reads them by .data and keeps it": _read_and_keep_data,
    "freezes and edits options": _freeze_and_edit_the_groups,
}
REFUSED = tuple(name for name in PROGRAMS if name.startswith("changes") and not name.endswith("reloads"))
#: By program, the one that comes to the same with fp32 main params, where that is another.
ALIKE = dict.fromkeys(("a load fails", "reads them by .data and keeps it"), "nothing")
ALIKE |= {"changes them before a load that fails and reloads": "changes them and reloads"}


@dataclass(frozen=True)
class Pair:
    """Of a program: whether fp32 main params and remainders end alike, what remainders raised, and what was noted."""

    are_equal: bool
    error: str
    noted: Mapping[str, Any]


def _compare_all(train: Callable[[Program], Outcome], setting: Any, **options: Any) -> dict[str, Pair]:
    """Collective: each program with remainders, and once what it comes to with fp32 main params."""
    plain: dict[str, Outcome] = {}
    with asked_for(Precision()):
        for name in (ALIKE.get(name, name) for name in PROGRAMS if name not in REFUSED):
            plain[name] = plain.get(name) or train(Program(PROGRAMS.get(name), setting=setting, at=1, **options))
    assert {outcome.error for outcome in plain.values()} == {""}
    with asked_for(REMAINDER):
        return {
            name: _pair(plain.get(ALIKE.get(name, name)), train(Program(act, setting=setting, at=1, **options)))
            for name, act in PROGRAMS.items()
        }


def _pair(plain: Outcome | None, ours: Outcome) -> Pair:
    noted = {key: value for key, value in ours.noted.items() if key != "aliases"}
    return Pair(plain is not None and promises._same(plain, ours), ours.error, noted)


def act_in_2023(rank: int, size: int) -> dict[str, Pair]:
    """Collective."""
    fork = MiniFork.imported(file_layout="gathered", adam="fused")
    own = import_module("megatron.optimizer").Adam

    with redirect_stdout(io.StringIO()):
        return _compare_all(partial(test_promise_2023._train, fork, ours=True), test_promise_2023.BF16, base=own)


def act_in_core(rank: int, size: int) -> dict[str, Pair]:
    """Collective."""
    return _compare_all(partial(test_promise_core._train, ours=True), test_promise_core.BF16)


@pytest.fixture(scope="module", params=["megatron_2023", "megatron_core"])
def found(request: pytest.FixtureRequest) -> list[dict[str, Pair]]:
    core_folder()
    return run_ranks({"megatron_2023": act_in_2023, "megatron_core": act_in_core}[request.param], 2, seconds=200)


@pytest.mark.parametrize("name", PROGRAMS)
def test_remainders_when_a_user_of_a_megatron_acts_then_training_is_that_of_fp32_or_refused(
    found: list[dict[str, Pair]], name: str
) -> None:
    for of_rank in found:
        pair = of_rank[name]
        if name in REFUSED:
            assert "remainder" in pair.error and "reload_model_params()" in pair.error
        else:
            assert (pair.error, pair.are_equal) == ("", True)
        assert "Error" in pair.noted.get("load", "Error")
