"""What megatron-core's training loop and checkpoint code read off an optimizer: checked on ours,
inside the ranks.

Each function of `CHECKS` takes models through a few steps. All of it runs on two data-parallel or
two pipeline ranks, in one spawn of `test_megatron_core_contract.py`. To be imported in the ranks
only: it imports the host.
"""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from itertools import cycle
from typing import Any

import megatron.core.optimizer as host_optimizer
import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.timers import Timers
from torch import Tensor

import megatron_distopt
from tests.support.cases import Case
from tests.support.gpt import Training, build_chunks, hosts_own_runs, optimizer_config, parts_of
from tests.support.values import from_ranks

#: Whether the host puts a chain around one optimizer as well, as it does from 0.12 on.
CHAINS_ALWAYS = "optimizer" in vars(ChainedOptimizer)
HOST_KEYS = {
    "params",
    "lr",
    "weight_decay",
    "max_lr",
    "min_lr",
    "lr_mult",
    "wd_mult",
    "is_decoupled_lr",
}
HOST_KEYS |= {"is_expert_parallel", "default_config"}
#: Options of torch's Adam that choose a kernel: those of ours mean nothing to the host's own.
KERNELS = ("fused", "foreach", "capturable", "differentiable")
BF16 = Case("distopt", dp=2, precision="bf16", num_microbatches=1)
FP32 = BF16.of(precision="fp32")
FP16 = BF16.of(precision="fp16", initial_loss_scale=1024.0)
WEIGHT = "0.decoder.layers.1.self_attention.linear_qkv.weight"


def needs(has_it: bool, what: str) -> None:
    """Ends a check of what this version of the host cannot do; the test is skipped for this
    text."""
    assert has_it, f"this megatron-core has no {what}"


@contextmanager
def trained(case: Case, steps: int = 2) -> Iterator[Training]:
    """A model that has taken a few steps."""
    with closing(Training(case)) as training:
        for _ in range(steps):
            training.step()
        yield training


def whole_main_params(training: Training) -> dict[str, Tensor]:
    """Collective: main params put together from the ranks, who own the elements of each in their
    order."""
    own = {name: param.main_param for name, param in training.named_params()}
    shards = from_ranks({name: main.clone() for name, main in own.items() if main is not None})
    return {name: torch.cat([each[name] for each in shards if name in each]) for name in own}


def set_lr(training: Training, lr: float) -> None:
    for group in training.optimizer.param_groups:
        group["lr"] = lr


def all_equal(params: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return all(torch.equal(param, others[name]) for name, param in params.items())


def what_the_host_reads() -> None:
    """Classes, attributes, param groups, flat params and timers."""
    with trained(BF16) as training:
        chained, (ours,) = training.optimizer, parts_of(training.optimizer)
        assert isinstance(chained, ChainedOptimizer if CHAINS_ALWAYS else MegatronOptimizer)
        assert isinstance(ours, DistributedOptimizer) and type(ours) is not DistributedOptimizer
        assert (chained.is_stub_optimizer, ours.is_stub_optimizer) == (False, False)
        assert chained.model_chunks == training.chunks
        assert chained.config == ours.config == optimizer_config(BF16)
        assert chained.optimizer is ours.optimizer
        assert {key for state in ours.optimizer.state.values() for key in state} == {
            "exp_avg",
            "exp_avg_sq",
            "step",
        }
        assert ours.stats_group.size == 2
        assert float(chained.get_loss_scale()) == 1.0
        assert float(chained.scale_loss(torch.tensor(3.0))) == 3.0
        assert torch.tensor(3.0).type() == "torch.FloatTensor"  # unmapped: ours compares none
        groups = chained.param_groups
        assert all(a is b for a, b in zip(groups, chained.param_groups, strict=True)), "live"
        assert [group["wd_mult"] for group in groups] == [1.0, 0.0]
        assert [group["max_lr"] for group in groups] == [3e-3, 3e-3]
        buffer = training.chunks[0].buffers[0]
        for param, span in buffer.param_index_map.items():
            assert param.data_ptr() == buffer.param_data[span[0] :].data_ptr()
        chained.config.timers = Timers(log_level=2, log_option="all")
        assert training.step().success
    with closing(Training(BF16.of(optimizer="host-plain"))) as training:
        wanted = HOST_KEYS & {key for group in training.optimizer.param_groups for key in group}
    assert len(wanted) >= len(HOST_KEYS) - 1  # "default_config" came in 0.16
    assert all(wanted <= set(group) for group in groups)


def no_param_trains_on_any_rank() -> None:
    # A rank may train nothing from 0.11 on.
    needs(
        "is_stub_optimizer" in inspect.getsource(DistributedOptimizer.__init__),
        "optimizer without params",
    )
    found = []
    for name in ("host-distributed", "distopt"):
        with closing(Training(BF16.of(optimizer=name, frozen=("",)))) as training:
            training.optimizer.zero_grad()
            with training.type_strings():
                result = training.optimizer.step()
            stubs = (
                training.optimizer.is_stub_optimizer,
                parts_of(training.optimizer)[0].is_stub_optimizer,
            )
            # Some versions count 0 zeros where nobody asked for a count.
            scale = float(training.optimizer.get_loss_scale())
            inner = parts_of(training.optimizer)[0].optimizer
            found.append(
                (
                    stubs,
                    training.optimizer.param_groups,
                    result[:2],
                    result[2] or None,
                    scale,
                    inner,
                )
            )
    assert found[0] == found[1]
    assert found[1][:2] == ((True, True), [])


def one_rank_trains_nothing() -> None:
    """Its param groups have the form of the others."""
    needs(
        "all_gather_object" in inspect.getsource(host_optimizer),
        "param groups that are the same on all ranks",
    )
    with trained(
        Case("distopt", pp=2, tied=False, frozen=("embedding", "layers.")), steps=1
    ) as training:
        groups = training.optimizer.param_groups
        first, last = from_ranks([sorted(set(group) - {"params"}) for group in groups])
        numels = from_ranks([sum(param.numel() for param in group["params"]) for group in groups])
    assert first == last and len(first) == 2
    assert numels[0] == [0, 0] and min(numels[1]) > 0


def main_params() -> None:
    """The ranks hold the unrounded param; one that a rank has nothing of is None there."""
    with trained(BF16) as training:
        whole, named = whole_main_params(training), dict(training.named_params())
        assert {param.main_param_sharded for param in named.values()} == {True}
        assert all(torch.equal(whole[name].bfloat16(), named[name].flatten()) for name in named)
        # 45,280 elements; were they rounded, all would be bf16 values. Some hundred are: biases of
        # gradient zero.
        assert sum(int((main == main.bfloat16().float()).sum()) for main in whole.values()) < 2000
        first, last = from_ranks([name for name in named if named[name].main_param is not None])
    assert len(first) < len(named) and {*first} & {*last}, "a param that both have a part of"


def aligned_lists() -> None:
    """One object in groups, lists, state and `main_param`, of the elements and in the order that
    the host's own has."""
    found: list[Any] = []
    for name in ("host-distributed", "distopt"):
        with trained(BF16.of(optimizer=name, fp32_norms=True)) as training, training.type_strings():
            (part,), names = (
                parts_of(training.optimizer),
                {param: name for name, param in training.named_params()},
            )
            found.append([])
            for param, (group, number) in part.model_param_group_index_map.items():
                span = part._get_model_param_range_map(param)["param"]
                assert part.opt_group_ranges[group]["params"][number] is param
                found[-1].append(
                    (names[param], part.model_param_gbuf_map[param], group, span.start, span.end)
                )
            mains = set()
            for models, *shards in (
                (
                    part.model_float16_groups,
                    part.shard_float16_groups,
                    part.shard_fp32_from_float16_groups,
                ),
                (part.model_fp32_groups, part.shard_fp32_groups),
            ):
                for members in (
                    member
                    for groups in zip(models, *shards, strict=True)
                    for member in zip(*groups, strict=True)
                ):
                    assert (
                        len(shards) == 1
                        or not CHAINS_ALWAYS
                        or members[0].main_param is members[-1]
                    )
                    found[-1].append(
                        (names[members[0]], [(each.numel(), each.dtype) for each in members[1:]])
                    )
                    mains.add(id(members[-1]))
            assert mains == {
                id(main) for group in part.optimizer.param_groups for main in group["params"]
            }
            assert mains == {*map(id, part.optimizer.state)}
            with hosts_own_runs():
                part._copy_main_params_to_model_params()  # of the host, by these lists
    assert found[0] == found[1]


def tenants_swap_state() -> None:
    """SkyRL's adapter_store.py: two tenants train in turn, each as if it were alone."""
    needs(
        hasattr(DistributedOptimizer, "_init_optimizer_states_with_dummy_values"),
        "first step without gradients",
    )
    _tenants_swap_state(BF16)
    with _host_counts_in_groups():
        _tenants_swap_state(BF16)


@contextmanager
def _host_counts_in_groups() -> Iterator[None]:
    """In the block the host's Adam is taken for TransformerEngine's, and not for torch's."""
    answers = cycle((False, True))  # asked of the host's Adam, and then of what takes its place
    with pytest.MonkeyPatch.context() as patch:
        kinds = "megatron_distopt.hosts.megatron_core.optimizer.is_torchs"
        patch.setattr(kinds, lambda inner: next(answers))
        yield


def _tenants_swap_state(case: Case) -> None:
    with trained(case, steps=0) as training:
        parts_of(training.optimizer)[0]._init_optimizer_states_with_dummy_values()
        alone = [training.step().loss for _ in range(4)]
    with trained(case, steps=0) as training:
        (part,) = parts_of(training.optimizer)
        part._init_optimizer_states_with_dummy_values()
        tenants = {name: (0, _kept_state(part)) for name in "ab"}
        losses = dict[str, list[float]](a=[], b=[])
        for name in "abababab":
            training.steps_taken, (tensors, steps) = tenants[name]
            live, groups = _live_state(part)
            torch._foreach_copy_(live, tensors)
            for group, step in zip(groups, steps, strict=True):
                group.update(step)
            losses[name].append(training.step().loss)
            tenants[name] = training.steps_taken, _kept_state(part)
    assert losses == {"a": alone, "b": alone}


def _live_state(part: Any) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Param buffers, main params and all of their state; and param groups."""
    mains = [main for group in part.shard_fp32_from_float16_groups for main in group]
    buffers = [buffer.param_data for buffer in part.buffers]
    return buffers + [
        each for main in mains for each in (main, *part.optimizer.state[main].values())
    ], part.param_groups


def _kept_state(part: Any) -> tuple[list[Tensor], list[dict[str, Any]]]:
    tensors, groups = _live_state(part)
    return [each.clone() for each in tensors], [
        {key: group[key] for key in group.keys() & {"step"}} for group in groups
    ]


def grads_are_clipped_by_hand() -> None:
    """SkyRL's grad_clip.py: two sets of params, each clipped by its own norm between
    `prepare_grads` and the update."""
    needs(
        hasattr(optimizer_config(BF16), "use_precision_aware_optimizer_no_fp8_or_ds_fp8"),
        "decoupled grads",
    )
    found = []
    for name in ("host-distributed", "distopt"):
        with closing(Training(BF16.of(optimizer=name))) as training:
            found.append([(training.forward_backward(), *_clip_in_two(training)) for _ in range(3)])
    assert [step[0] for step in found[1]] == pytest.approx([step[0] for step in found[0]], abs=1e-4)
    norms = [[norm for step in steps for norm in step[1:]] for steps in found]
    assert (
        norms[1] == pytest.approx(norms[0], rel=1e-3) and min(norms[0]) > 0
    )  # as test_megatron_core_parity.py in bf16


def _clip_in_two(training: Training) -> list[float]:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    chained, (part,), norms = training.optimizer, parts_of(training.optimizer), []
    pairs = zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True)
    first = {
        id(main)
        for models, mains in pairs
        for model, main in zip(models, mains, strict=True)
        if model.ndim == 1
    }
    with hosts_own_runs():
        assert not chained.prepare_grads()
        params = part.get_parameters()
        for is_first in (True, False):
            chosen = [main for main in params if (id(main) in first) is is_first]
            part.get_parameters = lambda chosen=chosen: chosen
            norms.append(float(chained.get_grad_norm()))
            del part.get_parameters
            clip_grad_by_total_norm_fp32(
                chosen, max_norm=0.1, total_norm=norms[-1], use_decoupled_grad=False
            )
        assert chained.step_with_ready_grads()
        training.finish_step()
    return norms


def parts_of_a_step_are_replaced() -> None:
    """miles' nvme_stream.py puts a function of its own in the place of one that the host's step
    calls."""
    with trained(BF16, steps=1) as training:
        (part,), before = parts_of(training.optimizer), training.params()
        part.step_with_ready_grads = lambda: True
        with hosts_own_runs():
            assert training.step().success
        assert all_equal(training.params(), before)
        del part.step_with_ready_grads
        assert training.step().success and not all_equal(training.params(), before)


def state_is_begun_by_the_hosts_function() -> None:
    """SkyRL saves before the first step; the host's function makes moments without a count."""
    with trained(BF16, steps=0) as training:
        alone = [training.step().loss for _ in range(2)]
    for is_ours in (True, False):
        with trained(BF16, steps=0) as training:
            (part,) = parts_of(training.optimizer)
            if is_ours:
                part.init_state_fn(part.optimizer, part.config)
            else:
                for main in part.get_parameters():
                    moments = ("exp_avg", "exp_avg_sq")
                    part.optimizer.state[main].update(
                        {moment: torch.zeros_like(main) for moment in moments}
                    )
            training.optimizer.save(from_ranks(tempfile.mkdtemp())[0])
            assert [training.step().loss for _ in range(2)] == alone


def state_is_reset() -> None:
    """miles' --reset-optimizer-states: moments and the count in groups, where TransformerEngine's
    has it."""
    with (
        _host_counts_in_groups(),
        trained(FP32.of(weight_decay=0.0, clip_grad=0.0), steps=3) as training,
    ):
        inner = training.optimizer.optimizer
        assert {group["step"] for group in inner.param_groups} == {3}
        for group in inner.param_groups:
            group["step"] = 0
        for state in inner.state.values():
            torch._foreach_zero_([state["exp_avg"], state["exp_avg_sq"]])
        before = training.params()
        training.step()
        assert {group["step"] for group in inner.param_groups} == {1}
        assert {int(state["step"]) for state in inner.state.values()} == {1}
        moved = max(
            float((param - before[name]).abs().max()) for name, param in training.params().items()
        )
    # Adam's first step is as large as the learning rate
    assert moved == pytest.approx(3e-3, rel=1e-3)


def main_param_is_mutated() -> None:
    with trained(BF16) as training:
        param = dict(training.named_params())[WEIGHT]
        before = whole_main_params(training)[WEIGHT]
        if param.main_param is not None:
            with torch.no_grad():
                param.main_param.mul_(0.5)
        set_lr(training, 0.0)
        training.step()
        assert torch.equal(whole_main_params(training)[WEIGHT], before * 0.5)
        assert torch.equal(param.flatten(), (before * 0.5).bfloat16())


def lr_is_written() -> None:
    """First into every group, then into the one without weight decay alone: norms and biases."""
    with trained(BF16) as training:
        before = training.params()
        set_lr(training, 0.0)
        training.step()
        still = training.params()
        assert all_equal(still, before)
        set_lr(training, 1e-2)
        next(group for group in training.optimizer.param_groups if group["wd_mult"] == 0.0)[
            "lr"
        ] = 0.0
        training.step()
        after = training.params()
        moved = {name for name, param in after.items() if not torch.equal(param, still[name])}
        vectors = {name for name, param in after.items() if param.ndim == 1}
        # Two norms and four biases of each of two layers, and the last norm, weight and bias each.
        assert len(vectors) == 18
        assert moved == after.keys() - vectors


Driver = Callable[[Training], tuple[Any, ...]]


def steps_in_parts() -> None:
    """Who drives the step does not matter."""
    case = FP32.of(log_num_zeros=True, clip_grad=0.5, frozen=("linear_qkv.bias",), tied=False)
    whole = _drive(case, lambda training: training.optimizer.step())
    assert all(success and zeros > 1000 for _, (success, _, zeros) in whole)
    drivers: tuple[Driver, ...] = (
        lambda training: _step_in_parts(training.optimizer, case),
        lambda training: _step_in_parts(parts_of(training.optimizer)[0], case),
    )
    for driver in drivers:
        assert _drive(case, driver) == whole


def chained_by_a_user() -> None:
    """The host's own chain clips `grad` of our main params as it does of its own; once installed,
    the chain is ours."""
    case = FP32.of(clip_grad=0.5)

    def by_the_hosts_chain(training: Training) -> Any:
        with hosts_own_runs(), training.type_strings():
            return ChainedOptimizer(parts_of(training.optimizer)).step()

    (loss, step), *others = _drive(case, by_the_hosts_chain)
    wanted = _drive(case, lambda training: training.optimizer.step())
    assert (loss, step[0]) == (wanted[0][0], True) and step[1] == pytest.approx(
        wanted[0][1][1], rel=1e-6
    )
    # The host adds squares up in fp32.
    assert [each[0] for each in others] == pytest.approx([each[0] for each in wanted[1:]], rel=1e-6)
    with trained(case, steps=1) as training:
        installed = megatron_distopt.install()
        chain = ChainedOptimizer(parts_of(training.optimizer))
        installed.undo()
        assert type(chain).__module__.startswith("megatron_distopt.")


def _drive(case: Case, driver: Driver) -> list[tuple[float, Any]]:
    """Losses, norms and zero counts of three steps."""
    steps = []
    with closing(Training(case)) as training:
        for _ in range(3):
            loss = training.forward_backward()
            steps.append((loss, driver(training)))
            training.finish_step()
    return steps


def _step_in_parts(optimizer: Any, case: Case) -> tuple[Any, ...]:
    """The calls that the host's layers make one by one, without clipping where a chain has no call
    for it."""
    if optimizer.prepare_grads():
        return False, None, None
    norm = optimizer.get_grad_norm()
    for each in parts_of(optimizer):
        each.clip_grad_norm(case.clip_grad)
    zeros = optimizer.count_zeros() if case.log_num_zeros else None
    return optimizer.step_with_ready_grads(), norm, zeros


def reloaded_main_params() -> None:
    """From a state dict that is more precise than the model."""
    takes_it = "state_dict" in inspect.signature(MegatronOptimizer.reload_model_params).parameters
    needs(takes_it, "reload_model_params(state_dict)")
    with trained(BF16) as training:
        precise = {name: param.detach().float() * 1.001 for name, param in training.named_params()}
        training.optimizer.reload_model_params(
            state_dict={
                "model": {name.removeprefix("0."): value for name, value in precise.items()}
            }
        )
        found = whole_main_params(training)
        assert all(torch.equal(found[name], value.flatten()) for name, value in precise.items())


def skipped_step() -> None:
    """One rank finds something in its own shard: everything but the loss scale keeps its bits."""
    with trained(FP16.of(hysteresis=1), steps=3) as training:
        for value in (float("-inf"), float("nan")):
            training.forward_backward()
            if dist.get_rank() == 1:
                _poison(training, value)
            before = _snapshot(training)
            scale = float(training.optimizer.get_loss_scale())
            assert training.optimizer.step() == (False, None, None)
            _check_same(before, _snapshot(training))
            assert float(training.optimizer.get_loss_scale()) == scale / 2
        assert training.step().success


def nonfinite_without_a_scaler() -> None:
    with trained(BF16) as training:
        training.forward_backward()
        if dist.get_rank() == 1:
            _poison(training, float("nan"))
        before = _snapshot(training)
        with pytest.raises(FloatingPointError, match=r"rank 1: decoder\."):
            training.optimizer.step()
        _check_same(before, _snapshot(training))


def _poison(training: Training, value: float) -> None:
    """One element of the grad buffer that this rank owns and that belongs to a param."""
    buffer = training.chunks[0].buffers[0]
    middle = buffer.grad_data.numel() // 2
    start, stop, _ = next(span for span in buffer.param_index_map.values() if span[1] > middle)
    buffer.grad_data[max(start, middle)] = value
    assert stop > max(start, middle)


def _snapshot(training: Training) -> dict[str, Any]:
    inner = training.optimizer.optimizer
    held: dict[str, Any] = dict(training.params())
    for index, (param, state) in enumerate(inner.state.items()):
        held[f"main {index}"] = param.detach().clone()
        held |= {f"{key} {index}": copy.deepcopy(value) for key, value in state.items()}
    for index, group in enumerate(inner.param_groups):
        held |= {
            f"{key} of group {index}": value for key, value in group.items() if key != "params"
        }
    return held


def _check_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert (
            torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name]
        ), name


def state_dict() -> None:
    """What the host puts into its own files, of a run without a loss scale and of one with; then
    taken back."""
    for case, keys in ((BF16, ["optimizer"]), (FP16, ["grad_scaler", "optimizer"])):
        with trained(case) as training:
            state = copy.deepcopy(training.optimizer.state_dict())
            assert sorted(state) == keys
            assert [*state["optimizer"]] == ["param_groups"]
            groups, live = state["optimizer"]["param_groups"], training.optimizer.param_groups
            assert all(
                set(group) == {*one, "step"} - {"params", *KERNELS}
                for group, one in zip(groups, live, strict=True)
            )
            assert [group["step"] for group in groups] == [2, 2]
            set_lr(training, 0.5)
            training.optimizer.load_state_dict(state)
            assert [group["lr"] for group in training.optimizer.param_groups] == [3e-3, 3e-3]


def frozen_after_wrapping() -> None:
    """The same param is frozen after it was wrapped, and before, when it gets no place in a buffer
    at all."""
    part = "linear_fc1.weight"
    frozen = [f"0.decoder.layers.{layer}.mlp.{part}" for layer in (0, 1)]
    curves = []
    for context, case in (
        (_frozen_when_built(part), FP32),
        (nullcontext(), FP32.of(frozen=(part,))),
    ):
        with context, closing(Training(case)) as training:
            before = training.params()
            curves.append([training.step().loss for _ in range(5)])
            kept = [
                name
                for name, param in training.params().items()
                if torch.equal(param, before[name])
            ]
            assert sorted(kept) == frozen
            flat_params = parts_of(training.optimizer)[0].sharded.flat_params
            assert not [
                each for flat in flat_params for each in flat.plan.shards if part in each.name
            ]
    assert curves[0][-1] < curves[0][0] - 0.1
    # The tolerance of fp32 in test_megatron_core_parity: an ulp of a loss of 4 at each step.
    assert curves[0] == pytest.approx(curves[1], abs=4e-6)


@contextmanager
def _frozen_when_built(part: str) -> Iterator[None]:
    def build(case: Case) -> list[Any]:
        chunks = build_chunks(case)
        for chunk in chunks:
            for name, param in chunk.named_parameters():
                param.requires_grad_(part not in name)
        return chunks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.support.gpt.build_chunks", build)
        yield


def state_in_a_fresh_model() -> None:
    """The model has the saved params right after loading, with no other call between, and goes on
    to the bit."""
    case = FP16.of(overlap_grad_reduce=True, overlap_param_gather=True)
    with trained(case) as training:
        folder = from_ranks(tempfile.mkdtemp())[0]
        training.optimizer.save(folder)
        wanted = training.params()
        losses = [training.step().loss for _ in range(2)]
    with trained(case, steps=0) as fresh:
        fresh.optimizer.load(folder)
        assert all_equal({name: param.detach() for name, param in fresh.named_params()}, wanted)
        fresh.steps_taken = 2
        for chunk in fresh.chunks:
            chunk.enable_forward_pre_hook()
        assert [fresh.step().loss for _ in range(2)] == losses


def chain_of_two() -> None:
    """The host chains two optimizers where the first chunk's gather overlaps the step."""
    overlap = {
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "overlap_param_gather_with_step": True,
    }
    with closing(Training(Case("distopt", pp=2, vp=2, tied=False, **overlap))) as training:
        chained = training.optimizer
        assert len(parts_of(chained)) == len(chained.state_dict()) == 2
        set_lr(training, 0.25)
        states = copy.deepcopy(chained.state_dict())
        set_lr(training, 0.5)
        chained.load_state_dict(states)
        assert {group["lr"] for group in chained.param_groups} == {0.25}


def not_asked_for() -> None:
    """The host builds its own classes without the flag, and with it where a variable switches us
    off.

    An undo also takes back what a call without installing has put into the place of the host's
    load.
    """
    load = dist_checkpointing.load
    with trained(BF16, steps=0) as training:
        training.optimizer.sharded_state_dict({}, is_loading=True)
    before = host_optimizer.get_megatron_optimizer
    installed = megatron_distopt.install()
    own = (
        "optimizer.optimizer.Float16OptimizerWithFloat16Params",
        "optimizer.distrib_optimizer.DistributedOptimizer",
    )
    cases = (BF16.of(optimizer="host-plain"), "1", own[0]), (BF16, "0", own[1])
    for case, switch, expected in cases:
        with pytest.MonkeyPatch.context() as patch, hosts_own_runs():
            patch.setenv("MEGATRON_DISTOPT", switch)
            built = host_optimizer.get_megatron_optimizer(
                optimizer_config(case), build_chunks(case)
            )
        kinds = [
            f"{type(each).__module__}.{type(each).__name__}" for each in (built, parts_of(built)[0])
        ]
        assert kinds[1] == f"megatron.core.{expected}"
        assert kinds[0] in (kinds[1], "megatron.core.optimizer.optimizer.ChainedOptimizer")
    installed.undo()
    assert host_optimizer.get_megatron_optimizer is before and dist_checkpointing.load is load


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        what_the_host_reads,
        no_param_trains_on_any_rank,
        main_params,
        aligned_lists,
        tenants_swap_state,
        grads_are_clipped_by_hand,
        parts_of_a_step_are_replaced,
        state_is_begun_by_the_hosts_function,
        state_is_reset,
        main_param_is_mutated,
        lr_is_written,
        steps_in_parts,
        chained_by_a_user,
        reloaded_main_params,
        skipped_step,
        nonfinite_without_a_scaler,
        state_dict,
        frozen_after_wrapping,
        state_in_a_fresh_model,
        not_asked_for,
        one_rank_trains_nothing,  # from here on: other layouts
        chain_of_two,
    )
}
