"""Gradients in 8 bits between nodes in plain torch: equal runs, resumed runs, NaN on one rank, one
node, refusals.

One spawn of two ranks, which count as two nodes by the number of a network namespace where a case
says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Embedding, LayerNorm, Linear, Module, Sequential

from megatron_distopt import distribute
from megatron_distopt.comm import pairwise, shared_memory
from megatron_distopt.errors import DistOptError
from tests.support.refusals import assert_mentions
from tests.support.spawn import run_ranks

RANKS, STEPS = 2, 4


@dataclass(frozen=True)
class Script:
    """What a user's script does beside training in bf16 with AdamW."""

    dtype: torch.dtype = torch.bfloat16
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW
    microbatches: int = 1
    late: str | None = None  # a param that begins to train in the second step
    nan: bool = False  # whether the second rank's loss is NaN


INT8 = {"reduce_dtype": "int8"}
#: By name: further options; all with the same result, to the bit.
ALIKE: Mapping[str, dict[str, Any]] = {
    "repeated": {},
    "overlapped": {"overlap_grad_reduce": True},
    "in buckets": {"bucket_size": 3000},
    "overlapped in buckets": {
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket_size": 3000,
    },
}
#: By name: scripts whose result does not depend on overlap either.
SCRIPTS: Mapping[str, Script] = {
    "accumulated": Script(microbatches=2),
    "by an optimizer that does not count": Script(kind=torch.optim.SGD),
    "a param begins to train": Script(late="body.2.weight"),
}
#: By name: options, and what the refusal mentions.
REFUSED: Mapping[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown word": ({**INT8, "reduce_exact": "router,embedd"}, ("reduce_exact", "'embedd'")),
    "no use": ({"reduce_exact": "embed"}, ("reduce_exact", "reduce_dtype='int8'")),
    "16-bit grads": (
        {**INT8, "grads_in_fp32": False},
        ("reduce_dtype='int8'", "bfloat16", "grads_in_fp32=True"),
    ),
}


class Model(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = Embedding(50, 40)
        self.body = Sequential(Linear(40, 64), LayerNorm(64), Linear(64, 64))
        self.router = Linear(64, 8, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.body(self.embed(tokens)).relu()
        return (
            hidden.square().mean() + self.router(hidden).float().sigmoid().square().mean()
        ).float()


def _two_nodes(patch: pytest.MonkeyPatch) -> Any:
    """A new group, whose ranks have found out that they are on two nodes."""
    handle = dist.new_group()
    patch.setattr(shared_memory, "_network", dist.get_rank)
    return handle


def _train(
    folder: Path,
    handle: Any,
    script: Script = Script(),
    *,
    stop: int = STEPS,
    load: bool = False,
    **options: Any,
) -> Any:
    """Losses and params after some steps; saved at the end where it is not loaded."""
    model = Model().to(script.dtype)
    late = None if script.late is None else model.get_parameter(script.late).requires_grad_(False)
    given = script.kind(model.parameters(), lr=0.01)
    optimizer = distribute(model, given, process_group=handle, **{**INT8, **options})
    if load:
        optimizer.load(folder)
    if "protect_every" in options:
        assert optimizer.resume() is None, "nothing is there"
    losses = []
    for step in range(2 if load else 0, STEPS if load else stop):
        if late is not None:
            late.requires_grad_(step > 0)
        for microbatch in range(script.microbatches):
            generator = torch.Generator().manual_seed(
                100 * step + 10 * microbatch + dist.get_rank()
            )
            loss = model(torch.randint(0, 50, (4, 6), generator=generator))
            with optimizer.no_sync() if microbatch < script.microbatches - 1 else nullcontext():
                loss = loss * torch.nan if script.nan and dist.get_rank() == 1 else loss
                optimizer.scale_loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if "protect_every" in options:
            optimizer.protect(step + 1)
    optimizer.finish_param_gather()
    if stop < STEPS and not load:
        optimizer.save(folder)
    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer.release()
    return losses, params


def _is_equal(one: Any, other: Any) -> bool:
    return one[0][-2:] == other[0][-2:] and all(
        torch.equal(one[1][name], other[1][name]) for name in one[1]
    )


def _refusal(handle: Any, **options: Any) -> str:
    model = Model().bfloat16()
    try:
        distribute(model, torch.optim.AdamW(model.parameters()), process_group=handle, **options)
    except DistOptError as error:
        return f"{type(error).__name__}: {error}"
    return "trains"


def _all(rank: int, size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        wanted = _train(folder, _two_nodes(patch))
        for name, options in ALIKE.items():
            found[name] = _is_equal(_train(folder, _two_nodes(patch), **options), wanted)
        _train(folder, _two_nodes(patch), stop=2)
        found["resumed"] = _is_equal(_train(folder, _two_nodes(patch), load=True), wanted)
        exact = _train(folder, _two_nodes(patch), reduce_dtype=None)
        found["fp32 sums"] = _is_equal(
            _train(folder, _two_nodes(patch), reduce_dtype="float32"), exact
        )
        found["rounds"] = not _is_equal(wanted, exact)
        found["losses"] = max(abs(a - b) / b for a, b in zip(wanted[0], exact[0], strict=True))
        found["nan"] = _nan(folder, _two_nodes(patch))
        found["fp16"] = _overflow(_two_nodes(patch))
        for name, script in SCRIPTS.items():
            runs = [
                _train(folder, _two_nodes(patch), script, **ALIKE[options])
                for options in ("repeated", "overlapped")
            ]
            found[name] = _is_equal(*runs) and all(
                param.isfinite().all() for param in runs[0][1].values()
            )
        by_adam = _train(folder, _two_nodes(patch), Script(microbatches=2))
        found["differs"] = not _is_equal(by_adam, wanted)
        patch.setenv("MEGATRON_DISTOPT_REDUCE_EXACT", "embed,0,2,router")
        found["all exempted"] = _is_equal(_train(folder, _two_nodes(patch)), exact)
        patch.delenv("MEGATRON_DISTOPT_REDUCE_EXACT")
        digests = []
        for name in ("repeated", "overlapped in buckets"):
            file = folder / f"{name}.jsonl"
            _train(folder, _two_nodes(patch), log_digests=1, digest_file=str(file), **ALIKE[name])
            lines = [
                json.loads(line) for line in file.read_text().splitlines() if '"digests":[' in line
            ]
            # buckets have another order
            digests.append([sorted(line["digests"]) for line in lines])
            dist.barrier()
        found["digests"] = digests[0] == digests[1] and len(digests[0]) > STEPS
        memory = {"protect_every": 1, "protect_folder": str(folder / "memory" / str(rank))}
        found["protected"] = _is_equal(_train(folder, _two_nodes(patch), **memory), wanted)
        found["bytes"] = _bytes(_two_nodes(patch), folder)
    on_one = _train(folder, dist.new_group(), reduce_dtype=None)
    found["one node"] = _is_equal(_train(folder, dist.new_group()), on_one)
    found["refused"] = {
        name: _refusal(dist.new_group(), **options) for name, (options, _) in REFUSED.items()
    }
    return found


def _nan(folder: Path, handle: Any) -> str:
    try:
        _train(folder, handle, Script(nan=True))
    except DistOptError as error:
        return type(error).__name__
    return "trains"


def _overflow(handle: Any) -> list[tuple[str, float | None]]:
    """What steps with a dynamic loss scale did where the loss of one rank is inf in the second, and
    their scales."""
    model = Model().half()
    options = {"loss_scale": "dynamic", "initial_loss_scale": 64.0, "hysteresis": 1, **INT8}
    optimizer = distribute(
        model, torch.optim.AdamW(model.parameters()), process_group=handle, **options
    )
    done = []
    for step in range(3):
        loss = model(torch.arange(24).view(4, 6))
        scaled = optimizer.scale_loss(loss)
        (scaled * torch.inf if step == 1 and dist.get_rank() == 1 else scaled).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.last_step is not None
        done.append((optimizer.last_step.action.value, float(optimizer.scale_loss(torch.ones(())))))
    optimizer.release()
    return done


def _gathered(bucket: Tensor, group: Any) -> None:
    dist.all_gather_into_tensor(
        bucket, bucket.view(group.size, -1)[group.rank].clone(), group=group.handle
    )


def _bytes(handle: Any, folder: Path) -> tuple[int, int]:
    """What a rank sends to the other node in each step for gradients, and the elements that it owns
    not."""
    sent, original = [0], pairwise.send

    def counted(tensor: Tensor, *args: Any) -> Any:
        sent[0] += tensor.numel() * tensor.element_size()
        return original(tensor, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairwise, "send", counted)
        # The params are gathered by the same calls.
        patch.setattr(pairwise, "all_gather", _gathered)
        _train(folder, handle)
    return sent[0] // STEPS, sum(param.numel() for param in Model().parameters())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_all, RANKS, tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize(
    "name", [*ALIKE, "resumed", "protected", "digests", *SCRIPTS, "all exempted", "differs"]
)
def test_int8_when_a_run_is_repeated_with_other_buckets_or_resumed_then_it_is_equal_to_the_bit(
    name: str, found: list[dict[str, Any]]
) -> None:
    assert [each[name] for each in found] == [True] * RANKS


def test_int8_when_there_is_one_node_then_nothing_is_rounded(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["one node"] and each["fp32 sums"] and each["rounds"]
        assert each["losses"] < 0.05  # of a loss that four steps of Adam halve


def test_int8_when_a_gradient_of_one_rank_is_nan_then_the_step_is_refused_on_all(
    found: list[dict[str, Any]],
) -> None:
    assert [each["nan"] for each in found] == ["NonFiniteGradError"] * RANKS


def test_int8_when_one_rank_overflows_in_fp16_then_all_skip_and_halve_their_scale(
    found: list[dict[str, Any]],
) -> None:
    for each in found:
        assert each["fp16"] == [("update", 64.0), ("skip", 32.0), ("update", 32.0)]


def test_int8_when_bytes_are_counted_then_an_element_takes_one_and_an_exempted_one_four(
    found: list[dict[str, Any]],
) -> None:
    numel, coded = found[0]["bytes"][1], (50 * 40 // 128 + 40 * 64 // 128 + 64 * 64 // 128) * 128
    for each in found:
        # Half of each goes to the other rank; padding of up to a block for each param and for each
        # shard goes along.
        least = (coded * (1 + 1 / 128) + 4 * (numel - coded)) / 2
        assert 0.8 * least < each["bytes"][0] < 1.4 * least


@pytest.mark.parametrize("name", REFUSED)
def test_int8_when_an_option_would_do_nothing_then_refused(
    name: str, found: list[dict[str, Any]]
) -> None:
    for each in found:
        assert_mentions(each["refused"][name], *REFUSED[name][1])
