"""What megatron-core's training loop reads off our optimizer, found out inside the ranks.

Each function takes one model through a few steps and returns plain facts; `test_megatron_core_contract` says in the
test process what they have to be. All of it runs on two data-parallel or two pipeline ranks, in one spawn.
"""

from __future__ import annotations

import copy
import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import megatron.core.optimizer as host_optimizer
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.timers import Timers
from torch import Tensor

import megatron_distopt
import megatron_distopt.errors
from tests.support.cases import Case
from tests.support.gpt import Training, build_chunks, enter_layout, hosts_own_runs, optimizer_config, parts_of

Facts = dict[str, Any]

#: Whether the host puts a chain around one optimizer as well, as it does from 0.12 on.
CHAINS_ALWAYS = "optimizer" in vars(ChainedOptimizer)
#: Whether a rank may train nothing, as it may from 0.11 on.
HAS_STUBS = "is_stub_optimizer" in inspect.getsource(DistributedOptimizer.__init__)


class HostCannot(Exception):
    """This version of the host cannot do what a fact is about."""


def needs(has_it: bool, what: str) -> None:
    """Leaves a fact out where the host itself lacks what it is about."""
    if not has_it:
        raise HostCannot(f"this megatron-core has no {what}")


BF16 = Case("distopt", dp=2, precision="bf16")
FP16 = Case("distopt", dp=2, precision="fp16", initial_loss_scale=1024.0)
WEIGHT = "0.decoder.layers.1.self_attention.linear_qkv.weight"


@contextmanager
def trained(case: Case, steps: int = 2) -> Iterator[Training]:
    """A model that has taken a few steps."""
    with closing(Training(case)) as training:
        for _ in range(steps):
            training.step()
        yield training


def gathered(value: Any) -> list[Any]:
    """Collective: the value of each rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def whole_main_param(param: Tensor) -> Tensor:
    """Collective: the main param put together from the ranks, who own its elements in their order."""
    shards = gathered(param.main_param)
    return torch.cat([shard for shard in shards if shard is not None])


def set_lr(training: Training, lr: float) -> None:
    for group in training.optimizer.param_groups:
        group["lr"] = lr


def types() -> Facts:
    with trained(BF16, steps=1) as training:
        chained = training.optimizer
        ours = parts_of(chained)[0]
        return {
            "chained is the host's": isinstance(chained, ChainedOptimizer if CHAINS_ALWAYS else MegatronOptimizer),
            "ours is the host's distributed": isinstance(ours, DistributedOptimizer),
            "ours is the host's": isinstance(ours, MegatronOptimizer),
            "ours is not the host's own": type(ours) is not DistributedOptimizer,
            "optimizers": len(parts_of(chained)),
            "stubs": (chained.is_stub_optimizer, ours.is_stub_optimizer),
            "chunks": chained.model_chunks == training.chunks,
            "config": chained.config == ours.config == optimizer_config(BF16),
            "inner": chained.optimizer is ours.optimizer,
            "inner groups": chained.optimizer.param_groups == ours.param_groups,
            "inner state": sorted({key for state in ours.optimizer.state.values() for key in state}),
            "stats group": ours.stats_group.size,
            "tp group": parallel_state.get_tensor_model_parallel_group().size(),
            "loss scale": float(chained.get_loss_scale()),
            "scaled loss": float(chained.scale_loss(torch.tensor(3.0))),
            "type string": torch.tensor(3.0).type(),
        }


def optimizer_without_params() -> Facts:
    """By optimizer: every param is frozen, on all ranks."""
    needs(HAS_STUBS, "optimizer without params")
    return {name: _optimizer_without_params(name) for name in ("host-distributed", "distopt")}


def _optimizer_without_params(name: str) -> Facts:
    with closing(Training(BF16.of(optimizer=name, frozen=("",)))) as training:
        training.optimizer.zero_grad()
        with training.type_strings():
            result = training.optimizer.step()
        return {
            "stub": training.optimizer.is_stub_optimizer,
            "inner stub": parts_of(training.optimizer)[0].is_stub_optimizer,
            "groups": training.optimizer.param_groups,
            # Some versions count 0 zeros where nobody asked for a count.
            "step": (*result[:2], result[2] or None),
            "loss scale": float(training.optimizer.get_loss_scale()),
        }


def groups_of_a_rank_without_params() -> Facts:
    needs("all_gather_object" in inspect.getsource(host_optimizer), "param groups that are the same on all ranks")
    stage = Case("distopt", pp=2, tied=False, frozen=("embedding", "layers."))
    with trained(stage, steps=1) as training:
        groups = training.optimizer.param_groups
        keys = [sorted(set(group) - {"params"}) for group in groups]
        return {"keys": keys, "numel": [sum(param.numel() for param in group["params"]) for group in groups]}


def main_params() -> Facts:
    """By optimizer."""
    publishes = "main_param_sharded" in inspect.getsource(DistributedOptimizer)  # from 0.12 on
    return {name: _main_params(name) for name in (("host-distributed", "distopt") if publishes else ("distopt",))}


def _main_params(name: str) -> Facts:
    with trained(BF16.of(optimizer=name)) as training:
        named = dict(training.named_params())
        whole = {name: whole_main_param(param) for name, param in named.items()}
        return {
            "sharded": {param.main_param_sharded for param in named.values()},
            "dtypes": {main.dtype for main in whole.values()},
            "whole": all(main.numel() == named[name].numel() for name, main in whole.items()),
            "rounds to the model": all(torch.equal(whole[name].bfloat16(), named[name].flatten()) for name in named),
            "is a bf16 value": sum(int((main == main.bfloat16().float()).sum()) for main in whole.values()),
            "owned": {name: None if (main := param.main_param) is None else len(main) for name, param in named.items()},
        }


def main_param_is_mutated() -> Facts:
    with trained(BF16) as training:
        param = dict(training.named_params())[WEIGHT]
        before = whole_main_param(param)
        if param.main_param is not None:
            with torch.no_grad():
                param.main_param.mul_(0.5)
        set_lr(training, 0.0)
        training.step()
        after = whole_main_param(param)
        return {
            "main": torch.equal(after, before * 0.5),
            "model": torch.equal(param.flatten(), (before * 0.5).bfloat16()),
        }


def param_groups() -> Facts:
    with trained(BF16) as training:
        groups = training.optimizer.param_groups
        return {
            "keys": [sorted(group) for group in groups],
            "wd_mult": [group["wd_mult"] for group in groups],
            "max_lr": [group["max_lr"] for group in groups],
            "same objects": all(a is b for a, b in zip(groups, training.optimizer.param_groups, strict=True)),
            "keys of the host": _keys_of_the_hosts_own(),
        }


def _keys_of_the_hosts_own() -> set[str]:
    with closing(Training(BF16.of(optimizer="host-plain"))) as training:
        return {key for group in training.optimizer.param_groups for key in group}


def lr_is_written() -> Facts:
    """First into every group, then into the one without weight decay alone: norms and biases."""
    with trained(BF16) as training:
        before = training.params()
        set_lr(training, 0.0)
        training.step()
        still = training.params()
        set_lr(training, 1e-2)
        next(group for group in training.optimizer.param_groups if group["wd_mult"] == 0.0)["lr"] = 0.0
        training.step()
        after = training.params()
        moved = {name for name, param in after.items() if not torch.equal(param, still[name])}
        vectors = {name for name, param in after.items() if param.ndim == 1}
        return {
            "still": all(torch.equal(param, before[name]) for name, param in still.items()),
            "moved": moved == after.keys() - vectors,
            "vectors": len(vectors),
        }


def host_scheduler() -> Facts:
    """Learning rate and weight decay change at every step: by optimizer, the losses."""
    losses: Facts = {}
    for name in ("host-plain", "distopt"):
        with closing(Training(BF16.of(optimizer=name, precision="fp32"))) as training:
            schedule = OptimizerParamScheduler(
                training.optimizer,
                init_lr=1e-4,
                max_lr=training.case.lr,
                min_lr=training.case.lr / 10,
                lr_warmup_steps=2,
                lr_decay_steps=5,
                lr_decay_style="cosine",
                start_wd=0.0,
                end_wd=1.0,
                wd_incr_steps=5,
                wd_incr_style="linear",
            )
            losses[name] = []
            for _ in range(5):
                losses[name].append(training.step().loss)
                schedule.step(increment=1)
    return losses


def steps_in_parts() -> Facts:
    """By who drives the step: the losses, the norms and the zero counts of five steps."""
    drivers: dict[str, Callable[[Training], tuple[Any, ...]]] = {
        "step": lambda training: training.optimizer.step(),
        "inner step": lambda training: parts_of(training.optimizer)[0].step(),
        "in parts": lambda training: _step_in_parts(training.optimizer, training.case),
        "inner in parts": lambda training: _step_in_parts(parts_of(training.optimizer)[0], training.case),
        "host's chain": _step_by_the_hosts_chain,
    }
    case = BF16.of(precision="fp32", log_num_zeros=True, clip_grad=0.5, frozen=("linear_qkv.bias",), tied=False)
    return {name: _drive(case, driver) for name, driver in drivers.items()}


def fp16_steps_in_parts() -> Facts:
    """As above with a loss scale that doubles after every second step."""
    case = FP16.of(loss_scale_window=2, clip_grad=0.5)
    return {
        "step": _drive(case, lambda training: training.optimizer.step()),
        "in parts": _drive(case, lambda training: _step_in_parts(training.optimizer, case)),
        "host's chain": _drive(case, _step_by_the_hosts_chain),
    }


def _drive(case: Case, driver: Callable[[Training], tuple[Any, ...]]) -> list[tuple[float, Any]]:
    steps = []
    with closing(Training(case)) as training:
        for _ in range(5):
            loss = training.forward_backward()
            steps.append((loss, driver(training)))
            training.finish_step()
    return steps


def _step_in_parts(optimizer: Any, case: Case) -> tuple[Any, ...]:
    """The calls that the host's layers make one by one, without clipping where a chain has no call for it."""
    if optimizer.prepare_grads():
        return False, None, None
    norm = optimizer.get_grad_norm()
    for each in parts_of(optimizer):
        each.clip_grad_norm(case.clip_grad)
    zeros = optimizer.count_zeros() if case.log_num_zeros else None
    return optimizer.step_with_ready_grads(), norm, zeros


def _step_by_the_hosts_chain(training: Training) -> tuple[Any, ...]:
    """The host's own chain measures, clips and counts by its own functions, which compare type strings."""
    with hosts_own_runs():
        return ChainedOptimizer(parts_of(training.optimizer)).step()


def reloaded_model_params() -> Facts:
    """The model changes under the optimizer, as when a checkpoint is loaded without optimizer state."""
    with trained(BF16) as training:
        with torch.no_grad():
            for _, param in training.named_params():
                param.mul_(0.75)
        wanted = training.params()
        training.optimizer.reload_model_params()
        set_lr(training, 0.0)
        training.step()
        return {"kept": all(torch.equal(param, wanted[name]) for name, param in training.params().items())}


def reloaded_main_params() -> Facts:
    """From a state dict that is more precise than the model."""
    takes_it = "state_dict" in inspect.signature(MegatronOptimizer.reload_model_params).parameters
    needs(takes_it, "reload_model_params(state_dict)")
    with trained(BF16) as training:
        precise = {name: param.detach().float() * 1.001 for name, param in training.named_params()}
        training.optimizer.reload_model_params(
            state_dict={"model": {name.removeprefix("0."): value for name, value in precise.items()}}
        )
        mains = {name: whole_main_param(param) for name, param in training.named_params()}
        return {"taken": all(torch.equal(main, precise[name].flatten()) for name, main in mains.items())}


def skipped_step() -> Facts:
    """By what one rank finds in its own shard, whether everything but the loss scale keeps its bits."""
    facts: Facts = {}
    with trained(FP16.of(hysteresis=1), steps=3) as training:
        for value in (float("inf"), float("-inf"), float("nan")):
            training.forward_backward()
            if dist.get_rank() == 1:
                _poison(training, value)
            before = _snapshot(training)
            scale = float(training.optimizer.get_loss_scale())
            result = training.optimizer.step()
            facts[str(value)] = {
                "result": result,
                "changed": _differences(before, _snapshot(training)),
                "scale": float(training.optimizer.get_loss_scale()) / scale,
            }
        facts["next step"] = training.step().success
    return facts


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
        held |= {f"{key} of group {index}": value for key, value in group.items() if key != "params"}
    return held


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    changed = [name for name in before if name not in after or not _same_bits(before[name], after[name])]
    return changed + sorted(after.keys() - before.keys())


def _same_bits(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def nonfinite_without_a_scaler() -> Facts:
    """The error that each rank raises when one of them finds a nan."""
    with trained(BF16) as training:
        training.forward_backward()
        if dist.get_rank() == 1:
            _poison(training, float("nan"))
        before = _snapshot(training)
        try:
            training.optimizer.step()
        except FloatingPointError as error:
            message = str(error)
            return {"message": message, "changed": _differences(before, _snapshot(training))}
    return {"message": "", "changed": []}


def constant_loss_scale() -> Facts:
    """The same curve with and without a loss scale, which bf16 may have too."""
    facts: Facts = {}
    for name, scale in (("none", None), ("constant", 1024.0)):
        with closing(Training(BF16.of(loss_scale=scale))) as training:
            facts[f"{name} scale"] = float(training.optimizer.get_loss_scale())
            facts[f"{name} scaled loss"] = float(training.optimizer.scale_loss(torch.tensor(3.0)))
            steps = [training.step() for _ in range(3)]
            facts[f"{name} steps"] = [(step.loss, step.grad_norm) for step in steps]
    return facts


def param_data_lies_in_the_buffer() -> Facts:
    with trained(BF16) as training:
        buffer = training.chunks[0].buffers[0]
        addresses = [
            param.data_ptr() == buffer.param_data[span[0] :].data_ptr()
            for param, span in buffer.param_index_map.items()
        ]
        return {"in the buffer": all(addresses), "params": len(addresses)}


def get_parameters() -> Facts:
    with trained(BF16) as training:
        params = parts_of(training.optimizer)[0].get_parameters()
        in_groups = [param for group in training.optimizer.param_groups for param in group["params"]]
        return {
            "same as groups": {id(param) for param in params} == {id(param) for param in in_groups},
            "dtypes": {param.dtype for param in params},
            "numel": sum(param.numel() for param in params),
            "trainable numel": sum(param.numel() for _, param in training.named_params()),
            "buffer numel": training.chunks[0].buffers[0].numel,
        }


def state_dict() -> Facts:
    """What the host puts into its own files, of a run without a loss scale and of one with; then taken back."""
    facts: Facts = {}
    for name, case in (("bf16", BF16), ("fp16", FP16)):
        with trained(case) as training:
            state = copy.deepcopy(training.optimizer.state_dict())
            groups = state["optimizer"]["param_groups"]
            facts[name] = {
                "keys": sorted(state),
                "in optimizer": sorted(state["optimizer"]),
                "in groups": [set(group) for group in groups],
                "steps": [group["step"] for group in groups],
            }
            set_lr(training, 0.5)
            training.optimizer.load_state_dict(state)
            facts[name]["lr"] = [group["lr"] for group in training.optimizer.param_groups]
    return facts


def timers() -> Facts:
    with trained(BF16) as training:
        training.optimizer.config.timers = Timers(log_level=2, log_option="all")
        return {"success": training.step().success}


def frozen_after_wrapping() -> Facts:
    """Also the same param frozen before, when it gets no place in a buffer at all."""
    name, case = "linear_fc1.weight", BF16.of(precision="fp32")
    facts: Facts = {}
    for moment, context, of_case in (
        ("after", _frozen_when_built(name), case),
        ("before", nullcontext(), case.of(frozen=(name,))),
    ):
        with context, closing(Training(of_case)) as training:
            before = training.params()
            losses = [training.step().loss for _ in range(5)]
            after = training.params()
            named = dict(training.named_params())
            kept = {name for name, param in after.items() if torch.equal(param, before[name])}
            facts[moment] = {
                "frozen": sorted(name for name, param in named.items() if not param.requires_grad),
                "kept": sorted(kept),
                "in a run": [
                    shard.name
                    for run in parts_of(training.optimizer)[0].sharded.flat_params
                    for shard in run.plan.shards
                    if name in shard.name
                ],
                "losses": losses,
            }
    return facts


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


def state_in_a_fresh_model() -> Facts:
    """By case, whether the model has the saved params right after loading, with no other call between."""
    cases = {"plain": BF16, "fp16": FP16, "overlap": BF16.of(overlap_grad_reduce=True, overlap_param_gather=True)}
    facts: Facts = {}
    for name, case in cases.items():
        with trained(case) as training:
            folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
            dist.broadcast_object_list(folder)
            training.optimizer.save(folder[0])
            wanted = training.params()
            losses = [training.step().loss for _ in range(2)]
        with trained(case, steps=0) as fresh:
            fresh.optimizer.load(folder[0])
            found = {name: param.detach().clone() for name, param in fresh.named_params()}
            fresh.steps_taken = 2
            if case.overlap_param_gather:
                for chunk in fresh.chunks:
                    chunk.enable_forward_pre_hook()
            facts[name] = {
                "params": all(torch.equal(param, wanted[name]) for name, param in found.items()),
                "losses": (losses, [fresh.step().loss for _ in range(2)]),
            }
    return facts


def chain_of_two() -> Facts:
    """The host chains two optimizers where the first chunk's gather overlaps the step: (class, text) by call."""
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True, "overlap_param_gather_with_step": True}
    case = Case("distopt", pp=2, vp=2, tied=False, **overlap)
    with closing(Training(case)) as training:
        chained = training.optimizer
        facts: Facts = {"optimizers": len(parts_of(chained)), "states": len(chained.state_dict())}
        set_lr(training, 0.25)
        states = copy.deepcopy(chained.state_dict())
        set_lr(training, 0.5)
        chained.load_state_dict(states)
        facts["lr"] = {group["lr"] for group in chained.param_groups}
        for call in ("get_parameter_state_dp_zero", "load_parameter_state_from_dp_zero"):
            try:
                getattr(chained, call)()
            except megatron_distopt.errors.DistOptError as error:
                facts[call] = (type(error).__name__, str(error))
    return facts


def installation() -> Facts:
    """Attributes of the host by moment: the same objects before, and after it was undone, twice."""
    enter_layout(BF16)
    importer = ModuleType("imports_the_factory_by_value")
    importer.get_megatron_optimizer = host_optimizer.get_megatron_optimizer  # type: ignore[attr-defined]
    sys.modules[importer.__name__] = importer
    modules = (host_optimizer, sys.modules["megatron.core.optimizer.distrib_optimizer"], importer)
    before = [dict(vars(module)) for module in modules]
    facts: Facts = {}
    for round_ in ("first", "second"):
        installed = megatron_distopt.install()
        ours = host_optimizer.get_megatron_optimizer
        facts[f"{round_} replaced"] = ours is not before[0]["get_megatron_optimizer"]
        facts[f"{round_} importer"] = importer.get_megatron_optimizer is ours
        facts[f"{round_} again"] = megatron_distopt.install() is installed
        optimizer = ours(optimizer_config(BF16), build_chunks(BF16))
        facts[f"{round_} built"] = type(parts_of(optimizer)[0]) is not DistributedOptimizer
        installed.undo()
        installed.undo()
        facts[f"{round_} left behind"] = [
            name
            for module, attributes in zip(modules, before, strict=True)
            for name in vars(module).keys() | attributes.keys()
            if vars(module).get(name) is not attributes.get(name)
        ]
    del sys.modules[importer.__name__]
    return facts


def host_classes() -> Facts:
    """Who is built without the flag, and with the flag when a variable switches us off."""
    enter_layout(BF16)
    installed = megatron_distopt.install()
    facts: Facts = {}
    for name, case in {"without the flag": BF16.of(optimizer="host-plain"), "switched off": BF16}.items():
        os.environ["MEGATRON_DISTOPT"] = "1" if name == "without the flag" else "0"
        with hosts_own_runs():
            built = host_optimizer.get_megatron_optimizer(optimizer_config(case), build_chunks(case))
        facts[name] = [
            type(each).__module__ + "." + type(each).__name__ for each in dict.fromkeys((built, parts_of(built)[0]))
        ]
        del os.environ["MEGATRON_DISTOPT"]
    installed.undo()
    return facts


ALL: tuple[Callable[[], Facts], ...] = (
    types,
    optimizer_without_params,
    main_params,
    main_param_is_mutated,
    param_groups,
    lr_is_written,
    host_scheduler,
    steps_in_parts,
    fp16_steps_in_parts,
    reloaded_model_params,
    reloaded_main_params,
    skipped_step,
    nonfinite_without_a_scaler,
    constant_loss_scale,
    param_data_lies_in_the_buffer,
    get_parameters,
    state_dict,
    frozen_after_wrapping,
    state_in_a_fresh_model,
    timers,
    installation,
    host_classes,
    groups_of_a_rank_without_params,  # from here on: other layouts
    chain_of_two,
)
