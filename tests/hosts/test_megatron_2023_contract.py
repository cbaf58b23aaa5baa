"""What the training loop, the scheduler, the log and the tools of a fork of 2023 use, they find on
our optimizer, and none of the defects of the fork's own.

Each function goes through one part of the contract or one defect, and gives what was found and what
that has to be, in one spawn for each file layout.

Exercises hosts/megatron/grad_scaler.py, hosts/megatron/timers.py, hosts/megatron_2023/plan.py,
hosts/megatron_2023/step.py.
"""

from __future__ import annotations

import contextlib
import gc
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_distopt
from tests.support.facts import facts_of
from tests.support.fork_worlds import adam_of_the_fork, distance
from tests.support.mini_fork import InstalledFork, TrainingRun, core_folder
from tests.support.refusals import raised
from tests.support.values import from_ranks, same

#: By what it is: what was found, and what is wanted.
Facts = dict[str, tuple[Any, Any]]
Found = Iterator[tuple[str, Any, Any]]  # the same as rows
#: (forward step, iterator, model, optimizer, scheduler); the signature of the fork's `train_step`.
Step = Callable[..., Any]

DISTRIBUTED = "--use-distributed-optimizer"
BF16 = ("--bf16", DISTRIBUTED)
FP16 = ("--fp16", DISTRIBUTED, "--initial-loss-scale", "4096")
#: With its fp32 norms, 160 of the model's 7,744 elements; its biases and norms are a param group of
#: their own.
MIXED = ("--bf16", "--fp32-norms", DISTRIBUTED)
UNTIED = "--untie-embeddings-and-output-weights"
NUMEL, NUMEL_OF_NORMS = 7744, 160
WHO = {"ours": True, "host": False}


def _in_turn(fork: InstalledFork) -> list[tuple[str, bool]]:
    """`WHO`, first whoever trained last: to install the package takes as long as a training."""
    return sorted(WHO.items(), key=lambda each: each[1] != bool(fork.kept))


def _drive(
    fork: InstalledFork,
    words: tuple[str, ...],
    look: Callable[[int, Any, Any], None] = lambda *_: None,
    steps: int = 0,
    step: Step | None = None,
    ours: bool = True,
) -> TrainingRun:
    """The fork's own set-up with another loop: `look(number, model, optimizer)` before each step
    and at the end."""

    def loop(
        forward_step: Any, model: Any, optimizer: Any, scheduler: Any, iterator: Any
    ) -> list[Any]:
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


def _storages(tensors: Any) -> dict[int, int]:
    """Bytes by address of the allocation; storages that overlap or adjoin are one, as those of
    params in a buffer."""
    starts = {
        (each.untyped_storage().data_ptr(), each.untyped_storage().nbytes()) for each in tensors
    }
    found: dict[int, int] = {}
    last = -1
    for start, nbytes in sorted(starts):
        if last < 0 or start > last + found[last]:
            last = start
        found[last] = max(found.get(last, 0), start - last + nbytes)
    return found


def memory(fork: InstalledFork) -> Facts:
    """What lies where, with params of two dtypes. First of all: other trainings leave tensors in
    this process."""
    facts: Facts = {}
    made: list[Tensor] = []

    def look(number: int, model: Any, optimizer: Any) -> None:
        grad = next(iter(model[0]._grad_buffers.values())).data
        params, flat_params = list(model[0].parameters()), optimizer.sharded.flat_params
        buffer = optimizer.sharded.buffers[0].param
        made.append(grad)
        of_dtype = {
            dtype: sorted(
                _storages(each for each in (*params, buffer) if each.dtype is dtype).values()
            )
            for dtype in {param.dtype for param in params}
        }
        main = from_ranks(
            sum(_storages(flat.main for flat in flat_params if flat.owns_memory).values())
        )
        moments = sum(
            tensor.numel() * tensor.element_size()
            for state in optimizer.state.values()
            for tensor in state.values()
            if torch.is_tensor(tensor) and tensor.numel() > 1
        )
        stays = (
            made[0] is grad
            and {p.main_grad.untyped_storage().data_ptr() for p in params}
            == {grad.untyped_storage().data_ptr()}
            and _storages(flat.grad for flat in flat_params).keys() == _storages([grad]).keys()
        )
        # Ten norm vectors keep memory of their own, see buffers/compact.py, and are their own main
        # params.
        by_dtype = {torch.bfloat16: [NUMEL * 2], torch.float32: [NUMEL_OF_NORMS * 4 // 10] * 10}
        facts["bytes of params by dtype"] = (of_dtype, by_dtype)
        facts["bytes of grads"] = (grad.untyped_storage().nbytes(), NUMEL * 4)
        facts["grads stay in the fork's buffer"] = (stays, True)
        facts["bytes of main params on both ranks"] = (sum(main), (NUMEL - NUMEL_OF_NORMS) * 4)
        facts["bytes of moments"] = (moments, NUMEL // 2 * 8)

    run = _drive(fork, MIXED, look, steps=2)
    # params and grads
    facts["bytes of what is as large as the model"] = (_large(), [NUMEL * 2, NUMEL * 4])
    del run, look
    made.clear()
    facts["bytes of that without the optimizer"] = (_large(), [])
    return facts


def _large() -> list[int]:
    """Bytes of the allocations of this process that are at least as large as the model in bf16."""
    gc.collect()
    alive = _storages(each for each in gc.get_objects() if issubclass(type(each), Tensor))
    return sorted(nbytes for nbytes in alive.values() if nbytes >= NUMEL * 2)


def attributes(fork: InstalledFork) -> Facts:
    from megatron.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.optimizer.optimizer import MegatronOptimizer

    facts: Facts = {}
    names = (
        "clip_grad",
        "log_num_zeros_in_grad",
        "params_have_main_grad",
        "use_contiguous_buffers_in_local_ddp",
    )

    def look(number: int, model: Any, optimizer: Any) -> None:
        classes = (DistributedOptimizer, MegatronOptimizer, megatron_distopt.DistributedOptimizer)
        scale, groups, inner = (
            optimizer.get_loss_scale(),
            optimizer.param_groups,
            optimizer.optimizer,
        )
        parameters = [param for group in groups for param in group["params"]]
        facts["classes"] = (
            (*(isinstance(optimizer, each) for each in classes), type(optimizer) in classes[:2]),
            (True, True, True, False),
        )
        facts["given"] = (
            tuple(getattr(optimizer, each) for each in names),
            (0.5, True, True, True),
        )
        facts["precision"] = (
            (optimizer.fp16, optimizer.bf16, optimizer.params_dtype),
            (True, False, torch.float16),
        )
        facts["models"] = (optimizer.models is model, True)
        facts["group"] = (optimizer.get_model_parallel_group(), None)
        facts["scaler"] = (type(optimizer.grad_scaler).__name__, "DynamicGradScaler")
        facts["scale"] = ((scale.tolist(), scale.dtype), ([4096.0], torch.float32))
        facts["scaled loss"] = (optimizer.scale_loss(torch.tensor(3.0)).tolist(), [3 * 4096.0])
        is_live = groups is inner.param_groups and optimizer.state is inner.state
        facts["groups and state are those of the inner optimizer"] = (is_live, True)
        facts["parameters"] = (
            parameters == optimizer.get_parameters() and len(parameters) > 0,
            True,
        )

    _drive(fork, (*FP16, "--clip-grad", "0.5", "--log-num-zeros-in-grad"), look)
    return facts


def by_hand(fork: InstalledFork) -> Facts:
    """The ten positional arguments, in a fork where nothing is installed, against the installed
    one."""
    words = ("--fp16", "--initial-loss-scale", "4096", "--train-iters", "2")
    params: dict[str, Tensor] = {}

    def loop(
        forward_step: Any, model: Any, optimizer: Any, scheduler: Any, iterator: Any
    ) -> list[Any]:
        from megatron import get_args, training
        from megatron import optimizer as host

        args = get_args()
        base = host._get_base_optimizer(args, host.get_param_groups(model, None, None, 1.0))
        dtypes = (args.fp16, args.bf16, args.params_dtype)
        scaler = host._get_grad_scaler(args)
        ours = megatron_distopt.DistributedOptimizer(
            base, args.clip_grad, False, True, True, *dtypes, scaler, model
        )
        schedule = training.get_optimizer_param_scheduler(ours)
        for _ in range(args.train_iters):
            training.train_step(forward_step, iterator, model, ours, schedule)
        params.update(_params(model))
        return []

    with mock.patch.object(fork.training, "train", loop):
        fork.train(*words, ours=False)
    installed = fork.train(*words, DISTRIBUTED)
    return {"every bit is that of the installed one": (same(params, installed.params), True)}


def timers(fork: InstalledFork) -> Facts:
    """What is timed in a step, with which log levels and barriers: as by the fork's own
    optimizer."""
    facts, by_who = Facts(), []
    for who, ours in _in_turn(fork):
        calls: list[tuple[Any, ...]] = []
        _drive(fork, FP16, steps=1, step=_step_with(_NotedTimers(calls)), ours=ours)
        # One child of the fork times multi-query grads as well; ours has them in the time of the
        # norms.
        starts = {tuple(how) for kind, *how in calls if kind == "start"}
        by_who.append(
            {(name, *how) for name, *how in starts if name != "key-value-grads-all-reduce"}
        )
        facts[f"what is started is stopped, {who}"] = (
            sorted(name for kind, name, *_ in calls if kind == "stop"),
            sorted(name for kind, name, *_ in calls if kind == "start"),
        )
    facts["as the fork's"] = (*by_who,)
    facts["there are some"] = (len(by_who[0]), 10)
    _drive(fork, BF16, steps=1, step=_step_with(None))  # a caller without timers
    return facts


class _NotedTimers:
    """In the place of the fork's timers, and of each of them."""

    def __init__(
        self, calls: list[tuple[Any, ...]], name: str = "", log_level: int | None = None
    ) -> None:
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


def step_results(fork: InstalledFork) -> Facts:
    """What `step` returns, by flags; a first step at a loss scale of 2**32 overflows."""
    # By flags: those, (updated, has a norm, zeros are counted), and the scale afterwards: the
    # overflow is the first of two that --hysteresis 2 waits for.
    cases: dict[str, tuple[tuple[str, ...], tuple[bool, bool, bool], float]] = {
        "clipped": (BF16, (True, True, False), 1.0),
        "counted, unclipped": (
            (*BF16, "--clip-grad", "0", "--log-num-zeros-in-grad", UNTIED),
            (True, False, True),
            1.0,
        ),
        "overflow": (
            ("--fp16", DISTRIBUTED, "--log-num-zeros-in-grad"),
            (False, False, False),
            2.0**32,
        ),
    }
    facts: Facts = {}
    for name, (words, wanted, scale) in cases.items():
        results: list[Any] = []

        def step(
            forward_step: Any, iterator: Any, model: Any, optimizer: Any, scheduler: Any
        ) -> None:
            from megatron import get_args, get_timers

            _forward_backward(forward_step, iterator, model, optimizer)
            optimizer.reduce_model_grads(get_args(), get_timers())
            results.append(optimizer.step(get_args(), get_timers()))  # noqa: B023 - called before the next one

        turns = [ours for _, ours in _in_turn(fork)]
        runs = [_drive(fork, words, steps=1, step=step, ours=ours) for ours in turns]
        (updated, norm, zeros), theirs = results if turns[0] else results[::-1]
        # The fork adds up squares in fp32.
        same_norm = norm is theirs[1] is None or norm == pytest.approx(theirs[1], rel=1e-6)
        facts[f"{name}: as the fork's"] = (
            (updated, same_norm, zeros),
            (theirs[0], True, theirs[2]),
        )
        facts[f"{name}: what there is"] = ((updated, norm is not None, zeros is not None), wanted)
        facts[f"{name}: scales"] = (
            [float(run.optimizer.get_loss_scale()) for run in runs],
            [scale, scale],
        )
        if "counted" in name:
            facts["there are zeros"] = (zeros > 100, True)
    return facts


def parts_of_a_step(fork: InstalledFork) -> Facts:
    """The calls of a step by themselves; those parts of the fork's own step that work on its
    tensors are refused."""
    facts: Facts = {}

    def step(forward_step: Any, iterator: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
        from megatron import get_args, get_timers

        both = (get_args(), get_timers())
        for param in model[0].parameters():
            param.grad = torch.ones_like(param)
        optimizer.zero_grad()
        facts["zero_grad drops grads"] = (
            all(param.grad is None for param in model[0].parameters()),
            True,
        )
        _forward_backward(forward_step, iterator, model, optimizer)
        optimizer.reduce_model_grads(*both)
        before = _params(model)
        for name in (
            "count_zeros",
            "clip_grad_norm",
            "get_main_grads_for_grad_norm",
            "get_model_param_range_map",
        ):
            kind, text = raised(getattr(optimizer, name))
            facts[name] = (kind, "Call step(args, timers)" in text), ("AccessError", True)
        facts["result"] = (optimizer.step(*both), (True, None, None))
        optimizer.gather_model_params(*both)
        is_new = all(not torch.equal(param, before[name]) for name, param in _params(model).items())
        facts["after the gather all params are new"] = (
            is_new and _alike_on_all_ranks(_params(model)),
            True,
        )

    _drive(fork, (*FP16, UNTIED, "--clip-grad", "0"), steps=1, step=step)
    return facts


def _alike_on_all_ranks(params: dict[str, Tensor]) -> bool:
    whole = torch.cat([param.float().flatten() for param in params.values()])
    first = whole.clone()
    dist.broadcast(first, src=0)
    return torch.equal(whole, first)


def optimizer_states(fork: InstalledFork) -> Facts:
    """What --log-optimizer-states-to-tensorboard logs in a run of ours and of the fork's own
    distributed optimizer."""
    train, rows = fork.training.train, dict[bool, Any]()
    words = (DISTRIBUTED, "--log-optimizer-states-to-tensorboard", "--train-iters", "2")
    for _, ours in _in_turn(fork):
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


# What the distributed optimizers of 2023 do wrong and ours does not. The small fork has the defects
# of the real ones; its README.md lists them. Those of its checkpoints are the subject of
# test_megatron_2023_checkpoints. Each function provokes one and says in its docstring what the
# original does; where it costs nothing it gives what was found of the fork's own optimizer ("host")
# as well.

SHORT = ("--train-iters", "2")
#: For comparison to the last bit with torch's for-loop Adam.
PLAIN = ("--clip-grad", "1e9", "--weight-decay", "0.1", *SHORT)
EXACT = (*PLAIN, "--distopt-adam", "torch_foreach")
NOTHING = ("nothing", "")


def decay_off_cuda(fork: InstalledFork) -> Found:
    """The original has apex's decoupled decay on CUDA, and off it torch.optim.Adam, which adds it
    to the gradient."""
    with adam_of_the_fork(torch.optim.AdamW):
        decoupled = fork.train(*PLAIN, ours=False)
    with adam_of_the_fork(torch.optim.Adam):
        l2 = fork.train(*PLAIN, ours=False)
        theirs = fork.train(*PLAIN, DISTRIBUTED, ours=False)
        ours = fork.train(*EXACT, DISTRIBUTED)
        as_theirs = fork.train(*EXACT, DISTRIBUTED, "--distopt-decay", "l2")
    yield "decay off CUDA differs", distance(l2, decoupled) > 1e-3, True
    yield "decay off CUDA is l2, host", same(theirs.params, l2.params), True
    yield "decay off CUDA is decoupled, ours", same(ours.params, decoupled.params), True
    yield "decay off CUDA is l2 where asked, ours", same(as_theirs.params, l2.params), True


def storage_calls(fork: InstalledFork) -> Found:
    """The original makes its param buffers from a typed storage, by a name that is deprecated in
    torch or gone.

    It also asks views of params for their grad. For ours, every warning of any kind in the whole
    run is an error. The fork's type names are mended, its storage calls are not.
    """
    from megatron.optimizer import device

    with mock.patch.object(device, "NATIVE", False), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield "warnings, ours", raised(lambda: fork.train(*MIXED, *SHORT)), NOTHING


def nan_in_bf16(fork: InstalledFork) -> Found:
    """The original looks for inf and nan only where it has a loss scale: a bf16 run trains on with
    a model of nan.

    With --distopt-nonfinite skip the schedule waits, as for a step that fp16 skips.
    """
    words = (*BF16, "--nan-at", "2", "0")
    theirs = fork.train(*words, *SHORT, ours=False)
    skipping = fork.train(*words, "--distopt-nonfinite", "skip")
    for who, run in {"host": theirs, "skipping": skipping}.items():
        is_finite = all(bool(param.isfinite().all()) for param in run.params.values())
        yield f"params are finite after a nan, {who}", is_finite, who == "skipping"
    yield (
        "steps are skipped for a nan, host",
        any(each.skipped for each in theirs.iterations),
        False,
    )
    # The word embeddings lie last in the buffer, which rank 1 owns, whoever had the nan.
    for rank, at in enumerate((("2", "0"), ("1", "1"))):
        kind, text = raised(lambda: fork.train(*BF16, "--nan-at", *at))  # noqa: B023 - called at once
        named = all(
            part in text for part in ("rank 1", "language_model.embedding.word_embeddings.weight")
        )
        yield f"nan on rank {rank}, ours", (kind, named), ("NonFiniteGradError", True)
    if dist.get_rank() == 0:  # the rank that logs
        first, second, *_ = skipping.iterations
        assert [each.skipped for each in skipping.iterations] == [False, True, False, False]
        assert first.lr == second.lr, "the schedule waits"


class FusedAdam(torch.optim.AdamW):
    """In the place of DeepSpeed's, whose op would have to be compiled."""

    def __init__(self, *args: Any, adam_w_mode: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adam_w_mode = adam_w_mode


@contextlib.contextmanager
def _deepspeed() -> Iterator[None]:
    from megatron import optimizer

    modules = {
        name: ModuleType(name) for name in ("deepspeed", "deepspeed.ops", "deepspeed.ops.adam")
    }
    modules["deepspeed"].__spec__ = ModuleSpec("deepspeed", None)
    modules["deepspeed.accelerator"] = accelerator = ModuleType("deepspeed.accelerator")
    accelerator.get_accelerator = lambda: mock.Mock(
        spec_set=["device_name"], device_name=lambda: "cpu"
    )  # type: ignore[attr-defined]
    modules["deepspeed.ops.adam"].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(optimizer, "Adam", optimizer.Adam),
    ):
        yield


def other_inner_optimizers(fork: InstalledFork) -> Found:
    """The original asks isinstance(optimizer, Adam), and --ds-fused-adam rebinds `Adam` in another
    module.

    For --cpu-torch-adam it uses `torch` in a module that does not import it.
    """
    from megatron import optimizer as host

    fused, torchs = ("--ds-fused-adam",), ("--cpu-optimizer", "--cpu-torch-adam")
    for words, of_ours in ((fused, ("FusedAdam", "deepspeed")), (torchs, ("AdamW", "torch_fused"))):
        with _deepspeed():
            optimizer = fork.train(DISTRIBUTED, *words, *SHORT).optimizer
        yield (
            f"{words[-1]}, ours",
            (type(optimizer.optimizer).__name__, optimizer.sharded.plan.choice.name),
            of_ours,
        )
    fork.uninstall()
    yield "torch is left behind in the fork's module", hasattr(host, "torch"), False


def changed_before_the_first_step(fork: InstalledFork) -> Found:
    """A tool writes the params after the optimizer is built: the original overwrites them with its
    main params.

    One step with a learning rate of 0 follows.
    """

    def loop(
        forward_step: Any, model: Any, optimizer: Any, scheduler: Any, iterator: Any
    ) -> list[Any]:
        with torch.no_grad():
            for param in model[0].parameters():
                param.fill_(0.5)
        fork.training.train_step(forward_step, iterator, model, optimizer, scheduler)
        return []

    with mock.patch.object(fork.training, "train", loop):
        for who, ours in _in_turn(fork):
            params = fork.train(*BF16, "--fp32-norms", "--lr", "0", ours=ours).params.values()
            kept = [bool((param == 0.5).all()) for param in params if param.dtype is torch.bfloat16]
            yield (
                f"params that were changed before the first step stay, {who}",
                (all(kept), any(kept)),
                (ours, ours),
            )


def fine_tuning(fork: InstalledFork, folder: Path) -> Found:
    """The original with per-rank files reloads its main params in fp16 alone: a bf16 run goes on
    from random ones.

    In fp16 it calls `reload_model_params`, whose second half it never got. Weights are of a run
    with another seed; the first step with a learning rate of 0 changes nothing.
    """
    saved = fork.train(*BF16, "--seed", "1", "--save", str(folder), *SHORT)
    load = ("--seed", "2", "--load", str(folder), "--lr", "0")
    for name, words in {
        "finetune": ("--finetune", "--train-iters", "1"),
        "no-load-optim": ("--no-load-optim", "--train-iters", "3"),
    }.items():
        for who, ours in _in_turn(fork):
            run = fork.train(*BF16, *load, *words, ours=ours)
            yield f"--{name} starts from the weights, {who}", same(run.params, saved.params), ours
    half = ("--fp16", DISTRIBUTED, "--loss-scale", "64")
    saved = fork.train(*half, "--seed", "1", "--save", str(folder / "fp16"), *SHORT)
    load = (
        *half,
        "--seed",
        "2",
        "--load",
        str(folder / "fp16"),
        "--lr",
        "0",
        "--finetune",
        "--train-iters",
        "1",
    )
    yield (
        "--finetune in fp16 starts from the weights, ours",
        same(fork.train(*load).params, saved.params),
        True,
    )


def empty_groups(fork: InstalledFork) -> Found:
    """The original drops such groups from per-rank files: a group's number means other things on
    other ranks.

    The word embeddings of this model fill some ranks' shards.
    """
    words = (*BF16, "--vocab-size", "2048", "--num-layers", "1", *SHORT)
    for who, ours in _in_turn(fork):
        groups = fork.train(*words, ours=ours).optimizer.param_groups
        by_rank = from_ranks(
            [(group["name"], len(group["params"]), group["lr"]) for group in groups]
        )
        names = [[name for name, _, _ in of_rank] for of_rank in by_rank]
        alike = names == [["wd_no_scale_lr", "no_wd_no_scale_lr"]] * 3
        yield f"ranks have groups of the same names, {who}", alike, ours
        if ours:
            is_empty = any(count == 0 for of_rank in by_rank for _, count, _ in of_rank)
            yield "a group is empty somewhere, ours", is_empty, True
            yield (
                "learning rates, which the scheduler writes, ours",
                len({g[2] for each in by_rank for g in each}),
                1,
            )


def a_rank_with_nothing(fork: InstalledFork) -> Found:
    """The original with per-rank files has no group there, and the log asks for the lr of the
    first.

    Four elements train, of which the last of three ranks owns none.
    """
    provide, is_last = fork.script.model_provider, dist.get_rank() == dist.get_world_size() - 1
    bias = "language_model.encoder.layers.0.self_attention.key_value.bias"

    def tiny(*args: Any, **kwargs: Any) -> Any:
        model = provide(*args, **kwargs)
        for name, param in model.named_parameters():
            param.requires_grad_(name == bias)
        return model

    with mock.patch.object(fork.script, "model_provider", tiny):
        run = fork.train(*BF16, "--hidden-size", "8", "--num-layers", "1", "--multi-query")
    groups = [(group["name"], len(group["params"])) for group in run.optimizer.param_groups]
    yield (
        "a rank with nothing has an empty group, ours",
        groups,
        [("no_wd_no_scale_lr", 0 if is_last else 1)],
    )
    trained = run.params[bias]
    yield (
        "a rank with nothing trains along, ours",
        bool(trained.any()) and _alike_on_all_ranks({bias: trained}),
        True,
    )


#: By layout of the files; `memory` first, see there.
COLLECTORS: dict[str, tuple[Callable[..., Facts | Found], ...]] = {
    "gathered": (
        *(memory, storage_calls, attributes, by_hand, timers, step_results),
        *(
            parts_of_a_step,
            optimizer_states,
            changed_before_the_first_step,
            decay_off_cuda,
            nan_in_bf16,
        ),
        other_inner_optimizers,
    ),
    "per_rank": (empty_groups, a_rank_with_nothing, fine_tuning),
}
#: With per-rank files three: on fewer, every rank owns something of everything.
Checked = dict[str, tuple[int, Facts]]


def collect_facts(rank: int, size: int, file_layout: str, folder: Path) -> Checked:
    """By function, how many facts there are, and those that are not as they have to be."""
    fork, checked = InstalledFork.imported(file_layout=file_layout), Checked()
    with contextlib.redirect_stdout(io.StringIO()):
        for collect in COLLECTORS[file_layout]:
            found = collect(fork, folder) if collect is fine_tuning else collect(fork)
            facts = (
                found if isinstance(found, dict) else {what: (one, two) for what, one, two in found}
            )
            checked[collect.__name__] = (
                len(facts),
                {what: each for what, each in facts.items() if each[0] != each[1]},
            )
    return checked


gathered = facts_of(collect_facts, 2, "gathered", seconds=240, before=core_folder)
per_rank = facts_of(collect_facts, 3, "per_rank", seconds=240, before=core_folder)


@pytest.mark.parametrize(
    ("file_layout", "name"),
    [
        (file_layout, each.__name__)
        for file_layout, collectors in COLLECTORS.items()
        for each in collectors
    ],
)
def test_optimizer_when_the_fork_uses_it_then_it_finds_what_it_expects_and_no_defect(
    file_layout: str, name: str, request: pytest.FixtureRequest
) -> None:
    for num_facts, wrong in request.getfixturevalue(file_layout)[name]:
        assert wrong == {}
        assert num_facts > 0
