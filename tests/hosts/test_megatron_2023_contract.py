"""What the training loop, the scheduler, the log and the tools of a fork of 2023 use, they find on our optimizer.

Each function goes through one part of the contract and gives what was found and what that has to be, in one spawn of
two data-parallel ranks for each file layout.
"""

from __future__ import annotations

import contextlib
import gc
import io
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_distopt
from tests.support.mini_fork import InstalledFork, MiniFork, TrainingRun, core_folder
from tests.support.spawn import run_ranks

#: By what it is: what was found, and what is wanted.
Facts = dict[str, tuple[Any, Any]]
#: (forward step, iterator, model, optimizer, scheduler); the signature of the fork's `train_step`.
Step = Callable[..., Any]

DISTRIBUTED = "--use-distributed-optimizer"
FP32, BF16 = (DISTRIBUTED,), ("--bf16", DISTRIBUTED)
FP16 = ("--fp16", DISTRIBUTED, "--initial-loss-scale", "4096")
#: With its fp32 norms, 160 of the model's 7,744 elements; its biases and norms are a param group of their own.
MIXED = ("--bf16", "--fp32-norms", DISTRIBUTED)
UNTIED = "--untie-embeddings-and-output-weights"
NUMEL, NUMEL_OF_NORMS = 7744, 160
WHO = {"ours": True, "host": False}


def _drive(
    fork: MiniFork,
    words: tuple[str, ...],
    look: Callable[[int, Any, Any], None] = lambda *_: None,
    steps: int = 0,
    step: Step | None = None,
    ours: bool = True,
) -> TrainingRun:
    """The fork's own set-up with another loop: `look(number, model, optimizer)` before each step and at the end."""

    def loop(forward_step: Any, model: Any, optimizer: Any, scheduler: Any, iterator: Any) -> list[Any]:
        for number in range(steps):
            look(number, model, optimizer)
            (step or fork.training.train_step)(forward_step, iterator, model, optimizer, scheduler)
        look(steps, model, optimizer)
        return []

    with mock.patch.object(fork.training, "train", loop):
        return fork.train(*words, ours=ours)


def _forward_backward(forward_step: Any, iterator: Any, model: Any, optimizer: Any) -> None:
    """The first half of the fork's `train_step`: grads in the buffers, not reduced."""
    from megatron import get_args
    from megatron.core.pipeline_parallel import get_forward_backward_func

    args = get_args()
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterator,
        model=model,
        num_microbatches=1,
        dtype=args.params_dtype,
        tensor_shape=(args.seq_length, args.micro_batch_size, args.hidden_size),
        grad_scaler=optimizer.scale_loss,
        sequence_parallel=False,
        timers=None,
    )


def _params(model: Any) -> dict[str, Tensor]:
    """Copies, by the fork's names."""
    bare = model[0]
    while hasattr(bare, "module"):
        bare = bare.module
    return {name: param.detach().clone() for name, param in bare.named_parameters()}


def _same(ours: dict[str, Tensor], theirs: Any) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(param, theirs[name]) for name, param in ours.items())


def _storages(tensors: Any) -> dict[int, int]:
    """Bytes by address of the allocation; storages that overlap or adjoin are one, as those of params in a buffer."""
    starts = {(each.untyped_storage().data_ptr(), each.untyped_storage().nbytes()) for each in tensors}
    found: dict[int, int] = {}
    last = -1
    for start, nbytes in sorted(starts):
        if last < 0 or start > last + found[last]:
            last = start
        found[last] = max(found.get(last, 0), start - last + nbytes)
    return found


def memory(fork: MiniFork) -> Facts:
    """What lies where, by dtypes of the model. First of all: other trainings leave tensors in this process."""
    fp32, bf16 = torch.float32, torch.bfloat16
    # What is as large as the model: param buffer, main params of half of it where they are of that size, and grad
    # buffer. Ten norm vectors keep memory of their own, see buffers/compact.py. An fp32 param is its own main param.
    of_norms = [NUMEL_OF_NORMS * 4 // 10] * 10
    large = [NUMEL * 2, NUMEL // 2 * 4, NUMEL * 4]
    facts = _memory_of("bf16", fork, BF16, {bf16: [NUMEL * 2]}, NUMEL // 2, large)
    facts |= _memory_of("fp32", fork, FP32, {fp32: [NUMEL * 4]}, 0, [NUMEL * 4, NUMEL * 4])
    of_mixed = {bf16: [NUMEL * 2], fp32: of_norms}
    return facts | _memory_of("mixed", fork, MIXED, of_mixed, NUMEL - NUMEL_OF_NORMS, [NUMEL * 2, NUMEL * 4])


def _memory_of(
    name: str,
    fork: MiniFork,
    words: tuple[str, ...],
    dtypes: dict[torch.dtype, list[int]],
    num_main: int,
    large: list[int],
) -> Facts:
    """Of a model with these params' bytes by dtype and elements of main params (where dtypes are mixed, on both)."""
    facts: Facts = {}
    made: list[Tensor] = []

    def look(number: int, model: Any, optimizer: Any, made: list[Tensor] = made) -> None:
        grad = next(iter(model[0]._grad_buffers.values())).data
        params, flat_params = list(model[0].parameters()), optimizer.sharded.flat_params
        buffer = optimizer.sharded.buffers[0].param
        made.append(grad)
        of_dtype = {
            dtype: sorted(_storages(each for each in (*params, buffer) if each.dtype is dtype).values())
            for dtype in {param.dtype for param in params}
        }
        main = sum(_storages(flat.main for flat in flat_params if flat.owns_memory).values())
        if name == "mixed":
            mains: list[Any] = [None, None]
            dist.all_gather_object(mains, main)
            main = sum(mains)
        moments = sum(
            tensor.numel() * tensor.element_size()
            for state in optimizer.state.values()
            for tensor in state.values()
            if torch.is_tensor(tensor) and tensor.numel() > 1
        )
        stays = (
            made[0] is grad
            and {p.main_grad.untyped_storage().data_ptr() for p in params} == {grad.untyped_storage().data_ptr()}
            and _storages(flat.grad for flat in flat_params).keys() == _storages([grad]).keys()
        )
        facts[f"{name}: bytes of params by dtype"] = (of_dtype, dtypes)
        facts[f"{name}: params are views in the order of their grads"] = (_are_views_in_order(params, buffer), True)
        facts[f"{name}: bytes of grads"] = (grad.untyped_storage().nbytes(), NUMEL * 4)
        facts[f"{name}: grads stay in the fork's buffer"] = (stays, True)
        facts[f"{name}: bytes of main params"] = (main, num_main * 4)
        facts[f"{name}: bytes of moments"] = (moments, NUMEL // 2 * 8)

    run = _drive(fork, words, look, steps=2)
    facts[f"{name}: bytes of what is as large as the model"] = (_large(), large)
    del run, made, look
    facts[f"{name}: bytes of that without the optimizer"] = (_large(), [])
    return facts


def _large() -> list[int]:
    """Bytes of the allocations of this process that are at least as large as the model in bf16."""
    gc.collect()
    alive = _storages(each for each in gc.get_objects() if issubclass(type(each), Tensor))
    return sorted(nbytes for nbytes in alive.values() if nbytes >= NUMEL * 2)


def _are_views_in_order(params: Any, buffer: Tensor) -> bool:
    """Whether params of its dtype lie in the buffer where their grads lie in the grad buffer."""
    offsets = [
        (param.data_ptr() - buffer.data_ptr(), param.main_grad.storage_offset() * buffer.element_size())
        for param in params
        if param.dtype is buffer.dtype
    ]
    return all(found == wanted for found, wanted in offsets) and bool(offsets)


def attributes(fork: MiniFork) -> Facts:
    fp16 = (*FP16, "--clip-grad", "0.5", "--log-num-zeros-in-grad")
    given, precision = (0.5, True, True, True), (True, False, torch.float16)
    facts = _attributes_of("fp16", fork, fp16, given, precision, ("DynamicGradScaler", 4096.0))
    given, precision = (1.0, False, True, True), (False, True, torch.bfloat16)
    return facts | _attributes_of("bf16", fork, BF16, given, precision, ("NoneType", 1.0))


def _attributes_of(
    name: str,
    fork: MiniFork,
    words: tuple[str, ...],
    given: tuple[Any, ...],
    precision: tuple[Any, ...],
    scaling: tuple[str, float],
) -> Facts:
    from megatron.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.optimizer.optimizer import MegatronOptimizer

    facts: Facts = {}
    names = ("clip_grad", "log_num_zeros_in_grad", "params_have_main_grad", "use_contiguous_buffers_in_local_ddp")
    scaler, scale = scaling

    def look(number: int, model: Any, optimizer: Any) -> None:
        classes = (DistributedOptimizer, MegatronOptimizer, megatron_distopt.DistributedOptimizer)
        found_scale, groups, inner = optimizer.get_loss_scale(), optimizer.param_groups, optimizer.optimizer
        parameters = [param for group in groups for param in group["params"]]
        facts[f"{name}: classes"] = (
            (*(isinstance(optimizer, each) for each in classes), type(optimizer) in classes[:2]),
            (True, True, True, False),
        )
        facts[f"{name}: given"] = (tuple(getattr(optimizer, each) for each in names), given)
        facts[f"{name}: precision"] = ((optimizer.fp16, optimizer.bf16, optimizer.params_dtype), precision)
        facts[f"{name}: models"] = (optimizer.models is model, True)
        facts[f"{name}: group"] = (optimizer.get_model_parallel_group(), None)
        facts[f"{name}: scaler"] = (type(optimizer.grad_scaler).__name__, scaler)
        facts[f"{name}: scale"] = ((found_scale.tolist(), found_scale.dtype), ([scale], torch.float32))
        facts[f"{name}: scaled loss"] = (optimizer.scale_loss(torch.tensor(3.0)).tolist(), [3 * scale])
        is_live = groups is inner.param_groups and optimizer.state is inner.state
        facts[f"{name}: groups and state are those of the inner optimizer"] = (is_live, True)
        facts[f"{name}: parameters"] = (parameters == optimizer.get_parameters() and len(parameters) > 0, True)

    _drive(fork, words, look)
    return facts


def by_hand(fork: MiniFork) -> Facts:
    """The ten positional arguments, in a fork where nothing is installed, against the installed one."""
    trainings = {"fp32": (), "fp16": ("--fp16", "--initial-loss-scale", "4096")}
    params: list[dict[str, Tensor]] = []

    def loop(forward_step: Any, model: Any, optimizer: Any, scheduler: Any, iterator: Any) -> list[Any]:
        from megatron import get_args, training
        from megatron import optimizer as host

        args = get_args()
        base = host._get_base_optimizer(args, host.get_param_groups(model, None, None, 1.0))
        dtypes = (args.fp16, args.bf16, args.params_dtype)
        scaler = host._get_grad_scaler(args)
        ours = megatron_distopt.DistributedOptimizer(base, args.clip_grad, False, True, True, *dtypes, scaler, model)
        schedule = training.get_optimizer_param_scheduler(ours)
        for _ in range(args.train_iters):
            training.train_step(forward_step, iterator, model, ours, schedule)
        params.append(_params(model))
        return []

    with mock.patch.object(fork.training, "train", loop):
        for flags in trainings.values():
            fork.train(*flags, "--train-iters", "2", ours=False)
    facts: Facts = {}
    for (name, flags), built in zip(trainings.items(), params, strict=True):
        installed = fork.train(*flags, DISTRIBUTED, "--train-iters", "2")
        facts[f"{name}: every bit is that of the installed one"] = (_same(built, installed.params), True)
    return facts


#: The fork's own optimizer times these; the last is that of the gather.
TIMED = {
    *("layernorm-grads-all-reduce", "embedding-grads-all-reduce", "grads-reduce-scatter"),
    *("optimizer-copy-to-main-grad", "optimizer-unscale-and-check-inf", "optimizer-clip-main-grad"),
    *("optimizer-count-zeros", "optimizer-inner-step", "optimizer-copy-main-to-model-params", "params-all-gather"),
}


def timers(fork: MiniFork) -> Facts:
    """Names, log levels and barriers of everything that is timed in a step, by who steps."""
    facts: Facts = {}
    for who, ours in WHO.items():
        for barrier, flags in {"barrier": (), "no barrier": ("--no-barrier-with-level-1-timing",)}.items():
            calls: list[tuple[Any, ...]] = []
            _drive(fork, (*FP16, *flags), steps=1, step=_step_with(_NotedTimers(calls)), ours=ours)
            # One child of the fork times multi-query grads as well; ours has them in the time of the norms.
            extra = set() if ours else {"key-value-grads-all-reduce"}
            starts = {tuple(how) for kind, _, *how in calls if kind == "start"}
            facts[f"{who}, {barrier}: names"] = ({name for _, name, *_ in calls} - extra, TIMED)
            facts[f"{who}, {barrier}: levels and barriers"] = (starts, {(1, barrier == "barrier")})
            if ours:
                stopped = [
                    kind_and_name for _, name, *_ in calls[::2] for kind_and_name in (("start", name), ("stop", name))
                ]
                facts[f"{barrier}: each stops before the next"] = ([call[:2] for call in calls], stopped)
    _drive(fork, BF16, steps=1, step=_step_with(None))  # a caller without timers
    _drive(fork, (*BF16, "--timing-log-level", "2"), steps=2)
    from megatron import get_timers

    # bf16 without a grad scaler: nothing is unscaled, and so it is in the fork.
    missing = TIMED - {"optimizer-unscale-and-check-inf"} - set(get_timers()._timers)
    return {**facts, "missing in the fork's own timers": (missing, set())}


class _NotedTimers:
    """In the place of the fork's timers, and of each of them."""

    def __init__(self, calls: list[tuple[Any, ...]], name: str = "", log_level: int | None = None) -> None:
        self.calls, self.name, self.log_level = calls, name, log_level

    def __call__(self, name: str, log_level: int | None = None) -> _NotedTimers:
        return _NotedTimers(self.calls, name, log_level)

    def start(self, barrier: bool = False) -> None:
        self.calls.append(("start", self.name, self.log_level, barrier))

    def stop(self, barrier: bool = False) -> None:
        self.calls.append(("stop", self.name, self.log_level, barrier))


def _step_with(noted: _NotedTimers | None) -> Step:
    def step(forward_step: Any, iterator: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
        from megatron import get_args

        _forward_backward(forward_step, iterator, model, optimizer)
        optimizer.reduce_model_grads(get_args(), noted)
        assert optimizer.step(get_args(), noted)[0]
        optimizer.gather_model_params(get_args(), noted)

    return step


def step_results(fork: MiniFork) -> Facts:
    """What `step` returns, by flags; a first step at a loss scale of 2**32 overflows."""
    # By flags: those, (updated, has a norm, zeros are counted), and the scale afterwards: the overflow is the first of
    # two that --hysteresis 2 waits for.
    cases: dict[str, tuple[tuple[str, ...], tuple[bool, bool, bool], float]] = {
        "clipped": (BF16, (True, True, False), 1.0),
        "unclipped": ((*BF16, "--clip-grad", "0"), (True, False, False), 1.0),
        "counted": ((*BF16, "--log-num-zeros-in-grad", UNTIED), (True, True, True), 1.0),
        "counted, unclipped": ((*BF16, "--clip-grad", "0", "--log-num-zeros-in-grad"), (True, False, True), 1.0),
        "overflow": (("--fp16", DISTRIBUTED, "--log-num-zeros-in-grad"), (False, False, False), 2.0**32),
    }
    facts: Facts = {}
    for name, (words, wanted, scale) in cases.items():
        results: list[Any] = []

        def step(forward_step: Any, iterator: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
            from megatron import get_args, get_timers

            _forward_backward(forward_step, iterator, model, optimizer)
            optimizer.reduce_model_grads(get_args(), get_timers())
            results.append(optimizer.step(get_args(), get_timers()))  # noqa: B023 - called before the next one

        runs = [_drive(fork, words, steps=1, step=step, ours=ours) for ours in WHO.values()]
        (updated, norm, zeros), theirs = results
        # The fork adds up squares in fp32.
        same_norm = norm is theirs[1] is None or norm == pytest.approx(theirs[1], rel=1e-6)
        facts[f"{name}: as the fork's"] = ((updated, same_norm, zeros), (theirs[0], True, theirs[2]))
        facts[f"{name}: what there is"] = ((updated, norm is not None, zeros is not None), wanted)
        facts[f"{name}: scales"] = ([float(run.optimizer.get_loss_scale()) for run in runs], [scale, scale])
        if name == "counted":
            facts["counted: there are zeros"] = (zeros > 100, True)
    return facts


def parts_of_a_step(fork: MiniFork) -> Facts:
    """The calls of a step by themselves, in an fp16 run with half of the grads in each rank's shard."""
    facts: Facts = {}
    measured: list[Any] = []

    def step(forward_step: Any, iterator: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
        from megatron import get_args, get_timers

        both = (get_args(), get_timers())
        for param in model[0].parameters():
            param.grad = torch.ones_like(param)
        optimizer.zero_grad()
        facts["zero_grad drops grads"] = (all(param.grad is None for param in model[0].parameters()), True)
        _forward_backward(forward_step, iterator, model, optimizer)
        optimizer.reduce_model_grads(*both)
        before = _params(model)
        measured.extend((optimizer.count_zeros(), optimizer.clip_grad_norm(0.25)))
        # Of fp16 grads, each rounded after it is scaled: half a step is 2**-11 of it.
        facts["norm once clipped"] = (optimizer.clip_grad_norm(0.25), pytest.approx(0.25, rel=2.0**-11))
        facts["result"] = (optimizer.step(*both), (True, None, None))
        shard_numel = optimizer.grad_buffers[0].plan.layout.shard_numel
        changed = sum(int((a != b).sum()) for a, b in zip(_params(model).values(), before.values(), strict=True))
        facts["before the gather the own shard alone is new"] = (shard_numel // 2 < changed <= shard_numel, True)
        optimizer.gather_model_params(*both)
        changed = sum(int((a != b).sum()) for a, b in zip(_params(model).values(), before.values(), strict=True))
        facts["after it all params are new"] = (changed > shard_numel and _alike_on_all_ranks(_params(model)), True)

    words = (*FP16, UNTIED, "--clip-grad", "0")
    _drive(fork, words, steps=1, step=step)
    undistributed = (words[0], *words[2:], "--log-num-zeros-in-grad", "--train-iters", "1", "--clip-grad", "1e9")
    logged: list[Any] = [None, None]
    dist.all_gather_object(logged, fork.train(*undistributed, ours=False).iterations)
    (plain,) = next(iterations for iterations in logged if iterations)
    facts["zeros, norm"] = (measured, [plain.num_zeros, pytest.approx(plain.grad_norm, rel=1e-6)])
    facts["there are zeros"] = (plain.num_zeros > 100, True)
    return facts


def _alike_on_all_ranks(params: dict[str, Tensor]) -> bool:
    whole = torch.cat([param.float().flatten() for param in params.values()])
    first = whole.clone()
    dist.broadcast(first, src=0)
    return torch.equal(whole, first)


def reloading(fork: MiniFork) -> Facts:
    """Somebody changes the model after some steps and says so; params whose gradient is zero keep the new value.

    One child of the fork reloads after every resume, which cost its own optimizers what bf16 cannot hold.
    """
    facts: Facts = {}
    for name, words in {"mixed": MIXED, "fp32": FP32}.items():

        def look(number: int, model: Any, optimizer: Any, name: str = name) -> None:
            if number == 1:
                before = [flat.main.clone() for flat in optimizer.sharded.flat_params]
                optimizer.reload_model_params()
                mains = [flat.main for flat in optimizer.sharded.flat_params]
                facts[f"{name}: unchanged ones keep their precision"] = (all(map(torch.equal, before, mains)), True)
                with torch.no_grad():
                    for param in model[0].parameters():
                        param.fill_(0.5)
                optimizer.reload_model_params()
                for group in optimizer.param_groups:
                    group["lr"] = 0.0
            if number == 2:
                starts_there = all(bool((param == 0.5).all()) for param in model[0].parameters())
                facts[f"{name}: the next step goes on from there"] = (starts_there, True)

        _drive(fork, (*words, "--lr", "0.1"), look, steps=2)
    return facts


def ranges(fork: MiniFork) -> Facts:
    """By model: what the fork's own optimizer and ours say this rank owns of each param."""
    facts: Facts = {}
    for name, words in {"bf16": BF16, "narrow": (*BF16, "--hidden-size", "12")}.items():
        by_who: list[dict[str, Any]] = []

        def look(number: int, model: Any, optimizer: Any, by_who: list[dict[str, Any]] = by_who) -> None:
            by_who.append({})
            for param_name, param in model[0].named_parameters():
                try:
                    spans = optimizer.get_model_param_range_map(param)
                except KeyError:
                    by_who[-1][param_name] = None
                else:
                    by_who[-1][param_name] = {k: (s.start, s.end, s.size) for k, s in spans.items()}

        for ours in WHO.values():
            _drive(fork, words, look, ours=ours)
        facts[f"{name}: the range map is the fork's"] = (by_who[0], by_who[1])
        facts[f"{name}: a param lies wholly on the other rank"] = (None in by_who[0].values(), True)
    return facts


def param_groups(fork: MiniFork) -> Facts:
    """Keys of the groups, and what the next step does with what a scheduler writes there."""
    facts: Facts = {}
    at: list[dict[str, Tensor]] = []

    def look(number: int, model: Any, optimizer: Any) -> None:
        at.append(_params(model))
        groups = optimizer.param_groups
        named = [(group["name"], group["wd_mult"], group["lr_mult"]) for group in groups]
        facts["names and factors"] = (named, [("wd_no_scale_lr", 1.0, 1.0), ("no_wd_no_scale_lr", 0.0, 1.0)])
        has_keys = all({"lr", "weight_decay", "params"} <= group.keys() for group in groups)
        facts["have lr, weight_decay, params"] = (has_keys, True)
        # 1e-2 falls in a straight line over four iterations, and the fork's scheduler overwrites what was written.
        if number in (0, 2):
            wanted = pytest.approx([1e-2, 1e-2] if number == 0 else [5e-3, 5e-3])
            facts[f"lr {number}"] = ([group["lr"] for group in groups], wanted)
        if number > 0:
            squares = [(param, optimizer.state[param]["exp_avg_sq"]) for group in groups for param in group["params"]]
            is_live = all(square.shape == param.shape and bool((square > 0).any()) for param, square in squares)
            facts["state is live"] = (is_live, True)
        # The fork's scheduler has just written the lr of the next step; these lines come after it.
        for group in groups:
            group["lr"] = {0: 0.0, 1: 1.0 if group["wd_mult"] == 0.0 else 0.0}.get(number, group["lr"])
            group["weight_decay"] = 0.0

    run = _drive(fork, BF16, look, steps=3)
    facts["there are vectors"] = (sum(param.ndim == 1 for param in run.params.values()) > 10, True)
    moved = [
        sorted({param.ndim for name, param in later.items() if not torch.equal(param, earlier[name])})
        for earlier, later in pairwise(at)
    ]
    # First none moves, then vectors alone, then whatever the fork's scheduler says.
    facts["dimensions of what moved"] = (moved, [[], [1], [1, 2]])
    return facts


def optimizer_states(fork: MiniFork) -> Facts:
    """What --log-optimizer-states-to-tensorboard logs in a run of ours and of the fork's own distributed optimizer."""
    train, rows = fork.training.train, dict[bool, Any]()
    words = (DISTRIBUTED, "--log-optimizer-states-to-tensorboard", "--train-iters", "2")
    for ours in WHO.values():
        noted = mock.Mock(side_effect=lambda *args, ours=ours: rows.setdefault(ours, train(*args)))
        with mock.patch.object(fork.training, "train", noted):
            fork.train(*words, ours=ours)
    mine, theirs = ([row["optimizer_states"] for row in rows[ours]] for ours in WHO.values())
    # Norms of flat runs against norms of each param, in fp32.
    is_positive = len(mine) == 2 and min(value for row in mine for value in row.values()) > 0
    return {
        "logged": (mine, [pytest.approx(their, rel=1e-5) for their in theirs]),
        "are positive": (is_positive, True),
    }


def installation(fork: InstalledFork) -> Facts:
    """What is replaced while we are installed, and what is not as before when that is undone."""
    fork.uninstall()
    fork.train(*BF16, "--train-iters", "1", ours=False)  # the state that a training leaves is there already
    before = _attributes()
    fork.train(*BF16, "--train-iters", "1")
    installed = _attributes()
    fork.uninstall()
    after = _attributes()
    parser, factory = "parse_args", "get_megatron_optimizer"
    replaced = {key for key in installed if installed[key] is not before.get(key)}
    left_behind = [key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)]
    wanted = {f"megatron.{module}.{parser}" for module in ("arguments", "initialize")}
    wanted |= {f"megatron.{module}.{factory}" for module in ("optimizer", "training")}
    return {"replaced": (replaced, wanted), "left behind": (left_behind, [])}


#: `memory` first, see there.
IN_GATHERED = (memory, attributes, by_hand, timers, reloading, ranges, installation, step_results, parts_of_a_step)
#: In per_rank: where the fork's own class, which is called or replaced, is another one.
COLLECTORS = {
    "gathered": (*IN_GATHERED, param_groups, optimizer_states),
    "per_rank": (by_hand, ranges, installation),
}
#: What a training leaves in the fork: its groups, arguments and numbers, which are of the fork's doing.
_STATE = ("megatron.core.parallel_state", "megatron.core.tensor_parallel.random")


def _attributes() -> dict[str, Any]:
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "megatron"}
    modules = {name: module for name, module in modules.items() if name not in _STATE}
    return {f"{name}.{key}": value for name, module in modules.items() for key, value in vars(module).items()}


#: So that none gets lost.
NUM_FACTS = {
    **{"memory": 24, "attributes": 20, "by_hand": 2, "timers": 11, "reloading": 4, "ranges": 4, "installation": 2},
    **{"step_results": 16, "parts_of_a_step": 7, "param_groups": 7, "optimizer_states": 2},
}


def _collect(rank: int, size: int, file_layout: str) -> dict[str, tuple[int, Facts]]:
    """By function, how many facts there are, and those that are not as they have to be."""
    fork = InstalledFork.imported(file_layout=file_layout)
    with contextlib.redirect_stdout(io.StringIO()):
        facts = {collect.__name__: collect(fork) for collect in COLLECTORS[file_layout]}
    return {
        name: (len(each), {what: (found, wanted) for what, (found, wanted) in each.items() if found != wanted})
        for name, each in facts.items()
    }


@pytest.fixture(scope="module")
def gathered() -> list[dict[str, tuple[int, Facts]]]:
    core_folder()
    return run_ranks(_collect, 2, "gathered", seconds=240)


@pytest.fixture(scope="module")
def per_rank() -> list[dict[str, tuple[int, Facts]]]:
    core_folder()
    return run_ranks(_collect, 2, "per_rank", seconds=240)


@pytest.mark.parametrize(
    ("file_layout", "name"),
    [(file_layout, each.__name__) for file_layout, collectors in COLLECTORS.items() for each in collectors],
)
def test_optimizer_when_the_fork_uses_it_then_it_finds_what_it_expects(
    file_layout: str, name: str, request: pytest.FixtureRequest
) -> None:
    for facts in request.getfixturevalue(file_layout):
        num_facts, wrong = facts[name]
        assert wrong == {}
        assert num_facts == NUM_FACTS[name]
