"""What the training loop, the scheduler, the log and the tools of a fork of 2023 use, they find on our optimizer.

The facts are collected in one spawn for each file layout, on two data-parallel ranks; tests say what they must be.
"""

from __future__ import annotations

import contextlib
import gc
import io
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_distopt
from tests.support.installed_fork import InstalledFork
from tests.support.mini_fork import MiniFork, TrainingRun, core_folder
from tests.support.spawn import run_ranks

Facts = dict[str, Any]
#: (forward step, model, optimizer, scheduler, iterator) -> what was logged; the signature of the fork's `train`.
Loop = Callable[..., list[Any]]

DISTRIBUTED = "--use-distributed-optimizer"
BF16 = ("--bf16", DISTRIBUTED)
FP16 = ("--fp16", DISTRIBUTED, "--initial-loss-scale", "4096")
#: With its fp32 norms, 160 of the model's 7,744 elements; its biases and norms are a param group of their own.
MIXED = ("--bf16", "--fp32-norms", DISTRIBUTED)
NUMEL, NUMEL_OF_NORMS = 7744, 160
SKIPPED = (False, None, None)


def _drive(fork: MiniFork, loop: Loop, *words: str, ours: bool = True) -> TrainingRun:
    """The fork's own set-up with another training loop."""
    original, fork.training.train = fork.training.train, loop
    try:
        return fork.train(*words, ours=ours)
    finally:
        fork.training.train = original


def _once(look: Callable[[Any, Any], None]) -> Loop:
    """A loop that looks at (model, optimizer) before the first step."""

    def loop(forward_step: Any, model: Any, optimizer: Any, scheduler: Any, iterator: Any) -> list[Any]:
        look(model, optimizer)
        return []

    return loop


def _stepping(steps: int, look: Callable[[int, Any, Any], None], at_step: Callable[..., Any] | None = None) -> Loop:
    """A loop of `steps` of the fork's own training steps; `look(step, model, optimizer)` before each and at the end."""

    def loop(forward_step: Any, model: Any, optimizer: Any, scheduler: Any, iterator: Any) -> list[Any]:
        from megatron import training

        for step in range(steps):
            look(step, model, optimizer)
            (at_step or training.train_step)(forward_step, iterator, model, optimizer, scheduler)
        look(steps, model, optimizer)
        return []

    return loop


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
    """By dtypes of the model, what lies where. First of all facts: other trainings leave tensors in this process."""
    facts: Facts = {}
    for name, words in {"bf16": BF16, "fp32": (DISTRIBUTED,), "mixed": MIXED}.items():
        made: list[Tensor] = []

        def look(step: int, model: Any, optimizer: Any, name: str = name, made: list[Tensor] = made) -> None:
            grad = next(iter(model[0]._grad_buffers.values())).data
            params = list(model[0].parameters())
            buffer = optimizer.sharded.buffers[0].param
            by_dtype = {
                dtype: _storages(each for each in (*params, buffer) if each.dtype is dtype)
                for dtype in {param.dtype for param in params}
            }
            made.append(grad)
            facts[name] = {
                "params": {str(dtype): sorted(found.values()) for dtype, found in by_dtype.items()},
                "views in order": _are_views_in_order(params, buffer),
                "grad": grad.untyped_storage().nbytes(),
                "grad stays": made[0] is grad,
                "main grads": {p.main_grad.untyped_storage().data_ptr() for p in params}
                == {grad.untyped_storage().data_ptr()},
                "runs": _storages(run.grad for run in optimizer.sharded.flat_params).keys() == _storages([grad]).keys(),
                "main": sum(_storages(run.main for run in optimizer.sharded.flat_params if run.owns_memory).values()),
                "moments": sum(
                    tensor.numel() * tensor.element_size()
                    for state in optimizer.state.values()
                    for tensor in state.values()
                    if torch.is_tensor(tensor) and tensor.numel() > 1
                ),
            }

        run = _drive(fork, _stepping(2, look), *words)
        facts[name]["large"] = _large()
        del run, made, look
        facts[name]["large afterwards"] = _large()
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


def types(fork: MiniFork) -> Facts:
    facts: Facts = {}

    def look(model: Any, optimizer: Any) -> None:
        from megatron.optimizer.distrib_optimizer import DistributedOptimizer
        from megatron.optimizer.optimizer import MegatronOptimizer

        names = ["clip_grad", "log_num_zeros_in_grad", "params_have_main_grad", "use_contiguous_buffers_in_local_ddp"]
        facts.update(
            {
                "is the host's distributed": isinstance(optimizer, DistributedOptimizer),
                "is the host's": isinstance(optimizer, MegatronOptimizer),
                "is the host's own": type(optimizer) is DistributedOptimizer,
                "is ours": isinstance(optimizer, megatron_distopt.DistributedOptimizer),
                "attributes": {name: getattr(optimizer, name) for name in names},
                "precision": (optimizer.fp16, optimizer.bf16, str(optimizer.params_dtype)),
                "models": optimizer.models is model,
                "scaler": type(optimizer.grad_scaler).__name__,
                "scale": (optimizer.get_loss_scale().tolist(), optimizer.scale_loss(torch.tensor(3.0)).tolist()),
                "scale dtype": str(optimizer.get_loss_scale().dtype),
                "group": optimizer.get_model_parallel_group(),
                "inner": optimizer.param_groups is optimizer.optimizer.param_groups
                and optimizer.state is optimizer.optimizer.state,
                "parameters": [p for group in optimizer.param_groups for p in group["params"]]
                == optimizer.get_parameters()
                and len(optimizer.get_parameters()) > 0,
            }
        )

    _drive(fork, _once(look), *FP16, "--clip-grad", "0.5", "--log-num-zeros-in-grad")
    facts["fp16"] = dict(facts)
    _drive(fork, _once(look), *BF16)
    return facts


def by_hand(fork: MiniFork) -> Facts:
    """The ten positional arguments, in a fork where nothing is installed, against the installed one."""
    facts: Facts = {}
    trainings = {"fp32": (), "bf16": ("--bf16",), "fp16": ("--fp16", "--initial-loss-scale", "4096")}
    params: list[dict[str, Tensor]] = []
    for flags in trainings.values():
        _drive(fork, _loop_by_hand(params), *flags, "--train-iters", "2", ours=False)
    for (name, flags), by_hand in zip(trainings.items(), params, strict=True):
        facts[name] = _same(by_hand, fork.train(*flags, DISTRIBUTED, "--train-iters", "2").params)
    return facts


def _loop_by_hand(params: list[dict[str, Tensor]]) -> Loop:
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

    return loop


def _params(model: Any) -> dict[str, Tensor]:
    """Copies, by the fork's names."""
    bare = model[0]
    while hasattr(bare, "module"):
        bare = bare.module
    return {name: param.detach().clone() for name, param in bare.named_parameters()}


def _same(ours: dict[str, Tensor], theirs: Any) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(param, theirs[name]) for name, param in ours.items())


def timers(fork: MiniFork) -> Facts:
    """Names, log levels and barriers of everything that is timed in a step, by who steps."""
    facts: Facts = {}
    for ours in (False, True):
        for barrier, flags in {"barrier": (), "no barrier": ("--no-barrier-with-level-1-timing",)}.items():
            calls: list[tuple[Any, ...]] = []
            loop = _stepping(1, lambda *_: None, _step_with(_NotedTimers(calls)))
            _drive(fork, loop, *FP16, *flags, ours=ours)
            facts[f"{barrier} {'ours' if ours else 'host'}"] = calls
    _drive(fork, _stepping(1, lambda *_: None, _step_with(None)), *BF16)  # a caller without timers
    _drive(fork, _stepping(2, lambda *_: None), *BF16, "--timing-log-level", "2")
    from megatron import get_timers

    facts["host's timers"] = sorted(get_timers()._timers)
    return facts


class _NotedTimers:
    """In the place of the fork's timers."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls

    def __call__(self, name: str, log_level: int | None = None) -> _NotedTimer:
        return _NotedTimer(self.calls, name, log_level)


class _NotedTimer:
    def __init__(self, calls: list[tuple[Any, ...]], name: str, log_level: int | None) -> None:
        self.calls, self.name, self.log_level = calls, name, log_level

    def start(self, barrier: bool = False) -> None:
        self.calls.append(("start", self.name, self.log_level, barrier))

    def stop(self, barrier: bool = False) -> None:
        self.calls.append(("stop", self.name, self.log_level, barrier))


def _step_with(noted: _NotedTimers | None) -> Callable[..., None]:
    def step(forward_step: Any, iterator: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
        from megatron import get_args

        _forward_backward(forward_step, iterator, model, optimizer)
        optimizer.reduce_model_grads(get_args(), noted)
        assert optimizer.step(get_args(), noted)[0]
        optimizer.gather_model_params(get_args(), noted)

    return step


def step_results(fork: MiniFork) -> Facts:
    """What `step` returns, by flags; a first step at a loss scale of 2**32 overflows."""
    cases: dict[str, tuple[str, ...]] = {
        "clipped": BF16,
        "unclipped": (*BF16, "--clip-grad", "0"),
        "counted": (*BF16, "--log-num-zeros-in-grad", "--untie-embeddings-and-output-weights"),
        "counted, unclipped": (*BF16, "--clip-grad", "0", "--log-num-zeros-in-grad"),
        "overflow": ("--fp16", DISTRIBUTED, "--log-num-zeros-in-grad"),
    }
    facts: Facts = {}
    for ours in (True, False):
        for name, words in cases.items():
            results: list[Any] = []
            run = _drive(fork, _stepping(1, lambda *_: None, _noting_result(results)), *words, ours=ours)
            facts[f"{name} {'ours' if ours else 'host'}"] = results[0]
            facts[f"{name} scale {'ours' if ours else 'host'}"] = float(run.optimizer.get_loss_scale())
    return facts


def _noting_result(results: list[Any]) -> Callable[..., None]:
    def step(forward_step: Any, iterator: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
        from megatron import get_args, get_timers

        _forward_backward(forward_step, iterator, model, optimizer)
        optimizer.reduce_model_grads(get_args(), get_timers())
        results.append(optimizer.step(get_args(), get_timers()))

    return step


def parts(fork: MiniFork) -> Facts:
    """The calls of a step by themselves, in an fp16 run with half of the grads in each rank's shard."""
    facts: Facts = {}

    def step(forward_step: Any, iterator: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
        from megatron import get_args, get_timers

        both = (get_args(), get_timers())
        for param in model[0].parameters():
            param.grad = torch.ones_like(param)
        optimizer.zero_grad()
        facts["grads dropped"] = all(param.grad is None for param in model[0].parameters())
        _forward_backward(forward_step, iterator, model, optimizer)
        optimizer.reduce_model_grads(*both)
        before = _params(model)
        facts["zeros"] = optimizer.count_zeros()
        facts["norm"] = optimizer.clip_grad_norm(0.25)
        facts["norm once clipped"] = optimizer.clip_grad_norm(0.25)
        facts["step"] = optimizer.step(*both)
        shard_numel = optimizer.grad_buffers[0].plan.layout.shard_numel
        changed = [(a != b).sum() for a, b in zip(_params(model).values(), before.values(), strict=True)]
        facts["changed before the gather"] = int(sum(changed)) <= shard_numel and int(sum(changed)) > shard_numel // 2
        optimizer.gather_model_params(*both)
        facts["params alike"] = _alike_on_all_ranks(_params(model))
        changed = [(a != b).sum() for a, b in zip(_params(model).values(), before.values(), strict=True)]
        facts["changed"] = int(sum(changed)) > shard_numel

    words = (*FP16, "--untie-embeddings-and-output-weights", "--clip-grad", "0")
    _drive(fork, _stepping(1, lambda *_: None, step), *words)
    plain = fork.train(
        *words[:1], *words[2:], "--log-num-zeros-in-grad", "--train-iters", "1", "--clip-grad", "1e9", ours=False
    )
    facts["plain"] = [(each.grad_norm, each.num_zeros) for each in plain.iterations]
    return facts


def _alike_on_all_ranks(params: dict[str, Tensor]) -> bool:
    whole = torch.cat([param.float().flatten() for param in params.values()])
    first = whole.clone()
    dist.broadcast(first, src=0)
    return torch.equal(whole, first)


def reloading(fork: MiniFork) -> Facts:
    """Somebody changes the model after some steps and says so; params whose gradient is zero keep the new value."""
    facts: Facts = {}
    for name, words in {"bf16": BF16, "mixed": MIXED, "fp32": (DISTRIBUTED,)}.items():

        def look(step: int, model: Any, optimizer: Any, name: str = name) -> None:
            if step == 1:
                before = [run.main.clone() for run in optimizer.sharded.flat_params]
                optimizer.reload_model_params()
                mains = [run.main for run in optimizer.sharded.flat_params]
                facts[f"{name} kept"] = all(map(torch.equal, before, mains))
                with torch.no_grad():
                    for param in model[0].parameters():
                        param.fill_(0.5)
                optimizer.reload_model_params()
                for group in optimizer.param_groups:
                    group["lr"] = 0.0
            if step == 2:
                facts[name] = all(bool((param == 0.5).all()) for param in model[0].parameters())

        _drive(fork, _stepping(2, look), *words, "--lr", "0.1")
    return facts


def ranges(fork: MiniFork) -> Facts:
    """By model: what the fork's own optimizer and ours say this rank owns of each param."""
    facts: Facts = {}
    for ours in (False, True):
        for name, words in {"bf16": BF16, "mixed": MIXED, "narrow": (*BF16, "--hidden-size", "12")}.items():
            found: dict[str, Any] = {}

            def look(model: Any, optimizer: Any, found: dict[str, Any] = found) -> None:
                for param_name, param in model[0].named_parameters():
                    try:
                        spans = optimizer.get_model_param_range_map(param)
                    except KeyError:
                        found[param_name] = None
                    else:
                        found[param_name] = {k: (s.start, s.end, s.size, len(s)) for k, s in spans.items()}

            _drive(fork, _once(look), *words, ours=ours)
            facts[f"{name} {'ours' if ours else 'host'}"] = found
    return facts


def param_groups(fork: MiniFork) -> Facts:
    """Keys of the groups, and what the next step does with what a scheduler writes there."""
    facts: Facts = {}
    at: list[dict[str, Tensor]] = []

    def look(step: int, model: Any, optimizer: Any) -> None:
        at.append(_params(model))
        groups = optimizer.param_groups
        facts["groups"] = [{key: group[key] for key in ("name", "wd_mult", "lr_mult")} for group in groups]
        facts["keys"] = [{"lr", "weight_decay", "params"} <= group.keys() for group in groups]
        facts[f"lr {step}"] = [group["lr"] for group in groups]
        if step > 0:
            facts["state"] = all(
                optimizer.state[param]["exp_avg_sq"].shape == param.shape
                and bool((optimizer.state[param]["exp_avg_sq"] > 0).any())
                for group in groups
                for param in group["params"]
            )
        # The fork's scheduler has just written the lr of the next step; these lines come after it.
        for group in groups:
            group["lr"] = {0: 0.0, 1: 1.0 if group["wd_mult"] == 0.0 else 0.0}.get(step, group["lr"])
            group["weight_decay"] = 0.0

    run = _drive(fork, _stepping(3, look), *BF16)
    facts["vectors"] = sum(param.ndim == 1 for param in run.params.values())
    facts["moved"] = [
        sorted({param.ndim for name, param in later.items() if not torch.equal(param, earlier[name])})
        for earlier, later in pairwise(at)
    ]
    return facts


def optimizer_states(fork: MiniFork) -> Facts:
    """What --log-optimizer-states-to-tensorboard logs in a run of ours and of the fork's own distributed optimizer."""
    facts: Facts = {}
    original = fork.training.train
    for ours in (True, False):
        rows: list[Any] = []

        def train(*args: Any, rows: list[Any] = rows) -> Any:
            rows.extend(original(*args))
            return rows

        _drive(fork, train, DISTRIBUTED, "--log-optimizer-states-to-tensorboard", "--train-iters", "2", ours=ours)
        facts["ours" if ours else "host"] = [row["optimizer_states"] for row in rows]
    return facts


def installation(fork: MiniFork) -> Facts:
    """Attributes of the fork's modules that are not what they were, once everything is undone."""
    fork.train(*BF16, ours=False)  # the state that a training leaves is there already
    before = _attributes()
    first = fork.train(*BF16)
    facts: Facts = {"left behind": _changed(before)}
    installed = megatron_distopt.install()
    facts["while installed"] = _changed(before)
    facts["installed twice"] = megatron_distopt.install() is installed
    installed.undo()
    installed.undo()
    facts["left behind then"] = _changed(before)
    second = fork.train(*BF16)
    facts["same curve"] = first.losses == second.losses and len(first.losses) in (0, 4)
    facts["same params"] = _same(dict(first.params), second.params)
    facts["classes"] = [type(run.optimizer).__module__ for run in (first, second, fork.train(*BF16, ours=False))]
    return facts


#: What a training leaves in the fork: its groups, arguments and numbers, which are of the fork's doing.
_STATE = ("megatron.core.parallel_state", "megatron.core.tensor_parallel.random")


def _attributes() -> dict[tuple[str, str], Any]:
    names = [name for name in sys.modules if name == "megatron" or name.startswith("megatron.")]
    return {
        (name, attribute): value
        for name in names
        if name not in _STATE
        for attribute, value in vars(sys.modules[name]).items()
    }


def _changed(before: dict[tuple[str, str], Any]) -> list[str]:
    after = _attributes()
    return sorted(
        f"{name}.{attribute}"
        for name, attribute in before.keys() | after.keys()
        if before.get((name, attribute)) is not after.get((name, attribute))
    )


def without_us(fork: MiniFork) -> Facts:
    """The class that is built where our flag or our variable says no."""
    built = {"without the flag": fork.train("--bf16", "--train-iters", "1").optimizer}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_DISTOPT", "0")
        built["switched off"] = fork.train(*BF16, "--train-iters", "1").optimizer
    return {name: f"{type(each).__module__}.{type(each).__qualname__}" for name, each in built.items()}


ALL: tuple[Callable[[MiniFork], Facts], ...] = (
    memory,  # first, see there
    types,
    by_hand,
    timers,
    step_results,
    parts,
    reloading,
    ranges,
    param_groups,
    optimizer_states,
)
#: With an installation for each training, in which nothing of another one is left.
INSTALLING: tuple[Callable[[MiniFork], Facts], ...] = (installation, without_us)
#: Where the file layouts differ: what of the fork's own class is called or replaced.
ALSO_IN_A1 = (types, by_hand, timers, reloading, ranges)


def _collect(rank: int, size: int, file_layout: str) -> dict[str, Facts]:
    fork = InstalledFork.imported(file_layout=file_layout)
    with contextlib.redirect_stdout(io.StringIO()):
        facts = {each.__name__: each(fork) for each in (ALL if file_layout == "gathered" else ALSO_IN_A1)}
        fork.uninstall()
        bare = MiniFork(fork.training, fork.script)
        return facts | {
            each.__name__: each(bare) for each in (INSTALLING if file_layout == "gathered" else (installation,))
        }


@pytest.fixture(scope="module")
def ranks_of_gathered() -> list[dict[str, Facts]]:
    core_folder()
    return run_ranks(_collect, 2, "gathered", seconds=240)


@pytest.fixture(scope="module")
def ranks_of_per_rank() -> list[dict[str, Facts]]:
    core_folder()
    return run_ranks(_collect, 2, "per_rank", seconds=240)


@pytest.fixture(params=["gathered-rank0", "gathered-rank1", "per_rank-rank0", "per_rank-rank1"])
def facts(request: pytest.FixtureRequest) -> Iterator[dict[str, Facts]]:
    """Of both file layouts."""
    file_layout, rank = request.param.split("-rank")
    yield request.getfixturevalue(f"ranks_of_{file_layout}")[int(rank)]


@pytest.fixture(params=[0, 1], ids=["rank0", "rank1"])
def facts_of_gathered(request: pytest.FixtureRequest, ranks_of_gathered: list[dict[str, Facts]]) -> dict[str, Facts]:
    return ranks_of_gathered[request.param]


def test_optimizer_when_the_fork_asks_what_it_is_then_it_is_of_the_forks_classes(facts: dict[str, Facts]) -> None:
    found = facts["types"]
    assert found["is the host's distributed"] and found["is the host's"] and found["is ours"]
    assert not found["is the host's own"]
    assert found["models"] and found["inner"] and found["parameters"]
    assert found["group"] is None


def test_attributes_when_read_then_they_are_what_the_fork_gave(facts: dict[str, Facts]) -> None:
    contiguous = {"params_have_main_grad": True, "use_contiguous_buffers_in_local_ddp": True}
    assert facts["types"]["attributes"] == {"clip_grad": 1.0, "log_num_zeros_in_grad": False, **contiguous}
    assert facts["types"]["fp16"]["attributes"] == {"clip_grad": 0.5, "log_num_zeros_in_grad": True, **contiguous}
    assert facts["types"]["precision"] == (False, True, "torch.bfloat16")
    assert facts["types"]["fp16"]["precision"] == (True, False, "torch.float16")


def test_loss_when_scaled_then_by_the_forks_grad_scaler_or_by_one(facts: dict[str, Facts]) -> None:
    assert facts["types"]["scaler"] == "NoneType"
    assert facts["types"]["scale"] == ([1.0], [3.0])
    assert facts["types"]["fp16"]["scaler"] == "DynamicGradScaler"
    assert facts["types"]["fp16"]["scale"] == ([4096.0], [3 * 4096.0])
    assert facts["types"]["fp16"]["scale dtype"] == "torch.float32"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_optimizer_when_built_by_hand_with_ten_positions_then_every_bit_is_that_of_the_installed_one(
    facts: dict[str, Facts], precision: str
) -> None:
    assert facts["by_hand"][precision] is True


#: The fork's own optimizer times these; the last is that of the gather.
TIMED = {
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "grads-reduce-scatter",
    "optimizer-copy-to-main-grad",
    "optimizer-unscale-and-check-inf",
    "optimizer-clip-main-grad",
    "optimizer-count-zeros",
    "optimizer-inner-step",
    "optimizer-copy-main-to-model-params",
    "params-all-gather",
}


@pytest.mark.parametrize("barrier", ["barrier", "no barrier"])
def test_timers_when_a_step_is_timed_then_all_names_of_the_fork_appear(facts: dict[str, Facts], barrier: str) -> None:
    ours, theirs = ({call[1] for call in facts["timers"][f"{barrier} {who}"]} for who in ("ours", "host"))
    # One child of the fork times multi-query grads as well; ours has them in the time of the norms.
    assert theirs - {"key-value-grads-all-reduce"} == TIMED
    assert ours == TIMED


@pytest.mark.parametrize("barrier", ["barrier", "no barrier"])
def test_timers_when_a_phase_starts_then_with_the_forks_level_and_barrier(
    facts: dict[str, Facts], barrier: str
) -> None:
    for who in ("ours", "host"):
        starts = [call[2:] for call in facts["timers"][f"{barrier} {who}"] if call[0] == "start"]
        assert set(starts) == {(1, barrier == "barrier")}, who


def test_timers_when_a_phase_has_started_then_it_stops_before_the_next_one(facts: dict[str, Facts]) -> None:
    calls = [call[:2] for call in facts["timers"]["barrier ours"]]
    assert calls[::2] == [("start", name) for _, name in calls[1::2]]
    assert {kind for kind, _ in calls[1::2]} == {"stop"}


def test_timers_when_they_are_the_forks_then_they_know_the_phases(facts: dict[str, Facts]) -> None:
    # bf16 without a grad scaler: nothing is unscaled, and so it is in the fork.
    assert set(facts["timers"]["host's timers"]) >= TIMED - {"optimizer-unscale-and-check-inf"}


def test_step_when_it_updates_then_it_returns_norm_and_zeros_only_where_asked(
    facts_of_gathered: dict[str, Facts],
) -> None:
    found = facts_of_gathered["step_results"]
    updated, norm, zeros = found["clipped ours"]
    assert (updated, zeros) == (True, None)
    assert norm == pytest.approx(found["clipped host"][1], rel=1e-6)  # the fork adds up squares in fp32
    assert found["unclipped ours"] == found["unclipped host"] == (True, None, None)
    assert found["counted ours"][2] == found["counted host"][2]
    assert found["counted ours"][2] > 100
    assert found["counted, unclipped ours"] == found["counted, unclipped host"]
    assert found["counted, unclipped ours"][:2] == (True, None)


def test_step_when_fp16_overflows_then_it_returns_no_norm_and_the_scale_moves(
    facts_of_gathered: dict[str, Facts],
) -> None:
    found = facts_of_gathered["step_results"]
    assert found["overflow ours"] == found["overflow host"] == SKIPPED
    # The first of two overflows that --hysteresis 2 waits for.
    assert found["overflow scale ours"] == found["overflow scale host"] == 2.0**32


def test_zero_grad_when_params_have_one_then_it_is_dropped(facts_of_gathered: dict[str, Facts]) -> None:
    assert facts_of_gathered["parts"]["grads dropped"] is True


def test_clip_grad_norm_when_called_then_it_returns_the_norm_and_scales_the_grads(
    facts_of_gathered: dict[str, Facts],
) -> None:
    found = facts_of_gathered["parts"]
    # Of fp16 grads, each rounded after it is scaled: half a step is 2**-11 of it.
    assert found["norm once clipped"] == pytest.approx(0.25, rel=2.0**-11)
    for norm, _ in found["plain"]:
        assert found["norm"] == pytest.approx(norm, rel=1e-6)
    assert found["step"] == (True, None, None)


def test_count_zeros_when_called_then_they_are_those_of_the_plain_optimizer(
    ranks_of_gathered: list[dict[str, Facts]],
) -> None:
    wanted = next(facts["parts"]["plain"] for facts in ranks_of_gathered if facts["parts"]["plain"])[0][1]
    assert wanted > 100
    assert [facts["parts"]["zeros"] for facts in ranks_of_gathered] == [wanted, wanted]


def test_params_when_stepped_then_they_are_new_in_the_own_shard_until_they_are_gathered(
    facts_of_gathered: dict[str, Facts],
) -> None:
    found = facts_of_gathered["parts"]
    assert found["changed before the gather"] and found["changed"] and found["params alike"]


@pytest.mark.parametrize("model", ["bf16", "mixed", "fp32"])
def test_reload_model_params_when_the_model_was_changed_then_the_next_step_goes_on_from_there(
    facts: dict[str, Facts], model: str
) -> None:
    assert facts["reloading"][model] is True


@pytest.mark.parametrize("model", ["bf16", "mixed", "fp32"])
def test_reload_model_params_when_nothing_was_changed_then_the_main_params_keep_their_precision(
    facts: dict[str, Facts], model: str
) -> None:
    """One child of the fork calls it after every resume, which cost its own optimizers what bf16 cannot hold."""
    assert facts["reloading"][f"{model} kept"] is True


@pytest.mark.parametrize("model", ["bf16", "mixed", "narrow"])
def test_range_map_when_asked_for_every_param_then_it_is_the_forks(facts: dict[str, Facts], model: str) -> None:
    ours, theirs = facts["ranges"][f"{model} ours"], facts["ranges"][f"{model} host"]
    assert ours == theirs
    assert None in ours.values(), "a param has to lie wholly on the other rank"


def test_param_groups_when_read_then_they_have_the_forks_keys(facts_of_gathered: dict[str, Facts]) -> None:
    found = facts_of_gathered["param_groups"]
    assert found["groups"] == [
        {"name": "wd_no_scale_lr", "wd_mult": 1.0, "lr_mult": 1.0},
        {"name": "no_wd_no_scale_lr", "wd_mult": 0.0, "lr_mult": 1.0},
    ]
    assert found["keys"] == [True, True]


def test_lr_when_written_into_a_group_then_the_next_step_uses_it(facts_of_gathered: dict[str, Facts]) -> None:
    found = facts_of_gathered["param_groups"]
    # First none moves, then vectors alone, then whatever the fork's scheduler says.
    assert found["moved"] == [[], [1], [1, 2]]
    assert found["vectors"] > 10
    # lr 1e-2 falls in a straight line over four iterations, and the fork's scheduler overwrites what was written.
    assert found["lr 0"] == [1e-2, 1e-2]
    assert found["lr 2"] == pytest.approx([5e-3, 5e-3])


def test_state_when_read_by_the_params_of_the_groups_then_it_is_live(facts_of_gathered: dict[str, Facts]) -> None:
    assert facts_of_gathered["param_groups"]["state"] is True


def test_optimizer_states_when_logged_then_they_are_the_forks(facts_of_gathered: dict[str, Facts]) -> None:
    ours, theirs = facts_of_gathered["optimizer_states"]["ours"], facts_of_gathered["optimizer_states"]["host"]
    assert len(ours) == 2
    for mine, their in zip(ours, theirs, strict=True):
        # Norms of flat runs against norms of each param, in fp32.
        assert mine == pytest.approx(their, rel=1e-5)
        assert min(mine.values()) > 0


PARAM_BYTES = {"bf16": 2, "fp32": 4, "mixed": 2}


@pytest.mark.parametrize("model", PARAM_BYTES)
def test_params_when_sharded_then_they_are_views_of_one_buffer_a_dtype(
    facts_of_gathered: dict[str, Facts], model: str
) -> None:
    found = facts_of_gathered["memory"][model]
    majority = "torch.float32" if model == "fp32" else "torch.bfloat16"
    assert found["params"][majority] == [NUMEL * PARAM_BYTES[model]]
    assert found["views in order"]
    # Ten norm vectors keep memory of their own, see buffers/compact.py.
    assert model != "mixed" or found["params"]["torch.float32"] == [NUMEL_OF_NORMS * 4 // 10] * 10


@pytest.mark.parametrize("model", PARAM_BYTES)
def test_grads_when_sharded_then_they_stay_in_the_forks_buffer(facts_of_gathered: dict[str, Facts], model: str) -> None:
    found = facts_of_gathered["memory"][model]
    assert found["grad"] == NUMEL * 4
    assert found["grad stays"] and found["main grads"] and found["runs"]


#: Param buffer, main params of half the model where they are of that size, and grad buffer, in bytes.
LARGE = {
    "bf16": [NUMEL * 2, NUMEL // 2 * 4, NUMEL * 4],
    "fp32": [NUMEL * 4, NUMEL * 4],
    "mixed": [NUMEL * 2, NUMEL * 4],
}


@pytest.mark.parametrize("model", LARGE)
def test_memory_when_trained_then_one_param_buffer_and_one_grad_buffer_are_as_large_as_the_model(
    facts_of_gathered: dict[str, Facts], model: str
) -> None:
    assert facts_of_gathered["memory"][model]["large"] == LARGE[model]


@pytest.mark.parametrize("model", LARGE)
def test_memory_when_the_optimizer_is_gone_then_it_is_free(facts_of_gathered: dict[str, Facts], model: str) -> None:
    assert facts_of_gathered["memory"][model]["large afterwards"] == []


def test_memory_when_trained_then_main_params_and_moments_are_those_of_the_own_shard(
    ranks_of_gathered: list[dict[str, Facts]],
) -> None:
    main = {model: [facts["memory"][model]["main"] for facts in ranks_of_gathered] for model in PARAM_BYTES}
    assert main["fp32"] == [0, 0], "an fp32 param is its own main param"
    assert main["bf16"] == [NUMEL // 2 * 4] * 2
    assert sum(main["mixed"]) == (NUMEL - NUMEL_OF_NORMS) * 4
    for model in PARAM_BYTES:
        assert [facts["memory"][model]["moments"] for facts in ranks_of_gathered] == [NUMEL // 2 * 8] * 2


def test_installation_when_undone_then_the_fork_is_as_before_and_can_be_installed_again(
    facts: dict[str, Facts],
) -> None:
    found = facts["installation"]
    assert found["left behind"] == found["left behind then"] == []
    assert "megatron.training.get_megatron_optimizer" in found["while installed"]
    assert "megatron.initialize.parse_args" in found["while installed"]
    assert found["installed twice"]
    assert found["same curve"] and found["same params"]
    ours = "megatron_distopt.hosts.megatron_2023.optimizer"
    assert found["classes"] == [ours, ours, "megatron.optimizer.distrib_optimizer"]


def test_optimizer_when_flag_or_variable_say_no_then_it_is_the_forks(facts_of_gathered: dict[str, Facts]) -> None:
    assert facts_of_gathered["without_us"] == {
        "without the flag": "megatron.optimizer.optimizer.Float16OptimizerWithFloat16Params",
        "switched off": "megatron.optimizer.distrib_optimizer.DistributedOptimizer",
    }
