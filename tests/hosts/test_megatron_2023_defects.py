"""What the distributed optimizers of 2023 do wrong: theirs still does, ours does not.

The small fork of mini_fork has the defects of the real ones; its README.md lists them. Those of its checkpoints are
the subject of test_megatron_2023_checkpoints. Each function provokes one defect and says in its docstring what the
original does; it gives what was found of the fork's own optimizer ("host") and of ours, and what that has to be.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.fork_worlds import distance, raised, same
from tests.support.mini_fork import InstalledFork, MiniFork, core_folder
from tests.support.spawn import run_ranks

#: (what, found, wanted).
Facts = Iterator[tuple[str, Any, Any]]
DISTRIBUTED = "--use-distributed-optimizer"
BF16 = ("--bf16", DISTRIBUTED)
SHORT = ("--train-iters", "2")
#: For comparison to the last bit with torch's for-loop Adam.
PLAIN = ("--clip-grad", "1e9", "--weight-decay", "0.1")
EXACT = (*PLAIN, "--distopt-adam", "torch_foreach")
WHO = {"ours": True, "host": False}
NOTHING = ("nothing", "")


def _alike_on_all_ranks(tensors: list[Tensor]) -> bool:
    whole = torch.cat([tensor.detach().float().flatten() for tensor in tensors])
    first = whole.clone()
    dist.broadcast(first, src=0)
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, torch.equal(whole, first))
    return all(answers)


@contextlib.contextmanager
def _adam(kind: type) -> Iterator[None]:
    """The fork's `Adam`, in both modules that have it by value."""
    from megatron import optimizer
    from megatron.optimizer import distrib_optimizer

    with mock.patch.object(optimizer, "Adam", kind), mock.patch.object(distrib_optimizer, "Adam", kind):
        yield


def rounded_norms(fork: MiniFork) -> Facts:
    """The original takes the whole buffer for `params_dtype`, so that fp32 norms are bf16 values after every step."""
    words = ("--bf16", "--fp32-norms", *SHORT, *PLAIN)
    plain = fork.train(*words, ours=False)
    runs = {"plain": plain, **{who: fork.train(*words, DISTRIBUTED, ours=ours) for who, ours in WHO.items()}}
    weights = {who: run.params["language_model.encoder.final_layernorm.weight"] for who, run in runs.items()}
    for who, weight in weights.items():
        yield f"fp32 norms are rounded, {who}", torch.equal(weight, weight.bfloat16().float()), who == "host"
    apart = {who: float((weight - weights["plain"]).abs().max()) for who, weight in weights.items()}
    # An ulp or two of fp32 near 1 against half a step of bf16.
    yield "fp32 norms are the plain optimizer's", (apart["ours"] <= 3e-7, apart["host"] <= 1e-3), (True, False)


def decay_off_cuda(fork: MiniFork) -> Facts:
    """The original has apex's decoupled decay on CUDA, and off it torch.optim.Adam, which adds it to the gradient."""
    with _adam(torch.optim.AdamW):
        decoupled = fork.train(*PLAIN, ours=False)
    with _adam(torch.optim.Adam):
        l2 = fork.train(*PLAIN, ours=False)
        theirs = fork.train(*PLAIN, DISTRIBUTED, ours=False)
        ours = fork.train(*EXACT, DISTRIBUTED)
        as_theirs = fork.train(*EXACT, DISTRIBUTED, "--distopt-decay", "l2")
    yield "decay off CUDA differs", distance(l2, decoupled) > 1e-3, True
    yield "decay off CUDA is l2, host", same(theirs.params, l2.params), True
    yield "decay off CUDA is decoupled, ours", same(ours.params, decoupled.params), True
    yield "decay off CUDA is l2 where asked, ours", same(as_theirs.params, l2.params), True


def cuda_names(fork: MiniFork) -> Facts:
    """The original compares `param.type()` with torch.cuda.*Tensor, and its refusal uses a name that it has not.

    The fork is as without MINI_FORK_NATIVE=1.
    """
    from megatron.optimizer import device, distrib_optimizer, optimizer

    names = {"FLOAT": "torch.cuda.FloatTensor", "HALVES": ("torch.cuda.HalfTensor", "torch.cuda.BFloat16Tensor")}
    trainings = {"fp32": (DISTRIBUTED,), "bf16": BF16}
    with (
        mock.patch.object(device, "NATIVE", False),
        mock.patch.multiple(distrib_optimizer, **names),
        mock.patch.multiple(optimizer, **names),
    ):
        for who, ours in reversed(WHO.items()):
            for name, words in trainings.items():
                found = raised(lambda: fork.train(*words, *SHORT, ours=ours))  # noqa: B023 - called at once
                wanted = NOTHING if ours else ("NameError", "name 'param' is not defined")
                yield f"{name} without CUDA, {who}", found, wanted


def storage_calls(fork: MiniFork) -> Facts:
    """The original makes its param buffers from a typed storage, by a name that is deprecated in torch or gone.

    It also asks views of params for their grad. For ours, every warning of any kind in the whole run is an error. The
    fork's type names are mended, its storage calls are not. Ours comes first: torch says once in a process what it
    says about storages.
    """
    from megatron.optimizer import device

    with mock.patch.object(device, "NATIVE", False):
        for name, words in {"fp32": (DISTRIBUTED,), "mixed": (*BF16, "--fp32-norms")}.items():
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found = raised(lambda: fork.train(*words, *SHORT))  # noqa: B023 - called at once
                yield f"warnings of a {name} run, ours", found, NOTHING
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fork.train(DISTRIBUTED, "--train-iters", "1", ours=False)
            texts = [str(each.message) for each in caught]
    complaints = ("TypedStorage is deprecated", "The .grad attribute of a Tensor that is not a leaf")
    heard = [any(text.startswith(each) for text in texts) for each in complaints]
    yield "buffers need what torch deprecates, host", heard, [True, True]


def nan_in_bf16(fork: MiniFork) -> Facts:
    """The original looks for inf and nan only where it has a loss scale: a bf16 run trains on with a model of nan.

    With --distopt-nonfinite skip the schedule waits, as for a step that fp16 skips.
    """
    words = (*BF16, "--nan-at", "2", "0")
    theirs = fork.train(*words, *SHORT, ours=False)
    skipping = fork.train(*words, "--distopt-nonfinite", "skip")
    for who, run in {"host": theirs, "skipping": skipping}.items():
        is_finite = all(bool(param.isfinite().all()) for param in run.params.values())
        yield f"params are finite after a nan, {who}", is_finite, who == "skipping"
    yield "steps are skipped for a nan, host", any(each.skipped for each in theirs.iterations), False
    # The word embeddings lie last in the buffer, which rank 1 owns, whoever had the nan.
    for rank, at in enumerate((("2", "0"), ("1", "1"))):
        kind, text = raised(lambda: fork.train(*BF16, "--nan-at", *at))  # noqa: B023 - called at once
        named = all(part in text for part in ("rank 1", "language_model.embedding.word_embeddings.weight"))
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

    modules = {name: ModuleType(name) for name in ("deepspeed", "deepspeed.ops", "deepspeed.ops.adam")}
    modules["deepspeed"].__spec__ = ModuleSpec("deepspeed", None)
    modules["deepspeed.accelerator"] = accelerator = ModuleType("deepspeed.accelerator")
    accelerator.get_accelerator = lambda: mock.Mock(spec_set=["device_name"], device_name=lambda: "cpu")  # type: ignore[attr-defined]
    modules["deepspeed.ops.adam"].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, modules), mock.patch.object(optimizer, "Adam", optimizer.Adam):
        yield


def other_inner_optimizers(fork: MiniFork) -> Facts:
    """The original asks isinstance(optimizer, Adam), and --ds-fused-adam rebinds `Adam` in another module.

    For --cpu-torch-adam it uses `torch` in a module that does not import it. With a gathered file it knows Adam alone,
    because its file has two moments by name.
    """
    from megatron import optimizer as host

    sgd = ("--optimizer", "sgd", "--lr", "0.1")
    not_adam = "{} is not Adam, whose state the checkpoint has"
    runs = {}
    for name, words, of_host, of_ours in (
        ("ds", ("--ds-fused-adam",), ("AssertionError", not_adam.format("FusedAdam")), ("FusedAdam", "deepspeed")),
        (
            "cpu torch",
            ("--cpu-optimizer", "--cpu-torch-adam"),
            ("NameError", "name 'torch' is not defined"),
            ("AdamW", "torch_fused"),
        ),
        ("sgd", sgd, ("AssertionError", not_adam.format("SGD")), ("SGD", "torch_sgd")),
    ):
        with _deepspeed():
            found = raised(lambda: fork.train(DISTRIBUTED, *words, ours=False))  # noqa: B023 - called at once
            yield f"{name} is built, host", found, of_host
            runs[name] = fork.train(DISTRIBUTED, *words)
        chosen = runs[name].optimizer.sharded.plan.choice.name
        yield f"{name} is built, ours", (type(runs[name].optimizer.optimizer).__name__, chosen), of_ours
    with _deepspeed():
        named = fork.train(DISTRIBUTED, "--ds-fused-adam", "--distopt-adam", "torch_foreach")
    yield "ds is built but for what is named", named.optimizer.sharded.plan.choice.name, "torch_foreach"
    plain = {"sgd": fork.train(*sgd, ours=False)}  # the package is taken out for it
    yield "torch is left behind in the fork's module", hasattr(host, "torch"), False
    with _adam(torch.optim.AdamW):
        plain["ds"] = plain["cpu torch"] = fork.train(ours=False)
    # The stand-in is torch's AdamW; the fork sums the squares of the norm in another order, and the gradients that are
    # zero but for rounding become full steps of lr = 1e-2 at each of four iterations. Against the fork's plain SGD: the
    # clipping factor is an ulp off, of updates of at most 0.1 and params near 1.
    for name, tolerance in {"ds": 4e-2, "cpu torch": 4e-2, "sgd": 1e-6}.items():
        yield f"{name} trains as the plain one", distance(runs[name], plain[name]) <= tolerance, True


def unfrozen_after_wrapping(fork: MiniFork) -> Facts:
    """The original drops params without a place in a grad buffer from its groups: they never train, silently.

    That ours refuses is tested in test_megatron_2023_refusals.
    """
    name = "language_model.embedding.position_embeddings.weight"
    get_model, before = fork.training.get_model, []

    def unfreeze(*args: Any, **kwargs: Any) -> Any:
        model = get_model(*args, **kwargs)
        for param_name, param in model[0].named_parameters():
            if param_name.endswith(name):
                before.append(param.detach().clone())
                param.requires_grad_(True)
        return model

    with mock.patch.object(fork.training, "get_model", unfreeze):
        theirs = fork.train(*BF16, "--frozen-param", ours=False)
    yield "a param that was unfrozen stays, host", torch.equal(theirs.params[name], before[0]), True


def experts(fork: MiniFork) -> Facts:
    """The original averages experts over all data-parallel ranks and gathers them from pieces of different ones.

    That ours are also the right ones is tested in test_megatron_2023_numerics.
    """
    words = (*BF16, *SHORT, "--experts", "--expert-model-parallel-size", str(dist.get_world_size()))
    for who, ours in reversed(WHO.items()):
        params = fork.train(*words, ours=ours).params
        for kind in ("expert", "dense"):
            tensors = [param for name, param in params.items() if ("expert" in name) is (kind == "expert")]
            wanted = kind == "dense" or who == "host"
            yield f"{kind} params are alike on all ranks, {who}", _alike_on_all_ranks(tensors), wanted


def ulysses(fork: MiniFork) -> Facts:
    """The original does not know --ds-sequence-parallel-size: ranks with other parts of a sequence drift apart."""
    words = (*BF16, *SHORT, "--ds-sequence-parallel-size", str(dist.get_world_size()))
    for who, ours in reversed(WHO.items()):
        params = fork.train(*words, ours=ours).params
        yield f"sequence-parallel ranks keep one model, {who}", _alike_on_all_ranks(list(params.values())), ours


def fp16_overflow(fork: MiniFork) -> Facts:
    """No defect: the original divides fp16 gradients before it adds them up, and ours does for fp16 alone.

    A sum of two overflows at half the loss scale of an average.
    """
    words = ("--fp16", "--initial-loss-scale", str(2.0**22), "--hysteresis", "1", "--loss-scale-window", "4")
    words = (*words, "--train-iters", "20")
    plain = fork.train(*words, ours=False)
    runs = [plain, *(fork.train(*words, DISTRIBUTED, ours=ours) for ours in (False, True))]
    logged = [[(each.skipped, each.loss_scale) for each in run.iterations] for run in runs]
    yield "fp16 overflows at the scales of the original", logged[0] == logged[1] == logged[2], True
    if dist.get_rank() == 0:  # the rank that logs
        skips = [skipped for skipped, _ in logged[2]]
        assert skips[0] and skips.count(False) >= 8
        assert any(skipped and not before for before, skipped in pairwise(skips)), "and grows too far"


def changed_before_the_first_step(fork: MiniFork) -> Facts:
    """A tool writes the params after the optimizer is built: the original overwrites them with its main params.

    One step with a learning rate of 0 follows.
    """

    def loop(forward_step: Any, model: Any, optimizer: Any, scheduler: Any, iterator: Any) -> list[Any]:
        with torch.no_grad():
            for param in model[0].parameters():
                param.fill_(0.5)
        fork.training.train_step(forward_step, iterator, model, optimizer, scheduler)
        return []

    with mock.patch.object(fork.training, "train", loop):
        for who, ours in WHO.items():
            params = fork.train(*BF16, "--fp32-norms", "--lr", "0", ours=ours).params.values()
            kept = [bool((param == 0.5).all()) for param in params if param.dtype is torch.bfloat16]
            yield f"params that were changed before the first step stay, {who}", (all(kept), any(kept)), (ours, ours)


def fine_tuning(fork: MiniFork, folder: Path) -> Facts:
    """The original with per-rank files reloads its main params in fp16 alone: a bf16 run goes on from random ones.

    In fp16 it calls `reload_model_params`, whose second half it never got. Weights are of a run with another seed; the
    first step with a learning rate of 0 changes nothing.
    """
    saved = fork.train(*BF16, "--seed", "1", "--save", str(folder), *SHORT)
    load = ("--seed", "2", "--load", str(folder), "--lr", "0")
    for name, words in {
        "finetune": ("--finetune", "--train-iters", "1"),
        "no-load-optim": ("--no-load-optim", "--train-iters", "3"),
    }.items():
        for who, ours in WHO.items():
            run = fork.train(*BF16, *load, *words, ours=ours)
            yield f"--{name} starts from the weights, {who}", same(run.params, saved.params), ours
    half = ("--fp16", DISTRIBUTED, "--loss-scale", "64")
    saved = fork.train(*half, "--seed", "1", "--save", str(folder / "fp16"), *SHORT)
    load = (*half, "--seed", "2", "--load", str(folder / "fp16"), "--lr", "0", "--finetune", "--train-iters", "1")
    kind, text = raised(lambda: fork.train(*load, ours=False))
    wanted = ("AttributeError", True)
    yield "--finetune in fp16, host", (kind, "_copy_model_params_to_main_params" in text), wanted
    yield "--finetune in fp16 starts from the weights, ours", same(fork.train(*load).params, saved.params), True


def empty_groups(fork: MiniFork) -> Facts:
    """The original drops such groups from per-rank files: a group's number means other things on other ranks.

    The word embeddings of this model fill some ranks' shards.
    """
    words = (*BF16, "--vocab-size", "2048", "--num-layers", "1", *SHORT)
    for who, ours in WHO.items():
        groups = fork.train(*words, ours=ours).optimizer.param_groups
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, [(group["name"], len(group["params"]), group["lr"]) for group in groups])
        names = [[name for name, _, _ in of_rank] for of_rank in by_rank]
        alike = names == [["wd_no_scale_lr", "no_wd_no_scale_lr"]] * 4
        yield f"ranks have groups of the same names, {who}", alike, ours
        if ours:
            is_empty = any(count == 0 for of_rank in by_rank for _, count, _ in of_rank)
            yield "a group is empty somewhere, ours", is_empty, True
            yield "learning rates, which the scheduler writes, ours", len({g[2] for each in by_rank for g in each}), 1


def a_rank_with_nothing(fork: MiniFork) -> Facts:
    """The original with per-rank files has no group there, and the log asks for the lr of the first.

    Six elements train, of which the last of four ranks owns none. The fork's own is only built: it would hang.
    """
    provide, is_last = fork.script.model_provider, dist.get_rank() == dist.get_world_size() - 1
    bias = "language_model.encoder.layers.0.self_attention.key_value.bias"

    def tiny(*args: Any, **kwargs: Any) -> Any:
        model = provide(*args, **kwargs)
        for name, param in model.named_parameters():
            param.requires_grad_(name == bias)
        return model

    words = (*BF16, "--hidden-size", "12", "--num-layers", "1", "--multi-query")
    found = []

    def loop(forward_step: Any, model: Any, optimizer: Any, scheduler: Any, iterator: Any) -> list[Any]:
        found.append(raised(lambda: optimizer.param_groups[0]))
        return []

    with mock.patch.object(fork.script, "model_provider", tiny):
        with mock.patch.object(fork.training, "train", loop):
            fork.train(*words, ours=False)
        run = fork.train(*words)
    no_group = ("IndexError", "list index out of range")
    yield "a rank with nothing has no group, host", found[0], no_group if is_last else NOTHING
    groups = [(group["name"], len(group["params"])) for group in run.optimizer.param_groups]
    yield "a rank with nothing has an empty group, ours", groups, [("no_wd_no_scale_lr", 0 if is_last else 1)]
    trained = run.params[bias]
    yield "a rank with nothing trains along, ours", bool(trained.any()) and _alike_on_all_ranks([trained]), True


#: `storage_calls` first: a process shows some warnings once.
COLLECTORS: dict[str, tuple[Callable[[MiniFork], Facts], ...]] = {
    "gathered": (
        storage_calls,
        cuda_names,
        changed_before_the_first_step,
        rounded_norms,
        decay_off_cuda,
        nan_in_bf16,
        other_inner_optimizers,
        unfrozen_after_wrapping,
        experts,
        ulysses,
        fp16_overflow,
    ),
    "per_rank": (empty_groups, a_rank_with_nothing),
}

#: With per-rank files four: on fewer, every rank owns something of everything.
RANKS = {"gathered": 2, "per_rank": 4}
Wrong = dict[str, dict[str, tuple[Any, Any]]]


def _collect(rank: int, size: int, file_layout: str, folder: Path) -> Wrong:
    """By function, what is found of each fact that is not as it has to be, and what was wanted."""
    fork = InstalledFork.imported(file_layout=file_layout)
    with contextlib.redirect_stdout(io.StringIO()):
        facts = {each.__name__: list(each(fork)) for each in COLLECTORS[file_layout]}
        if file_layout == "per_rank":
            facts["fine_tuning"] = list(fine_tuning(fork, folder))
    return {
        name: {what: (found, wanted) for what, found, wanted in each if found != wanted}
        for name, each in facts.items()
        if each
    }


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> list[Wrong]:
    core_folder()
    return run_ranks(_collect, RANKS["gathered"], "gathered", tmp_path_factory.mktemp("gathered"), seconds=240)


@pytest.fixture(scope="module")
def per_rank(tmp_path_factory: pytest.TempPathFactory) -> list[Wrong]:
    core_folder()
    return run_ranks(_collect, RANKS["per_rank"], "per_rank", tmp_path_factory.mktemp("per_rank"), seconds=240)


@pytest.mark.parametrize(
    ("file_layout", "name"),
    [(file_layout, each.__name__) for file_layout, collectors in COLLECTORS.items() for each in collectors]
    + [("per_rank", "fine_tuning")],
)
def test_defect_when_the_original_has_it_then_ours_has_not(
    file_layout: str, name: str, request: pytest.FixtureRequest
) -> None:
    assert [wrong[name] for wrong in request.getfixturevalue(file_layout)] == [{}] * RANKS[file_layout]
