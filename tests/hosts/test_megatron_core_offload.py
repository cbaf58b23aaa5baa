"""State that is offloaded between steps, as frameworks for reinforcement learning do it while they generate.

There is one device here, so "moved away" is "copied to other memory of the CPU", which changes everything that a move
changes; and moments on torch's meta device, which keeps no values, show what is refused.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_distopt.errors import DistOptError, LayoutError, RanksDisagreeError
from tests.support.cases import Case
from tests.support.exact_core import variables
from tests.support.spawn import run_ranks

SIZE = 2
CASES = {
    "bf16": Case("distopt", dp=SIZE, precision="bf16"),
    "fp32": Case("distopt", dp=SIZE, precision="fp32"),
    "fp16": Case("distopt", dp=SIZE, precision="fp16"),
    "tensor parallel": Case("distopt", tp=SIZE, precision="bf16"),
}
#: State in other forms than fp32, by name: variables that ask for it.
FORMS = {
    "remainder and int8": {"MAIN_PARAMS_DTYPE": "remainder", "EXP_AVG_DTYPE": "int8", "EXP_AVG_SQ_DTYPE": "int8"},
    "bf16 alone": dict.fromkeys(("MAIN_PARAMS_DTYPE", "EXP_AVG_DTYPE", "EXP_AVG_SQ_DTYPE"), "bfloat16"),
    "float16 and fp8": {"MAIN_PARAMS_DTYPE": "float16", "EXP_AVG_SQ_DTYPE": "float8_e4m3fn"},
}
Facts = dict[str, Any]


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _as_verl_does(optimizer: Any) -> None:
    """One direction of verl/utils/megatron_utils.py: assigns to `data` of main params and to the entries of state."""
    for part in _parts(optimizer):
        for group in part.shard_fp32_from_float16_groups:
            for param in group:
                param.data = param.data.clone()
        for state in part.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state:
                    state[name] = state[name].clone()


def _as_nemo_does(optimizer: Any) -> None:
    """NeMo-RL moves whatever is a tensor in the state."""
    for part in _parts(optimizer):
        for state in part.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.clone()


def _as_megatron_core_does(optimizer: Any) -> None:
    optimizer.offload_to_cpu()
    optimizer.restore_from_cpu()


WAYS: tuple[Callable[[Any], object], ...] = (_as_verl_does, _as_nemo_does, _as_megatron_core_does)
#: After each step but the last: a loss that differs tells which. The first again, which moves what the others left.
MOVES = (*WAYS, WAYS[0])


def _storages(optimizer: Any) -> Iterator[torch.UntypedStorage]:
    """All that is ours: main params of 16-bit params, and moments."""
    for part in _parts(optimizer):
        for flat in part.sharded.flat_params:
            if flat.owns_memory:
                yield flat.main.untyped_storage()
            yield from (each.untyped_storage() for each in part.optimizer.state[flat.main].values() if each.dim())


def _trained(case: Case, *, moves: bool) -> Facts:
    from tests.support import gpt

    with contextlib.closing(gpt.Training(case)) as training:
        losses = [training.step().loss]
        for move in MOVES:
            if moves:
                move(training.optimizer)
            losses.append(training.step().loss)
        params = {name: param.detach().clone() for name, param in training.named_params()}
        return {"losses": losses, "params": [each for _, each in sorted(params.items(), key=lambda item: item[0])]}


def _freed(case: Case) -> Facts:
    """Whether the old memory is free after verl's way, and what the host publishes of it follows."""
    from tests.support import gpt

    with contextlib.closing(gpt.Training(case)) as training:
        training.step()
        before = [StorageWeakRef(storage) for storage in _storages(training.optimizer)]
        _as_verl_does(training.optimizer)
        gc.collect()
        published = [
            param.main_param for _, param in training.named_params() if getattr(param, "main_param", None) is not None
        ]
        now = {storage.data_ptr() for storage in _storages(training.optimizer)}
        return {
            "left": sum(not storage.expired() for storage in before),
            "published": [each.untyped_storage().data_ptr() in now for each in published],
        }


def _refused_meanwhile(rank: int, case: Case, folder: str) -> Facts:
    from tests.support import gpt

    facts: Facts = {}
    with contextlib.closing(gpt.Training(case)) as training:
        training.step()
        optimizer = training.optimizer
        calls: dict[str, Callable[[], object]] = {
            "step": training.step,
            "save": lambda: optimizer.save(Path(folder) / "kept"),
            "load": lambda: optimizer.load(Path(folder) / "kept"),
        }
        optimizer.save(Path(folder) / "kept")
        facts["other size"] = _text_of(lambda: _assign(optimizer, lambda main: main[:-1]))
        if rank == 1:
            for state in (each for part in _parts(optimizer) for each in part.optimizer.state.values()):
                state["exp_avg"] = state["exp_avg"].to("meta")
        for name, call in calls.items():
            facts[name] = _text_of(call)
    for name, change in CHANGES.items():
        with contextlib.closing(gpt.Training(case)) as training:
            training.step()
            training.forward_backward()
            if rank == 1:
                change(_parts(training.optimizer)[0])
            facts[name] = _text_of(training.optimizer.step)
    return facts


def _empty_a_moment(part: Any) -> None:
    """AReaL's megatron_adapter.py leaves empty tensors in the state until it loads them again."""
    next(iter(part.optimizer.state.values()))["exp_avg"] = torch.empty(0)


def _replace_grads(part: Any) -> None:
    """ROLL's offload_states_patch.py assigns to `data` of the host's buffers."""
    part.buffers[0].grad_data.data = torch.zeros_like(part.buffers[0].grad_data)


CHANGES: dict[str, Callable[[Any], None]] = {"exp_avg": _empty_a_moment, "grad buffer": _replace_grads}


def _refused_elsewhere() -> tuple[type, str] | None:
    """Of state that is on another device than the params."""
    from megatron_distopt.hosts.megatron_core.state_between_phases import OffloadedState

    flat = SimpleNamespace(main=torch.zeros(2), model=torch.zeros(2, device="meta"), owns_memory=True, on_host=None)
    sharded = SimpleNamespace(flat_params=[flat], inner=torch.optim.SGD([flat.main]))
    return _text_of(OffloadedState(cast("Any", sharded), []).check_is_back)


def _assign(optimizer: Any, change: Callable[[Tensor], Tensor]) -> None:
    for part in _parts(optimizer):
        for (main,) in part.shard_fp32_from_float16_groups:
            main.data = change(main.data)


def _text_of(call: Callable[[], object]) -> tuple[type, str] | None:
    try:
        call()
    except DistOptError as error:
        return type(error), str(error)
    return None


def collect(rank: int, size: int, folder: str) -> Facts:
    facts: Facts = {name: [_trained(case, moves=moves) for moves in (True, False)] for name, case in CASES.items()}
    for name, options in FORMS.items():
        with variables(options):
            facts[name] = [_trained(CASES["bf16"], moves=moves) for moves in (True, False)]
    facts["freed"] = {name: _freed(CASES[name]) for name in ("bf16", "fp32")}
    return facts | {"refused": _refused_meanwhile(rank, CASES["bf16"], folder), "elsewhere": _refused_elsewhere()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    return run_ranks(collect, SIZE, str(tmp_path_factory.mktemp("offload")), core=True)


@pytest.mark.parametrize("case", [*CASES, *FORMS])
def test_run_when_state_moves_away_and_back_between_steps_then_every_bit_is_the_same(
    found: list[Facts], case: str
) -> None:
    for facts in found:
        moved, usual = facts[case]
        assert moved["losses"] == usual["losses"]
        assert all(map(torch.equal, moved["params"], usual["params"]))


@pytest.mark.parametrize("case", ["bf16", "fp32"])
def test_state_when_moved_as_by_verl_then_its_old_memory_is_free_and_main_params_follow(
    found: list[Facts], case: str
) -> None:
    for facts in found:
        assert facts["freed"][case]["left"] == 0
        assert all(facts["freed"][case]["published"])
    assert case == "fp32" or any(facts["freed"][case]["published"] for facts in found)


@pytest.mark.parametrize("what", ["step", "save", "load"])
def test_call_when_the_state_of_one_rank_is_emptied_then_refused_on_all_ranks(found: list[Facts], what: str) -> None:
    (theirs, text), (kind, own) = found[0]["refused"][what], found[1]["refused"][what]
    assert kind is LayoutError
    assert "emptied" in own and "exp_avg" in own and "load it again" in own
    assert theirs is RanksDisagreeError
    assert "rank 1" in text


@pytest.mark.parametrize("what", CHANGES)
def test_step_when_one_rank_emptied_or_replaced_memory_then_refused_on_all(found: list[Facts], what: str) -> None:
    assert all(what in facts["refused"][what][1] for facts in found)


def test_main_params_when_something_of_another_size_is_assigned_then_refused(found: list[Facts]) -> None:
    for facts in found:
        kind, text = facts["refused"]["other size"]
        assert kind is LayoutError
        assert "torch.float32 [" in text and "on another device" in text


def test_step_when_the_state_is_on_another_device_then_refused(found: list[Facts]) -> None:
    kind, text = found[0]["elsewhere"]
    assert kind is LayoutError
    assert "is on cpu" in text and "on meta" in text and "restore_from_cpu()" in text
