"""State that is offloaded between steps, as frameworks for reinforcement learning do it while they
generate.

There is one device here, so "moved away" is "copied to other memory of the CPU", which changes
everything that a move changes; and moments on torch's meta device, which keeps no values, show what
is refused.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_distopt.errors import LayoutError, RanksDisagreeError
from megatron_distopt.layout import Span
from tests.support.cases import Case
from tests.support.exact_core import variables
from tests.support.facts import Facts, facts_of, outcomes

SIZE = 2
BF16 = Case("distopt", dp=SIZE, precision="bf16", num_microbatches=1)
FP32 = BF16.of(precision="fp32")
#: State in other forms than fp32: variables that ask for it.
FORMS = {"MAIN_PARAMS_DTYPE": "remainder", "EXP_AVG_DTYPE": "int8", "EXP_AVG_SQ_DTYPE": "int8"}


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _as_verl_does(optimizer: Any) -> None:
    """One direction of verl/utils/megatron_utils.py: assigns to `data` of main params and to the
    entries of state."""
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


def _as_roll_does(optimizer: Any) -> None:
    """ROLL's offload_states.py copies all of a kind into one tensor, and gives each a part; then
    the host's buffers."""
    for part in _parts(optimizer):
        _move_buffers(part)
        mains = [param for group in part.shard_fp32_from_float16_groups for param in group]
        states = [
            state for state in part.optimizer.state.values() if type(state["exp_avg"]) is Tensor
        ]
        for tensors in (
            mains,
            [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")],
        ):
            whole, start = torch.empty(sum(tensor.numel() for tensor in tensors)), 0
            for tensor in tensors:
                part_of = whole.narrow(0, start, tensor.numel()).copy_(tensor.view(-1))
                tensor.data, start = part_of.view(tensor.shape), start + tensor.numel()


def _move_buffers(part: Any) -> None:
    """ROLL's offload_states_patch.py: params move with their buffer, gradients are dropped and made
    anew."""
    for buffer in part.buffers:
        buffer.param_data.data = buffer.param_data.data.clone()
        usual, numel = buffer.grad_data.dtype, buffer.grad_data.numel()
        buffer.grad_data.data = torch.tensor(1, dtype=usual)
        buffer.grad_data.data = torch.zeros(numel, dtype=usual)
        for param, (start, stop, _) in buffer.param_index_map.items():
            param.data = buffer.param_data[start:stop].view(param.shape)
            param.main_grad = buffer.grad_data[start:stop].view(param.shape)
        for bucket in buffer.buckets:
            elements = slice(bucket.offset, bucket.offset + bucket.grad_data.numel())
            bucket.param_data.data, bucket.grad_data.data = (
                buffer.param_data[elements],
                buffer.grad_data[elements],
            )


WAYS: tuple[Callable[[Any], object], ...] = (
    _as_verl_does,
    _as_nemo_does,
    _as_megatron_core_does,
    _as_roll_does,
)
#: After each step but the last: a loss that differs tells which. The first again, which moves what
#: the others left.
MOVES = (*WAYS, *WAYS[::-1])


def _storages(optimizer: Any) -> Iterator[torch.UntypedStorage]:
    """All that we see of the host's buffers, main params of 16-bit params, and moments."""
    for part in _parts(optimizer):
        yield from (
            tensor.untyped_storage()
            for buffer in part.sharded.buffers
            for tensor in (buffer.param, buffer.grad)
        )
        for flat in part.sharded.flat_params:
            if flat.owns_memory:
                yield flat.main.untyped_storage()
            yield from (
                each.untyped_storage()
                for each in part.optimizer.state[flat.main].values()
                if each.dim()
            )


def _moved_and_back(case: Case) -> None:
    """Every bit is that of a run without moves."""
    from tests.support import gpt

    found = []
    for moves in (True, False):
        with contextlib.closing(gpt.Training(case)) as training:
            losses = [training.step().loss]
            for move in MOVES:
                if moves:
                    move(training.optimizer)
                losses.append(training.step().loss)
            found.append((losses, training.params()))
    (moved, params), (usual, others) = found
    assert moved == usual
    assert all(torch.equal(param, others[name]) for name, param in params.items())


def _freed(case: Case) -> None:
    """After ROLL's way the old memory is free, and what the host publishes of it follows."""
    from tests.support import gpt

    with contextlib.closing(gpt.Training(case)) as training:
        training.step()
        before = [StorageWeakRef(storage) for storage in _storages(training.optimizer)]
        _as_roll_does(training.optimizer)
        # At once in most runs; what holds the memory of rank 0 longer in some is not known.
        end = time.monotonic() + 10.0
        while not all(storage.expired() for storage in before) and time.monotonic() < end:
            gc.collect()
            time.sleep(0.02)
        assert all(storage.expired() for storage in before)
        published = [getattr(param, "main_param", None) for _, param in training.named_params()]
        mains = [main.untyped_storage().data_ptr() for main in published if main is not None]
        assert bool(mains) == (case.precision == "bf16")
        assert set(mains) <= {storage.data_ptr() for storage in _storages(training.optimizer)}
        # as the host's own `buffer.offload_to_cpu()`: what a save reads is not there
        if case.precision == "fp32":
            _parts(training.optimizer)[0].buffers[0].param_data.untyped_storage().resize_(0)
            with pytest.raises(LayoutError, match="a main param has no values"):
                training.optimizer.save("unused")


def _refused_meanwhile(rank: int, folder: Path) -> None:
    """Rank 1 finds what is wrong, and rank 0 is told."""
    from tests.support import gpt

    kind = LayoutError if rank == 1 else RanksDisagreeError
    with contextlib.closing(gpt.Training(BF16)) as training:
        training.step()
        optimizer = training.optimizer
        optimizer.save(folder)
        if rank == 1:
            for state in (
                each for part in _parts(optimizer) for each in part.optimizer.state.values()
            ):
                state["exp_avg"] = state["exp_avg"].to("meta")
        for call in (training.step, lambda: optimizer.save(folder), lambda: optimizer.load(folder)):
            with pytest.raises(kind, match=r"emptied: exp_avg .* loads it again"):
                call()
    for change, said in CHANGES.items():
        with contextlib.closing(gpt.Training(BF16)) as training:
            training.step()
            training.forward_backward()
            if rank == 1:
                change(_parts(training.optimizer)[0])
            with pytest.raises(kind, match=said):
                training.optimizer.step()


def _empty_a_moment(part: Any) -> None:
    """AReaL's megatron_adapter.py leaves empty tensors in the state until it loads them again."""
    next(iter(part.optimizer.state.values()))["exp_avg"] = torch.empty(0)


def _drop_grads(part: Any) -> None:
    """ROLL, before it loads them again."""
    part.buffers[0].grad_data.data = torch.tensor(1.0)


def _move_grads_alone(part: Any) -> None:
    """What params and buckets have is in the memory before."""
    part.buffers[0].grad_data.data = torch.zeros_like(part.buffers[0].grad_data)


def _cut_a_main_param(part: Any) -> None:
    main = part.shard_fp32_from_float16_groups[0][0]
    main.data = main.data[:-1]


CHANGES: dict[Callable[[Any], None], str] = {
    _empty_a_moment: "exp_avg",
    _drop_grads: "grad buffer was emptied .* call buffer.reload_from_cpu",
    _move_grads_alone: "grad buffer was given other memory.* bucket 0",
    _cut_a_main_param: r"main param of \d+ fp32 elements is now torch.float32 \[.*another device",
}


def _refused_elsewhere() -> None:
    """State that is on another device than the params."""
    from megatron_distopt.hosts.megatron_core.state_between_phases import OffloadedState

    flat = SimpleNamespace(
        main=torch.zeros(2), model=torch.zeros(2, device="meta"), owns_memory=True, on_host=None
    )
    flat.plan = SimpleNamespace(in_buffer=Span(0, 2))
    sharded = SimpleNamespace(flat_params=[flat], inner=torch.optim.SGD([flat.main]))
    with pytest.raises(LayoutError, match=r"is on cpu.* on meta.*restore_from_cpu\(\)"):
        OffloadedState(cast("Any", sharded)).check_is_back()


NAMES = (
    "bf16",
    "remainder, int8 and fp8",
    "memory of bf16",
    "memory of fp32",
    "refused meanwhile",
    "refused elsewhere",
)


def collect_facts(rank: int, size: int, folder: Path) -> dict[str, str]:
    checks = (
        partial(
            _moved_and_back, BF16.of(dp=1, pp=SIZE, vp=2, tied=False, num_microbatches=SIZE)
        ),  # two grad buffers of one optimizer
        variables(FORMS)(partial(_moved_and_back, BF16)),
        partial(_freed, BF16),
        partial(_freed, FP32),
        partial(_refused_meanwhile, rank, folder / "kept"),
        _refused_elsewhere,
    )
    return outcomes(dict(zip(NAMES, checks, strict=True)))


facts = facts_of(collect_facts, SIZE, core=True)


@pytest.mark.parametrize("name", NAMES)
def test_run_when_state_moves_away_between_steps_then_it_goes_on_to_the_bit_or_is_refused(
    facts: Facts, name: str
) -> None:
    facts.assert_passed(name)
