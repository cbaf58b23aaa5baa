"""Muon on flat params of several ranks against torch's on whole matrices, at zero tolerance, and
what it sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_distopt.buffers import ShardedBuffer, move_into_buffer
from megatron_distopt.comm import Group, gather_params, messages
from megatron_distopt.layout import MatrixSpec, ParamSpec, lay_out
from megatron_distopt.optimizer.main_params import (
    FlatParamKey,
    ParamGroup,
    build_flat_params,
    main_grads,
)
from megatron_distopt.optimizer.owners import update_on_owners
from megatron_distopt.optimizer.owners.sharded_muon import Matrices, ShardedMuon
from tests.optimizer.test_muon import matrices_in, trained, values
from tests.support.facts import Facts, facts_of

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")

SIZES, NUM_STEPS = (1, 2, 3), 3
#: Two groups, by name of the param; an element-wise param of each kind lies between.
SPECS = {
    "wide": MatrixSpec(12, 40),
    "tall": MatrixSpec(33, 6),
    "gate_up": MatrixSpec(30, 8, sizes=(15, 15)),
    "qkv": MatrixSpec(48, 5, sizes=(10, 1, 1), repeats=4),
    "columns": MatrixSpec(10, 21, dim=1, sizes=(2, 4, 1), repeats=3),
    "experts": MatrixSpec(28, 5, sizes=(7,) * 4),
}
GROUPS = {"wide": 0, "tall": 1, "gate_up": 0, "qkv": 1, "columns": 1, "experts": 0}
OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.02},
    {"lr": 0.3, "adjust_lr_fn": "match_rms_adamw", "nesterov": False},
]
BIAS = ParamSpec("bias", 37)


@dataclass(frozen=True)
class Case:
    """One way to lay the params out, and the params that are left out of the second step.

    `by_backend`: pieces travel as they do over NCCL, as one operation of the backend and without
    tags.
    """

    bucket_size: int | None = None
    alignment_numel: int = 64
    dtype: torch.dtype = torch.float32
    left_out: frozenset[str] = frozenset()
    by_backend: bool = False


CASES = {
    "one bucket": Case(),
    "packed tightly": Case(alignment_numel=1),
    "small buckets": Case(bucket_size=300),
    "bf16": Case(alignment_numel=8, dtype=torch.bfloat16),
    "by the backend": Case(bucket_size=300, by_backend=True),
    "some left out": Case(bucket_size=600, left_out=frozenset(("tall", "gate_up"))),
}


def _start(case: Case) -> dict[str, Tensor]:
    tensors = values([(spec.rows, spec.cols) for spec in SPECS.values()], 0)
    return {name: tensor.to(case.dtype) for name, tensor in zip(SPECS, tensors, strict=True)}


def _grads(step: int) -> dict[str, Tensor]:
    return dict(
        zip(SPECS, values([(spec.rows, spec.cols) for spec in SPECS.values()], step), strict=True)
    )


def expected(case: Case) -> dict[str, list[Tensor]]:
    """The matrices of each param, in the dtype of the model, after torch's Muon trained fp32 copies
    of them."""
    found = {}
    for name, start in _start(case).items():
        mains = [Parameter(part.float()) for part in matrices_in(start, SPECS[name])]
        optimizer = torch.optim.Muon(mains, **OPTIONS[GROUPS[name]])
        for step in range(1, 1 + NUM_STEPS):
            if step != 2 or name not in case.left_out:
                trained(optimizer, mains, [matrices_in(_grads(step)[name], SPECS[name])])
        found[name] = [main.detach().to(case.dtype) for main in mains]
    return found


def train(case: Case, group: Group) -> tuple[dict[str, Tensor], int, int]:
    """Collective: the whole params after training, bytes that this rank sent, and bytes that the
    plan says."""
    starts = _start(case)
    named = {name: Parameter(start.clone()) for name, start in starts.items()}
    named["bias"] = Parameter(torch.ones(BIAS.numel, dtype=case.dtype))
    order = ("wide", "bias", *(name for name in SPECS if name != "wide"))
    params = [ParamSpec(name, named[name].numel()) for name in order]
    layout = lay_out(
        params,
        num_shards=group.size,
        bucket_size=case.bucket_size,
        alignment_numel=case.alignment_numel,
    )
    grad = torch.zeros(layout.numel)
    buffer = ShardedBuffer(layout, group.rank, grad, move_into_buffer(named, layout))
    flats = build_flat_params(
        [buffer], lambda name: FlatParamKey(GROUPS[name], False) if name in SPECS else None
    )
    mains: list[list[Tensor]] = [[], []]
    for flat in flats:
        mains[flat.plan.key.group].append(flat.main)
    options = [{"ns_steps": 5, **of_group} for of_group in OPTIONS]
    optimizer = ShardedMuon(
        [{"params": mains[number], **options[number]} for number in range(2)],
        matrices=Matrices(SPECS, lambda name: group),
    )
    names = [tuple(name for name in GROUPS if GROUPS[name] == number) for number in range(2)]
    groups = [ParamGroup(options[number], names[number]) for number in range(2)]
    optimizer.hold([buffer], flats, groups)
    (plan,) = optimizer.owners
    sent = 0
    begin = update_on_owners.begin_travel

    def counted(outgoing: Any, *rest: Any) -> Any:
        nonlocal sent
        sent += sum(message.tensor.nbytes for message in outgoing)
        return begin(outgoing, *rest)

    messages_over = "none" if case.by_backend else messages._TAGGED_OVER
    with (
        mock.patch.object(update_on_owners, "begin_travel", counted),
        mock.patch.object(messages, "_TAGGED_OVER", messages_over),
    ):
        for step in range(1, 1 + NUM_STEPS):
            for name, each in _grads(step).items():
                grad[layout.slot_of[name].in_buffer.as_slice()] = each.view(-1)
            optimizer.left_out = case.left_out if step == 2 else frozenset()
            for flat, flat_grad in zip(flats, main_grads(flats), strict=True):
                flat.main.grad = (
                    None if flat.plan.shards[0].name in optimizer.left_out else flat_grad
                )
            optimizer.step()
    for flat in flats:
        flat.write_model()
    gather_params(buffer, group)
    pieces = (*plan.leaving(group.rank), *plan.arriving(group.rank))
    planned = sum(
        2 * piece.in_buffer.numel * (NUM_STEPS - (piece.name in case.left_out)) for piece in pieces
    )
    return {name: named[name].detach().clone() for name in named}, sent, planned


def collect_facts(
    rank: int, world_size: int
) -> dict[tuple[str, int], tuple[dict[str, Tensor], int, int]]:
    groups = {size: dist.new_group(range(size)) for size in SIZES}
    return {
        (name, size): train(case, Group.of(handle))
        for size, handle in groups.items()
        for name, case in CASES.items()
        if rank < size
    }


facts = facts_of(collect_facts, max(SIZES))


@pytest.mark.parametrize("name", CASES)
def test_flat_muon_when_matrices_are_cut_over_ranks_then_equal_to_torchs_and_sent_as_planned(
    name: str, facts: Facts
) -> None:
    wanted = expected(CASES[name])
    for size in SIZES:
        total = 0
        for rank in range(size):
            params, sent, planned = facts.by_rank[rank][name, size]
            for param, spec in SPECS.items():
                for own, other in zip(matrices_in(params[param], spec), wanted[param], strict=True):
                    assert torch.equal(own, other), (param, rank)
            assert torch.equal(params["bias"], torch.ones(BIAS.numel, dtype=CASES[name].dtype))
            assert sent == planned
            total += sent
        assert (total > 0) == (size > 1)
