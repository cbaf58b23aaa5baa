"""Training on megatron-core, saved at one layout and resumed at another, by our own calls and by the host's.

One spawn of four ranks does all of it, see `_collect`; the last pair takes place in a world of the first three. What a
load gives back is compared bit for bit with the tensors of the whole model that `save` wrote at the same moment.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt.checkpoint.source import Source, open_checkpoint
from megatron_distopt.checkpoint.whole_model import WholeModel, owned_pieces
from megatron_distopt.layout import Span
from tests.support.cases import Case, Step
from tests.support.core_version import core_mentions
from tests.support.refusals import assert_mentions
from tests.support.spawn import forget_groups, run_ranks

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not core_mentions("dist_checkpointing/mapping.py", "if self.axis_fragmentations is not None:"),
        reason="dist_checkpointing of this megatron-core takes shards of a regular grid only; see "
        "test_megatron_core_folders.py",
    ),
    pytest.mark.skipif(
        core_mentions("dist_checkpointing/mapping.py", "np.product") and not hasattr(numpy, "product"),
        reason="dist_checkpointing of this megatron-core calls np.product, which numpy 2 does not have",
    ),
]

RANKS, STEPS, MORE_STEPS = 4, 2, 2
LR_AT_SAVE, SKIPPED_AT_SAVE = 2e-3, 5


@dataclasses.dataclass(frozen=True)
class Run(Case):
    """A training of which the same can be had at other layouts. Clips nothing by default."""

    clip_grad: float = 0.0
    depth: int = 2  # layers, whatever the layout
    of_options: tuple[tuple[str, str], ...] = ()  # variables of ours without their prefix
    vocabulary: int = 128  # rows of the embedding
    begun: bool = True  # whether it makes steps before it is saved
    #: Sizes of the expert-parallel group and of the tensor-parallel group of each expert, for four experts with biases;
    #: they do not train on a CPU, where the host has no dispatcher for their tokens.
    experts: tuple[int, int] | None = None

    @property
    def layers(self) -> int:
        return self.depth

    def at(self, *, dp: int = 1, tp: int = 1, pp: int = 1, vp: int = 1, batch: int = 4, **changes: Any) -> Run:
        """The same training at another layout: the same global batch."""
        layout = {"dp": dp, "tp": tp, "pp": pp, "vp": vp, "num_microbatches": batch // dp}
        return dataclasses.replace(self, **layout, **changes)


FP32 = Run("distopt")
BF16 = Run("distopt", precision="bf16")
#: fp32 norms in a 16-bit model: two buffers, and main params that are model params. Not with virtual stages, where the
#: host gathers both in one coalesced call: gloo writes one of two dtypes wrongly (seen with torch 2.13).
MIXED = BF16.of(fp32_norms=True)
DEEP = BF16.of(depth=4)
#: The loss scale doubles after the third step, which is the first one after the save.
FP16 = Run("distopt", precision="fp16", loss_scale_window=3)
SGD = FP32.of(optimizer_name="sgd", lr=0.1)
#: A class that is named by the user: what it keeps for each element is found out.
RMSPROP = FP32.of(of_options=(("OPTIMIZER", "torch.optim:RMSprop"),), lr=1e-3)
EXPERTS = MIXED.of(begun=False)
OVERLAPPED: dict[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 3000}
TWO_OPTIMIZERS = {**OVERLAPPED, "overlap_param_gather_with_step": True}
FOR_EACH: dict[str, Any] = {"of_options": (("ADAM", "torch_foreach"),)}

#: Trainings that are saved.
SAVED: dict[str, Run] = {
    "tp2 dp2": FP32.at(tp=2, dp=2),
    "mixed tp2 pp2": MIXED.at(tp=2, pp=2),
    "mixed gated tp2 dp2": MIXED.at(tp=2, dp=2, gated=True),
    "deep tp2 pp2": DEEP.at(tp=2, pp=2),
    "deep untied dp4": DEEP.at(dp=4, tied=False, **OVERLAPPED),
    "deep two optimizers": DEEP.at(pp=2, vp=2, dp=2, tied=False, **TWO_OPTIMIZERS),
    "fp16 tp2 dp2": FP16.at(tp=2, dp=2),
    "sgd tp2 dp2": SGD.at(tp=2, dp=2),
    "rmsprop dp4": RMSPROP.at(dp=4),
    "not begun": FP32.at(dp=4, begun=False),
    "dp4": FP32.at(dp=4, batch=12),
    "experts ep2": EXPERTS.at(tp=2, dp=2, experts=(2, 1)),
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """A training that was saved and how it goes on."""

    saved: str  # name in `SAVED`
    run: Run  # resumes
    ways: tuple[str, ...]  # "own" for our `load`, "host" for the host's `dist_checkpointing`
    #: Of the losses, absolute; 0.0 where all arithmetic is the same. None: it is another model, or cannot train on a
    #: CPU, and makes no steps.
    tolerance: float | None


# Sums over another number of ranks, added up in another order: an ulp of fp32, 5e-7 of a loss of 4, at each step.
IN_FP32 = 2e-6
# Tensor-parallel ranks round their partial sums to 16 bits, 2**-9 of each, so that even the first forward pass, of
# equal params, differs; the mean over 128 tokens averages most of that. bf16 instead of fp32 norms do the same.
IN_16_BITS = 1e-3

PAIRS: dict[str, Pair] = {
    # What two ranks add is the same in either order, and nothing is clipped, whose norm is summed shard by shard.
    "same arithmetic": Pair("tp2 dp2", FP32.at(tp=2, dp=2, **OVERLAPPED), ("own", "host"), 0.0),
    "same layout": Pair("deep untied dp4", SAVED["deep untied dp4"], ("host",), 0.0),
    "pp to dp, overlapped, for-each": Pair(
        "mixed tp2 pp2", MIXED.at(dp=4, **OVERLAPPED, **FOR_EACH), ("own", "host"), IN_16_BITS
    ),
    "not to mixed": Pair("deep tp2 pp2", MIXED.at(dp=4, depth=4), ("own",), IN_16_BITS),
    "pp to vp": Pair("deep tp2 pp2", DEEP.at(pp=2, vp=2, dp=2), ("own", "host"), IN_16_BITS),
    "one to two optimizers": Pair(
        "deep untied dp4", DEEP.at(pp=2, vp=2, dp=2, tied=False, **TWO_OPTIMIZERS), ("host",), IN_16_BITS
    ),
    "two optimizers to one": Pair("deep two optimizers", DEEP.at(tp=2, dp=2, tied=False), ("host",), IN_16_BITS),
    "gated tp to dp": Pair("mixed gated tp2 dp2", MIXED.at(dp=4, gated=True), ("host",), IN_16_BITS),
    "fp16 tp to dp": Pair("fp16 tp2 dp2", FP16.at(dp=4), ("own", "host"), IN_16_BITS),
    "sgd tp to dp": Pair("sgd tp2 dp2", SGD.at(dp=4), ("host",), IN_FP32),
    "rmsprop dp to tp": Pair("rmsprop dp4", RMSPROP.at(tp=2, pp=2), ("host",), IN_FP32),
    "larger vocabulary": Pair("dp4", FP32.at(tp=2, dp=2, batch=12, vocabulary=136), ("own", "host"), None),
    "not begun": Pair("not begun", FP32.at(tp=2, dp=2), ("host",), IN_FP32),
    "experts ep 2 to tp 2": Pair("experts ep2", EXPERTS.at(tp=2, dp=2, experts=(1, 2)), ("own", "host"), None),
    "experts ep 2 to all ranks": Pair("experts ep2", EXPERTS.at(tp=2, dp=2, experts=(1, 1)), ("own", "host"), None),
    "dp 4 to 3": Pair("dp4", FP32.at(dp=3, batch=12), ("own", "host"), IN_FP32),
}
WAYS = [(name, way) for name, pair in PAIRS.items() for way in pair.ways]
#: Trainings that are loaded into the run that went on, as well.
ROLLED_BACK = ("tp2 dp2", "deep two optimizers")


# In the ranks.


@dataclasses.dataclass(frozen=True)
class Head:
    """What is no tensor. Of several optimizers what all of them have."""

    lr: float
    updates: int | None
    loss_scale: float
    skipped: int


@dataclasses.dataclass(frozen=True)
class Saved:
    """What one rank had at the save, and in the steps after it."""

    losses: list[float]
    scales: list[float]  # loss scales
    head: Head  # at the save
    differs: list[str]  # keys of boxes that `save` wrote otherwise than this rank has them
    again: dict[str, list[float]]  # by way, the losses of the same steps after the run was rolled back to the save


@dataclasses.dataclass(frozen=True)
class Resumed:
    """What one rank found after the load."""

    kinds: set[str]  # of the tensors that it holds
    differs: list[str]  # keys of boxes of the state that are not what was saved
    model_differs: list[str]  # params that the host's checkpoint of the model gave otherwise
    params_differ: list[str]  # params that are not what the saved state rounds to
    head: Head
    losses: list[float]  # of the steps after the load
    scales: list[float]


class _Bench:
    """The trainings of one rank, and the host, which is imported in the ranks alone."""

    def __init__(self, rank: int, folder: str) -> None:
        from tests.support import gpt

        self.gpt, self.rank, self.folder = gpt, rank, Path(folder)
        self.sources: dict[str, Source] = {}
        _let_the_host_write()

    @contextlib.contextmanager
    def training(self, run: Run) -> Iterator[Any]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in run.of_options:
                patch.setenv(f"MEGATRON_DISTOPT_{name}", value)
            patch.setattr(self.gpt, "VOCABULARY", run.vocabulary)
            if run.experts is not None:
                _patch_experts(self.gpt, patch, *run.experts)
            with contextlib.closing(self.gpt.Training(run)) as training:
                yield training

    def save(self, name: str) -> Saved:
        """Collective: in both ways at the same moment; then trains on."""
        folder, run = self.folder / name, SAVED[name]
        with self.training(run) as training:
            for _ in range(STEPS if run.begun else 0):
                training.step()
            _change_head(training)
            training.params()  # gathers them, which the host does before it saves
            training.optimizer.save(folder / "own")
            self.save_by_host(training, folder / "host")
            differs, head = _differing(training, self.source(name)), _head(training)
            steps = [training.step() for _ in range(MORE_STEPS if run.experts is None else 0)]
            ways = ("own", "host") if name in ROLLED_BACK else ()
            again = {way: self.roll_back(training, folder / way) for way in ways}
            return Saved([step.loss for step in steps], _scales(steps), head, differs, again)

    def source(self, name: str) -> Source:
        """What `save` wrote, read once."""
        if name not in self.sources:
            source = open_checkpoint(self.folder / name / "own")
            self.sources[name] = dataclasses.replace(source, read_box=cache(source.read_box))
        return self.sources[name]

    def roll_back(self, training: Any, folder: Path) -> list[float]:
        """Collective: loads the state of the optimizer into the run that went on, and repeats the steps."""
        if folder.name == "own":
            training.optimizer.load(folder)
        else:
            training.optimizer.load_state_dict(self.read_by_host(training, folder)["optimizer"])
        training.steps_taken = STEPS
        return [training.step().loss for _ in range(MORE_STEPS)]

    def resume(self, pair: Pair, way: str) -> Resumed:
        """Collective: loads in one of the ways and trains on."""
        folder, source = self.folder / pair.saved / way, self.source(pair.saved)
        with self.training(pair.run) as training:
            model_differs: list[str] = []
            if way == "own":
                training.optimizer.load(folder)
            else:
                state = self.read_by_host(training, folder)
                self.load_model(training, state)
                model_differs = _params_that_differ(training, source)
                training.optimizer.load_state_dict(state["optimizer"])
            kinds = {key.partition("/")[0] for p in owned_pieces(_model_of(training)) for key, _ in p.tensors()}
            differs, params = _differing(training, source), _params_that_differ(training, source)
            head = _head(training)
            self.begin_at(training, STEPS if SAVED[pair.saved].begun else 0)
            steps = [training.step() for _ in range(0 if pair.tolerance is None else MORE_STEPS)]
            losses = [step.loss for step in steps]
            return Resumed(kinds, differs, model_differs, params, head, losses, _scales(steps))

    def resume_all(self, size: int) -> dict[tuple[str, str], Resumed]:
        """Collective: those of a world of this size."""
        here = [(name, way) for name, way in WAYS if PAIRS[name].run.ranks == size]
        here.sort(key=lambda pair: _layout(PAIRS[pair[0]].run))
        return {(name, way): self.resume(PAIRS[name], way) for name, way in here}

    def begin_at(self, training: Any, steps: int) -> None:
        """The hooks that gather in forward begin with the second iteration of a run."""
        training.steps_taken = steps
        if training.case.overlap_param_gather and steps:
            for chunk in training.chunks:
                chunk.enable_forward_pre_hook()

    def chunks_by_key(self, training: Any) -> dict[str, Any]:
        """As the host's training loop calls them."""
        from megatron.core.utils import unwrap_model

        chunks = unwrap_model(training.chunks)
        return {"model" if len(chunks) == 1 else f"model{number}": chunk for number, chunk in enumerate(chunks)}

    def state_of_host(self, training: Any, *, is_loading: bool) -> dict[str, Any]:
        """Collective: as the host's training loop puts it together."""
        state = {key: chunk.sharded_state_dict() for key, chunk in self.chunks_by_key(training).items()}
        metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
        state["optimizer"] = training.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        return {"iteration": STEPS, **state}

    def save_by_host(self, training: Any, folder: Path) -> None:
        """Collective: with the wrapper that the host's training loop uses unless it is told not to."""
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

        if self.rank == 0:
            folder.mkdir()
        dist.barrier()
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group)
        dist_checkpointing.save(self.state_of_host(training, is_loading=False), str(folder), strategy)

    def read_by_host(self, training: Any, folder: Path) -> dict[str, Any]:
        """Collective."""
        from megatron.core import dist_checkpointing

        state = self.state_of_host(training, is_loading=True)
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder))
        return loaded

    def read_optimizer_alone(self, training: Any, folder: Path) -> None:
        """Collective: what the host reads of the model it writes into the params at once."""
        from megatron.core import dist_checkpointing

        state = {"optimizer": training.optimizer.sharded_state_dict({}, is_loading=True)}
        dist_checkpointing.load(state, str(folder))

    def load_model(self, training: Any, state: Mapping[str, Any]) -> None:
        for key, chunk in self.chunks_by_key(training).items():
            chunk.load_state_dict(state[key])

    def enters_world_of(self, size: int) -> bool:
        """Collective: whether this rank is one of the first `size`, which are all that there are from here on."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        is_in = self.rank < size
        members, rank = (size, self.rank) if is_in else (1, 0)  # a process group is taken down at the end, so have one
        os.environ.update(WORLD_SIZE=str(members), LOCAL_WORLD_SIZE=str(members), RANK=str(rank), LOCAL_RANK=str(rank))
        store = dist.FileStore(str(self.folder / (f"world of {size}" if is_in else f"rank {self.rank} alone")), members)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=members, timeout=timedelta(seconds=100))
        return is_in


def _let_the_host_write() -> None:
    """Its writer starts processes, which a daemon may not; one of them, for results, is not needed here."""
    import multiprocessing
    import queue

    from megatron.core.dist_checkpointing.strategies import filesystem_async

    multiprocessing.current_process().daemon = False
    filesystem_async._results_queue = queue.Queue()


def _patch_experts(gpt: Any, patch: pytest.MonkeyPatch, ep: int, etp: int) -> None:
    from megatron.core import parallel_state

    transformer_config, layer_spec = gpt.transformer_config, gpt.get_gpt_layer_local_spec

    def config(case: Case) -> Any:
        made = transformer_config(case)
        made.num_moe_experts, made.moe_ffn_hidden_size = 4, made.ffn_hidden_size
        made.expert_model_parallel_size, made.expert_tensor_parallel_size = ep, etp
        return made

    def enter_layout(case: Case) -> None:
        parallel_state.destroy_model_parallel()
        forget_groups()
        sizes = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
        parallel_state.initialize_model_parallel(case.tp, case.pp, **sizes)

    patch.setattr(gpt, "transformer_config", config)
    patch.setattr(gpt, "enter_layout", enter_layout)
    patch.setattr(gpt, "get_gpt_layer_local_spec", lambda: layer_spec(num_experts=4))


def _model_of(training: Any) -> WholeModel:
    from megatron_distopt.hosts.megatron_core.model_parallel import whole_model_of

    return whole_model_of(training.optimizer.chained_optimizers)


def _differing(training: Any, source: Source) -> list[str]:
    """Keys of what this rank owns and the source has otherwise; it may have no such rows of padding."""
    differs = []
    for piece in owned_pieces(_model_of(training)):
        for key, tensor in piece.tensors():
            if not _agree(tensor, source.read(key), piece.piece.in_global.as_slices()):
                differs.append(f"{key} {piece.piece.in_global}")
    return differs


def _agree(box: Tensor, whole: Tensor, slices: tuple[slice, ...]) -> bool:
    """Bit for bit, in the rows that `whole` has."""
    saved = whole[slices]
    return box.dtype == saved.dtype and torch.equal(box[: len(saved)], saved)


def _params_that_differ(training: Any, source: Source) -> list[str]:
    """Names of model params of this rank, owned or not, that are not what the saved main params round to."""
    differs = []
    for optimizer, share in zip(training.optimizer.chained_optimizers, _model_of(training).shares, strict=True):
        for name, placement in share.placements.items():
            param = optimizer.named[name].detach()
            whole = source.read(f"main/{placement.name}").to(param.dtype)
            for piece in placement.pieces(Span(0, param.numel())):
                found = param.flatten()[piece.in_param.as_slice()].view(piece.sizes)[piece.inside.as_slices()]
                if not _agree(found, whole, piece.in_global.as_slices()):
                    differs.append(placement.name)
    return differs


def _head(training: Any) -> Head:
    from megatron_distopt.optimizer.inner import count_updates

    heads = {
        Head(group["lr"], count_updates(each.sharded.inner), float(each.get_loss_scale()), each.sharded.num_skipped)
        for each in training.optimizer.chained_optimizers
        for group in each.param_groups
    }
    (head,) = heads
    return head


def _change_head(training: Any) -> None:
    """To what no run begins with."""
    for group in training.optimizer.param_groups:
        group["lr"] = LR_AT_SAVE
    for each in training.optimizer.chained_optimizers:
        each.sharded.num_skipped = SKIPPED_AT_SAVE


def _held(training: Any) -> dict[str, Any]:
    """Copies of all that a load may change."""
    sharded = [each.sharded for each in training.optimizer.chained_optimizers]
    held = {
        "params": [param.detach() for _, param in training.named_params()],
        "main": [run.main.detach() for each in sharded for run in each.flat_params],
        "state": [dict(each.inner.state.get(run.main, {})) for each in sharded for run in each.flat_params],
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in training.optimizer.param_groups],
        "head": _head(training),
    }
    return copy.deepcopy(held)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(value, right[key]) for key, value in left.items())
    if isinstance(left, list):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right)


def _state_of_every_rank(bench: _Bench) -> dict[str, Any]:
    """What `sharded_state_dict` gives to the host, without the host."""
    with bench.training(SAVED["mixed tp2 pp2"]) as training:
        training.step()
        memory = {p.view(p.flat.main).untyped_storage().data_ptr() for p in owned_pieces(_model_of(training))}
        state = training.optimizer.sharded_state_dict({})
        shards = [each for key, each in state.items() if key != "distopt"]
        main = [each for each in shards if each.key.startswith("optimizer.distopt.main.")]
        to_load = training.optimizer.sharded_state_dict({}, is_loading=True)
        return {
            "text": state["distopt"],
            "keys": sorted(each.key for each in shards),
            "numel": sum(each.data.numel() for each in shards),
            "whole": {each.key: math.prod(each.global_shape) for each in shards},
            "views": {each.data.untyped_storage().data_ptr() for each in main} <= memory,
            "allocated to load": sum(each.data is not None for each in to_load.values()),
            "shards to load": len(to_load),
        }


Refusal = tuple[str, str, bool]


def _refused(training: Any, call: Callable[[], object]) -> Refusal:
    """Class and text of what was raised, and whether everything is as it was."""
    before = _held(training)
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception; the test says which
        return type(error).__name__, str(error), _same(_held(training), before)
    return "nothing", "", _same(_held(training), before)


def _refusals(bench: _Bench) -> dict[str, Refusal]:
    found = {}
    with bench.training(FP32.at(tp=2, dp=2)) as training:
        training.step()
        state = bench.read_by_host(training, bench.folder / "tp2 dp2" / "host")["optimizer"]
        for name, change in CHANGES.items():
            changed = dict(state)
            change(changed, bench.rank)
            found[name] = _refused(training, lambda state=changed: training.optimizer.load_state_dict(state))
        unread = bench.state_of_host(training, is_loading=True)["optimizer"] | {"distopt": state["distopt"]}
        found["not read"] = _refused(training, lambda: training.optimizer.load_state_dict(unread))
        sgd = bench.folder / "sgd tp2 dp2" / "host"
        found["other inner optimizer"] = _refused(training, lambda: bench.read_optimizer_alone(training, sgd))
    with bench.training(DEEP.at(tp=2, dp=2, tied=True)) as training:
        state = bench.read_by_host(training, bench.folder / "deep untied dp4" / "host")["optimizer"]
        found["another model"] = _refused(training, lambda: training.optimizer.load_state_dict(state))
        nowhere = str(bench.folder / "iter_0000002" / f"mp_rank_{bench.rank:02}" / "distrib_optim.pt")
        found["nowhere"] = _refused(training, lambda: training.optimizer.load_parameter_state(nowhere))
    return found


def _drop_a_box(state: dict[str, Any], rank: int) -> None:
    if rank == 1:
        del state[min(key for key in state if key.startswith("exp_avg/decoder.final_layernorm.bias"))]


def _damage_the_text(state: dict[str, Any], rank: int) -> None:
    if rank == 1:
        state["distopt"] = state["distopt"].replace("0.002", "0.003")


#: What is changed in the state between the host's reading it and our taking it.
CHANGES: dict[str, Callable[[dict[str, Any], int], None]] = {
    "box missing on one rank": _drop_a_box,
    "text damaged on one rank": _damage_the_text,
}


@dataclasses.dataclass(frozen=True)
class Legacy:
    """What one rank found in the host's first kind of checkpoint."""

    files: list[str]  # in addition to those of the host
    differs: dict[str, list[str]]  # by who loads, as of `Resumed`
    params_differ: dict[str, list[str]]
    head: dict[str, Head]
    head_at_save: Head
    head_of_dict: Head  # after `load_state_dict` alone
    scales: tuple[list[float], list[float]]  # of the steps after the save, and after the load
    losses: tuple[list[float], list[float]]


def _legacy(bench: _Bench) -> Legacy:
    """Collective: the first rank's state dict lies in a file of the host's, the tensors go by calls of their own.

    Once by the chain and once by the optimizer in it; what the one has saved the other loads.
    """
    folders = {name: bench.folder / f"legacy of {name}" / "iter_0000002" for name in ("chain", "optimizer")}
    with bench.training(FP16.at(tp=2, dp=2)) as training:
        for _ in range(STEPS):
            training.step()
        _change_head(training)
        states = [copy.deepcopy(training.optimizer.state_dict())]
        dist.broadcast_object_list(states)
        for name, each in _chain_and_optimizer(training).items():
            each.save_parameter_state(str(folders[name] / f"mp_rank_{bench.rank % 2:02}" / "distrib_optim.pt"))
        head_at_save, steps = _head(training), [training.step() for _ in range(MORE_STEPS)]
    source = open_checkpoint(folders["chain"] / "distrib_optim.distopt")
    differs, params_differ, heads = {}, {}, {}
    with bench.training(FP16.at(dp=4)) as training:
        each = _chain_and_optimizer(training)
        each["chain"].load_state_dict(states[0])
        head_of_dict = _head(training)
        for name, other in (("chain", "optimizer"), ("optimizer", "chain")):
            each[name].load_state_dict(states[0])
            each[name].load_parameter_state(str(folders[other] / "mp_rank_00" / "distrib_optim.pt"))
            differs[name], params_differ[name] = _differing(training, source), _params_that_differ(training, source)
            heads[name] = _head(training)
        bench.begin_at(training, STEPS)
        again = [training.step() for _ in range(MORE_STEPS)]
    files = sorted(path.name for path in folders["chain"].iterdir())
    scales, losses = _scales(steps), [step.loss for step in steps]
    both_scales, both_losses = (scales, _scales(again)), (losses, [step.loss for step in again])
    return Legacy(files, differs, params_differ, heads, head_at_save, head_of_dict, both_scales, both_losses)


def _chain_and_optimizer(training: Any) -> dict[str, Any]:
    return {"chain": training.optimizer, "optimizer": training.optimizer.chained_optimizers[0]}


def _scales(steps: list[Step]) -> list[float]:
    return [step.loss_scale for step in steps]


def _collect(rank: int, size: int, folder: str) -> dict[str, Any]:
    from megatron.core import parallel_state

    bench = _Bench(rank, folder)
    by_layout = sorted(SAVED, key=lambda name: _layout(SAVED[name]))
    found: dict[str, Any] = {"saved": {name: bench.save(name) for name in by_layout}}
    parallel_state.destroy_model_parallel()  # the groups of experts
    found["resumed"] = bench.resume_all(size)
    parallel_state.destroy_model_parallel()
    found["state"] = _state_of_every_rank(bench)
    found["refusals"] = _refusals(bench)
    found["legacy"] = _legacy(bench)
    if bench.enters_world_of(3):
        found["resumed"] |= bench.resume_all(3)
    return found


def _layout(run: Run) -> tuple[bool, int, int, int]:
    """Equal ones one after the other share their process groups, which are slow to make. Experts come last."""
    return run.experts is not None, run.tp, run.pp, run.vp


# In the test process.


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(_collect, RANKS, str(tmp_path_factory.mktemp("checkpoints")), seconds=300, core=True)


@pytest.fixture(scope="module")
def resumed(by_rank: list[dict[str, Any]]) -> Callable[[str, str], list[tuple[Saved, Resumed]]]:
    """By pair and way: what each rank of the second run found, with what it had saved in the first."""

    def of(name: str, way: str) -> list[tuple[Saved, Resumed]]:
        ranks = by_rank[: PAIRS[name].run.ranks]
        return [(found["saved"][PAIRS[name].saved], found["resumed"][name, way]) for found in ranks]

    return of


Found = Callable[[str, str], list[tuple[Saved, Resumed]]]


@pytest.mark.parametrize("name", SAVED)
def test_save_when_training_then_the_files_hold_what_each_rank_has(name: str, by_rank: list[dict[str, Any]]) -> None:
    assert [found["saved"][name].differs for found in by_rank] == [[]] * RANKS


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_load_when_the_layout_is_another_then_state_params_and_curve_are_the_saved_ones(
    name: str, way: str, resumed: Found
) -> None:
    for saved, found in resumed(name, way):
        # The host writes norms and the vocabulary into the params of the model as it knows them, before we write ours.
        assert found.model_differs == found.differs == found.params_differ == []
        assert found.head == saved.head
        if PAIRS[name].tolerance is not None:
            assert len(found.losses) == MORE_STEPS
            assert found.losses == pytest.approx(saved.losses, rel=0, abs=PAIRS[name].tolerance)
            assert found.scales == saved.scales


def test_resume_when_fp16_then_the_loss_scale_grows_at_the_step_at_which_it_would_have(resumed: Found) -> None:
    assert {tuple(found.scales) for _, found in resumed("fp16 tp to dp", "host")} == {(4096.0, 8192.0)}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("same layout", {"main", "exp_avg", "exp_avg_sq"}),
        ("sgd tp to dp", {"main", "momentum_buffer"}),
        ("rmsprop dp to tp", {"main", "momentum_buffer", "square_avg"}),
        ("not begun", {"main"}),
    ],
)
def test_host_load_when_an_inner_optimizer_keeps_more_or_less_then_it_gets_that(
    name: str, kinds: set[str], resumed: Found
) -> None:
    assert [found.kinds for _, found in resumed(name, "host")] == [kinds] * RANKS


@pytest.mark.parametrize("way", ["own", "host"])
@pytest.mark.parametrize("name", ROLLED_BACK)
def test_load_when_the_run_has_gone_on_then_it_repeats_its_steps_bit_for_bit(
    name: str, way: str, by_rank: list[dict[str, Any]]
) -> None:
    for found in by_rank:
        assert found["saved"][name].again[way] == found["saved"][name].losses


def test_sharded_state_when_taken_then_each_rank_has_views_of_its_own_part_and_all_have_one_text(
    by_rank: list[dict[str, Any]],
) -> None:
    states = [found["state"] for found in by_rank]
    assert all(state["views"] for state in states)
    assert len({state["text"] for state in states}) == 1
    wholes: dict[str, int] = {}
    for state in states:
        wholes |= state["whole"]
    # Norms are on both tensor-parallel ranks, the tied embedding on both stages: each element is written once.
    assert sum(state["numel"] for state in states) == sum(wholes.values()) == 3 * 45_280
    assert max(state["numel"] for state in states) < 3 * 45_280 / 3
    for state in states:  # to load, no memory is taken yet
        assert state["allocated to load"] == 0
        assert state["shards to load"] >= 42


#: What the rank says that finds it: the class, and what is in the text.
_REFUSALS: dict[str, tuple[str, ...]] = {
    "box missing on one rank": ("CheckpointError", "'exp_avg/decoder.final_layernorm.bias'", "Must hold all 40"),
    "text damaged on one rank": ("CheckpointError", "manifest of the host: CRC-32", "Load an earlier checkpoint"),
    "another model": ("CheckpointError", "'output_layer.weight', which the model does not have", "--no-load-optim"),
    "not read": ("CheckpointError", "a ShardedTensor", "what megatron.core.dist_checkpointing.load returned."),
    "other inner optimizer": ("CheckpointException", "optimizer.distopt.exp_avg.", "from model not in state dict"),
    "nowhere": ("CheckpointError", "iter_0000002/distrib_optim.distopt", "mp_rank_0", "--no-load-optim"),
}


@pytest.mark.parametrize("name", _REFUSALS)
def test_load_when_the_state_is_bad_then_all_refuse_and_keep_what_they_have(
    name: str, by_rank: list[dict[str, Any]]
) -> None:
    refusals = [found["refusals"][name] for found in by_rank]
    assert all(unchanged for _, _, unchanged in refusals)
    kind, *parts = _REFUSALS[name]
    own = refusals[1][1]
    for rank, (found, text, _) in enumerate(refusals):
        is_told = name.endswith("on one rank") and rank != 1
        assert found == ("RanksDisagreeError" if is_told else kind)
        assert_mentions(text, *(("rank 1", own) if is_told else parts))


def test_legacy_load_when_the_layout_is_another_then_state_params_and_curve_go_on(
    by_rank: list[dict[str, Any]],
) -> None:
    for found in by_rank:
        legacy: Legacy = found["legacy"]
        assert legacy.files == ["distrib_optim.distopt"]  # one for all ranks of the model
        assert legacy.differs == legacy.params_differ == {"chain": [], "optimizer": []}
        assert legacy.head == dict.fromkeys(("chain", "optimizer"), legacy.head_at_save)
        saved, again = legacy.losses
        assert again == pytest.approx(saved, rel=0, abs=IN_16_BITS)
        assert legacy.scales == ([4096.0, 8192.0], [4096.0, 8192.0])


def test_state_dict_when_loaded_alone_then_groups_and_loss_scale_are_the_saved_ones(
    by_rank: list[dict[str, Any]],
) -> None:
    for found in by_rank:
        legacy: Legacy = found["legacy"]
        assert (legacy.head_of_dict.lr, legacy.head_of_dict.loss_scale) == (LR_AT_SAVE, 4096.0)
        # What needs the tensors comes with them.
        assert (legacy.head_of_dict.updates, legacy.head_of_dict.skipped) == (None, 0)
