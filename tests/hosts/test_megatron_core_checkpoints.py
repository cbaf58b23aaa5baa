"""Training on megatron-core, saved at one layout and resumed at another, by our own calls and by
the host's.

One spawn of four ranks runs `collect_facts`. What a load gives back is compared bit for
bit with the tensors of the whole model that `save` wrote at the same moment.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

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
from tests.support.facts import Facts, facts_of, outcomes
from tests.support.refusals import assert_mentions
from tests.support.values import from_ranks, same

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not core_mentions(
            "dist_checkpointing/mapping.py", "if self.axis_fragmentations is not None:"
        ),
        reason="dist_checkpointing of this megatron-core takes shards of a regular grid only; see "
        "test_megatron_core_folders.py",
    ),
    pytest.mark.skipif(
        core_mentions("dist_checkpointing/mapping.py", "np.product")
        and not hasattr(numpy, "product"),
        reason="dist_checkpointing of this megatron-core calls np.product, which numpy 2 does not "
        "have",
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

    @property
    def layers(self) -> int:
        return self.depth

    def at(
        self, *, dp: int = 1, tp: int = 1, pp: int = 1, vp: int = 1, batch: int = 4, **changes: Any
    ) -> Run:
        """The same training at another layout: the same global batch."""
        layout = {"dp": dp, "tp": tp, "pp": pp, "vp": vp, "num_microbatches": batch // dp}
        return dataclasses.replace(self, **layout, **changes)


FP32 = Run("distopt")
BF16 = Run("distopt", precision="bf16")
#: fp32 norms in a 16-bit model: two buffers, and main params that are model params. Not with
#: virtual stages, where the host gathers both in one coalesced call: gloo writes one of two dtypes
#: wrongly (seen with torch 2.13).
MIXED = BF16.of(fp32_norms=True)
DEEP = BF16.of(depth=4)
#: The loss scale doubles after the third step, which is the first one after the save.
FP16 = Run("distopt", precision="fp16", loss_scale_window=3)
SGD = FP32.of(optimizer_name="sgd", lr=0.1)
OVERLAPPED: dict[str, Any] = {
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket_size": 3000,
}
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
    "muon dp4": FP32.at(dp=4, of_options=(("ADAM", "torch_foreach"), ("OPTIMIZER", "muon"))),
    "not begun": FP32.at(dp=4, begun=False),
    "dp4": FP32.at(dp=4, batch=12),
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """A training that was saved and how it goes on."""

    saved: str  # name in `SAVED`
    run: Run  # resumes
    ways: tuple[str, ...]  # "own" for our `load`, "host" for the host's `dist_checkpointing`
    #: Of the losses, absolute; 0.0 where all arithmetic is the same. None: it is another model, and
    #: makes no steps.
    tolerance: float | None


# Sums over another number of ranks, added up in another order: an ulp of fp32, 5e-7 of a loss of 4,
# at each step.
IN_FP32 = 2e-6
# Tensor-parallel ranks round their partial sums to 16 bits, 2**-9 of each, so that even the first
# forward pass, of equal params, differs; the mean over 128 tokens averages most of that. bf16
# instead of fp32 norms do the same.
IN_16_BITS = 1e-3

PAIRS: dict[str, Pair] = {
    # What two ranks add is the same in either order, and nothing is clipped, whose norm is summed
    # shard by shard.
    "same arithmetic": Pair("tp2 dp2", FP32.at(tp=2, dp=2, **OVERLAPPED), ("own", "host"), 0.0),
    "muon": Pair("muon dp4", SAVED["muon dp4"], ("host",), 0.0),
    "same layout": Pair("deep untied dp4", SAVED["deep untied dp4"], ("host",), 0.0),
    "pp to dp, overlapped, for-each": Pair(
        "mixed tp2 pp2", MIXED.at(dp=4, **OVERLAPPED, **FOR_EACH), ("own", "host"), IN_16_BITS
    ),
    "not to mixed": Pair("deep tp2 pp2", MIXED.at(dp=4, depth=4), ("own",), IN_16_BITS),
    "pp to vp": Pair("deep tp2 pp2", DEEP.at(pp=2, vp=2, dp=2), ("own", "host"), IN_16_BITS),
    "one to two optimizers": Pair(
        "deep untied dp4",
        DEEP.at(pp=2, vp=2, dp=2, tied=False, **TWO_OPTIMIZERS),
        ("host",),
        IN_16_BITS,
    ),
    "two optimizers to one": Pair(
        "deep two optimizers", DEEP.at(tp=2, dp=2, tied=False), ("host",), IN_16_BITS
    ),
    "gated tp to dp": Pair(
        "mixed gated tp2 dp2", MIXED.at(dp=4, gated=True), ("host",), IN_16_BITS
    ),
    "fp16 tp to dp": Pair("fp16 tp2 dp2", FP16.at(dp=4), ("own", "host"), IN_16_BITS),
    "sgd tp to dp": Pair("sgd tp2 dp2", SGD.at(dp=4), ("host",), IN_FP32),
    "larger vocabulary": Pair(
        "dp4", FP32.at(tp=2, dp=2, batch=12, vocabulary=136), ("own", "host"), None
    ),
    "not begun": Pair("not begun", FP32.at(tp=2, dp=2), ("host",), IN_FP32),
}
WAYS = [(name, way) for name, pair in PAIRS.items() for way in pair.ways]
#: Of the tensors that each rank holds after a load, where an inner optimizer keeps more or less.
KINDS = {
    "same layout": {"main", "exp_avg", "exp_avg_sq"},
    "sgd tp to dp": {"main", "momentum_buffer"},
    "not begun": {"main"},
}


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

    head: Head
    steps: list[Step]


class _Bench:
    """The trainings of one rank, and the host, which is imported in the ranks alone."""

    def __init__(self, rank: int, folder: Path) -> None:
        from tests.support import gpt

        self.gpt, self.rank, self.folder = gpt, rank, folder
        self.sources: dict[str, Source] = {}
        self.saved: dict[str, Saved] = {}
        _let_the_host_write()

    @contextlib.contextmanager
    def training(self, run: Run) -> Iterator[Any]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in run.of_options:
                patch.setenv(f"MEGATRON_DISTOPT_{name}", value)
            patch.setattr(self.gpt, "VOCABULARY", run.vocabulary)
            with contextlib.closing(self.gpt.Training(run)) as training:
                yield training

    def save(self, name: str) -> None:
        """Collective: in both ways at the same moment; then trains on."""
        folder, run = self.folder / name, SAVED[name]
        with self.training(run) as training:
            for _ in range(STEPS if run.begun else 0):
                training.step()
            _change_head(training)
            training.params()  # gathers them, which the host does before it saves
            training.optimizer.save(folder / "own")
            self.save_by_host(training, folder / "host")
            assert _differing(training, self.source(name)) == []
            head = _head(training)
            steps = [training.step() for _ in range(MORE_STEPS)]
            self.saved[name] = Saved(head, steps)

    def source(self, name: str) -> Source:
        """What `save` wrote, read once."""
        if name not in self.sources:
            source = open_checkpoint(self.folder / name / "own")
            self.sources[name] = dataclasses.replace(source, read_box=cache(source.read_box))
        return self.sources[name]

    def resume(self, name: str, way: str) -> None:
        """Collective: loads in one of the ways and trains on."""
        pair = PAIRS[name]
        folder, source, saved = (
            self.folder / pair.saved / way,
            self.source(pair.saved),
            self.saved[pair.saved],
        )
        with self.training(pair.run) as training:
            if way == "own":
                training.optimizer.load(folder)
            else:
                state = self.read_by_host(training, folder)
                # The host writes norms and the vocabulary into the params of the model as it knows
                # them.
                self.load_model(training, state)
                assert _params_that_differ(training, source) == []
                training.optimizer.load_state_dict(state["optimizer"])
            assert _differing(training, source) == []
            assert _params_that_differ(training, source) == []
            assert _head(training) == saved.head
            kinds = {
                key.partition("/")[0]
                for p in owned_pieces(_model_of(training))
                for key, _ in p.tensors()
            }
            assert kinds == KINDS.get(name, kinds)
            if pair.tolerance is not None:
                self.begin_at(training, STEPS if SAVED[pair.saved].begun else 0)
                _check_near([training.step() for _ in saved.steps], saved.steps, pair.tolerance)

    def resumes(self) -> dict[str, Callable[[], None]]:
        by_layout = sorted(WAYS, key=lambda pair: _layout(PAIRS[pair[0]].run))
        return {f"{name}, {way}": partial(self.resume, name, way) for name, way in by_layout}

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
        return {
            "model" if len(chunks) == 1 else f"model{number}": chunk
            for number, chunk in enumerate(chunks)
        }

    def state_of_host(self, training: Any, *, is_loading: bool) -> dict[str, Any]:
        """Collective: as the host's training loop puts it together."""
        state = {
            key: chunk.sharded_state_dict() for key, chunk in self.chunks_by_key(training).items()
        }
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "chained_optim_avoid_prefix": True,
        }
        state["optimizer"] = training.optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=metadata
        )
        return {"iteration": STEPS, **state}

    def save_by_host(self, training: Any, folder: Path) -> None:
        """Collective: with the wrapper that the host's training loop uses unless it is told not
        to."""
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
        from megatron.core.dist_checkpointing.strategies.fully_parallel import (
            FullyParallelSaveStrategyWrapper,
        )

        if self.rank == 0:
            folder.mkdir()
        dist.barrier()
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group)
        dist_checkpointing.save(
            self.state_of_host(training, is_loading=False), str(folder), strategy
        )

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


def _let_the_host_write() -> None:
    """Its writer starts processes, which a daemon may not; one of them, for results, is not needed
    here."""
    import multiprocessing
    import queue

    from megatron.core.dist_checkpointing.strategies import filesystem_async

    multiprocessing.current_process().daemon = False
    filesystem_async._results_queue = queue.Queue()


def _model_of(training: Any) -> WholeModel:
    from megatron_distopt.hosts.megatron_core.model_parallel import whole_model_of

    return whole_model_of(training.optimizer.chained_optimizers)


def _differing(training: Any, source: Source) -> list[str]:
    """Keys of what this rank owns and the source has otherwise; it may have no such rows of
    padding."""
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
    """Names of model params of this rank, owned or not, that are not what the saved main params
    round to."""
    differs = []
    for optimizer, share in zip(
        training.optimizer.chained_optimizers, _model_of(training).shares, strict=True
    ):
        for name, placement in share.placements.items():
            param = optimizer.named[name].detach()
            whole = source.read(f"main/{placement.name}").to(param.dtype)
            for piece in placement.pieces(Span(0, param.numel())):
                found = param.flatten()[piece.in_param.as_slice()].view(piece.sizes)[
                    piece.inside.as_slices()
                ]
                if not _agree(found, whole, piece.in_global.as_slices()):
                    differs.append(placement.name)
    return differs


def _head(training: Any) -> Head:
    from megatron_distopt.optimizer.inner_state import count_updates

    heads = {
        Head(
            group["lr"],
            count_updates(each.sharded.inner),
            float(each.get_loss_scale()),
            each.sharded.num_skipped,
        )
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
        "state": [
            dict(each.inner.state.get(run.main, {})) for each in sharded for run in each.flat_params
        ],
        "groups": [
            {k: v for k, v in group.items() if k != "params"}
            for group in training.optimizer.param_groups
        ],
        "head": _head(training),
    }
    return copy.deepcopy(held)


def _check_near(found: list[Step], saved: list[Step], tolerance: float) -> None:
    losses, others = ([step.loss for step in steps] for steps in (found, saved))
    assert losses == pytest.approx(others, rel=0, abs=tolerance)
    assert [step.loss_scale for step in found] == [step.loss_scale for step in saved]
    if saved[0].loss_scale != 1.0:
        assert [step.loss_scale for step in saved] == [4096.0, 8192.0], (
            "it grows at the step at which it would have"
        )


def _views_and_one_text(bench: _Bench) -> None:
    """What `sharded_state_dict` gives to the host: views of what each rank owns, and the same text
    on all."""
    with bench.training(SAVED["mixed tp2 pp2"]) as training:
        training.step()
        memory = {
            p.view(p.flat.main).untyped_storage().data_ptr()
            for p in owned_pieces(_model_of(training))
        }
        state = training.optimizer.sharded_state_dict({})
        shards = [each for key, each in state.items() if key != "distopt"]
        main = [each for each in shards if each.key.startswith("optimizer.distopt.main.")]
        assert {each.data.untyped_storage().data_ptr() for each in main} <= memory
        assert len(set(from_ranks(state["distopt"]))) == 1
        wholes = from_ranks({each.key: math.prod(each.global_shape) for each in shards})
        numels = from_ranks(sum(each.data.numel() for each in shards))
        # Norms are on both tensor-parallel ranks, the tied embedding on both stages: each element
        # is written once.
        assert (
            sum(numels)
            == sum({k: v for whole in wholes for k, v in whole.items()}.values())
            == 3 * 45_280
        )
        assert max(numels) < 3 * 45_280 / 3
        asked = training.optimizer.sharded_state_dict({}, is_loading=True).values()
        to_load = [each for each in asked if isinstance(each, type(shards[0]))]
        assert len(to_load) >= 42
        assert all(each.data is None for each in to_load), "no memory is taken yet"


#: What the rank says that finds it: the class, and what is in the text.
REFUSALS: dict[str, tuple[str, ...]] = {
    "box missing on one rank": (
        "CheckpointError",
        "'exp_avg/decoder.final_layernorm.bias'",
        "must hold all 40",
    ),
    "text damaged on one rank": (
        "CheckpointError",
        "Manifest of the host has CRC-32",
        "Load an earlier checkpoint",
    ),
    "another model": (
        "CheckpointError",
        "'output_layer.weight', which the model does not have",
        "--no-load-optim",
    ),
    "not asked for": ("CheckpointError", "with --no-save-optim", "Drop --no-save-optim"),
    "not read": (
        "CheckpointError",
        "a ShardedTensor",
        "what megatron.core.dist_checkpointing.load returned.",
    ),
    "other inner optimizer": (
        "CheckpointException",
        "optimizer.distopt.exp_avg.",
        "from model not in state dict",
    ),
    "nowhere": (
        "CheckpointError",
        "iter_0000002/distrib_optim.distopt",
        "mp_rank_0",
        "--no-load-optim",
    ),
}


def _check_refused(training: Any, name: str, call: Callable[[], object]) -> None:
    """Collective: all ranks refuse, and everything is as it was."""
    before, kind, text = _held(training), "nothing", ""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception
        kind, text = type(error).__name__, str(error)
    assert same(_held(training), before)
    own = from_ranks(text)[1]
    if name.endswith("on one rank") and dist.get_rank() != 1:
        assert kind == "RanksDisagreeError"
        assert_mentions(text, "rank 1", own)
    else:
        assert kind == REFUSALS[name][0]
        assert_mentions(text, *REFUSALS[name][1:])


def _refusals(bench: _Bench) -> None:
    with bench.training(FP32.at(tp=2, dp=2)) as training:
        training.step()
        load = training.optimizer.load_state_dict
        state = bench.read_by_host(training, bench.folder / "tp2 dp2" / "host")["optimizer"]
        for name, change in CHANGES.items():
            changed = dict(state)
            change(changed, bench.rank)
            _check_refused(training, name, partial(load, changed))
        unread = bench.state_of_host(training, is_loading=True)["optimizer"] | {
            "distopt": state["distopt"]
        }
        _check_refused(training, "not read", partial(load, unread))
        script = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(no_save_optim=True))
        with mock.patch.dict(sys.modules, {"megatron.training.global_vars": script}):
            _check_refused(training, "not asked for", partial(load, {"distopt": state["distopt"]}))
        sgd = bench.folder / "sgd tp2 dp2" / "host"
        _check_refused(
            training, "other inner optimizer", lambda: bench.read_optimizer_alone(training, sgd)
        )
    with bench.training(DEEP.at(tp=2, dp=2, tied=True)) as training:
        load = training.optimizer.load_state_dict
        state = bench.read_by_host(training, bench.folder / "deep untied dp4" / "host")["optimizer"]
        _check_refused(training, "another model", partial(load, state))
        nowhere = str(
            bench.folder / "iter_0000002" / f"mp_rank_{bench.rank:02}" / "distrib_optim.pt"
        )
        _check_refused(
            training, "nowhere", lambda: training.optimizer.load_parameter_state(nowhere)
        )


def _drop_a_box(state: dict[str, Any], rank: int) -> None:
    if rank == 1:
        del state[
            min(key for key in state if key.startswith("exp_avg/decoder.final_layernorm.bias"))
        ]


def _damage_the_text(state: dict[str, Any], rank: int) -> None:
    if rank == 1:
        state["distopt"] = state["distopt"].replace("0.002", "0.003")


#: What is changed in the state between the host's reading it and our taking it.
CHANGES: dict[str, Callable[[dict[str, Any], int], None]] = {
    "box missing on one rank": _drop_a_box,
    "text damaged on one rank": _damage_the_text,
}


def _legacy(bench: _Bench) -> None:
    """Collective: the first rank's state dict lies in a file of the host's, the tensors go by calls
    of their own.

    Once by the chain and once by the optimizer in it; what the one has saved the other loads.
    """
    folders = {
        name: bench.folder / f"legacy of {name}" / "iter_0000002" for name in ("chain", "optimizer")
    }
    with bench.training(FP16.at(tp=2, dp=2)) as training:
        for _ in range(STEPS):
            training.step()
        _change_head(training)
        state = from_ranks(copy.deepcopy(training.optimizer.state_dict()))[0]
        for name, each in _chain_and_optimizer(training).items():
            each.save_parameter_state(
                str(folders[name] / f"mp_rank_{bench.rank % 2:02}" / "distrib_optim.pt")
            )
        head, steps = _head(training), [training.step() for _ in range(MORE_STEPS)]
    # for all ranks of the model
    assert [path.name for path in folders["chain"].iterdir()] == ["distrib_optim.distopt"]
    source = open_checkpoint(folders["chain"] / "distrib_optim.distopt")
    with bench.training(FP16.at(dp=4)) as training:
        each = _chain_and_optimizer(training)
        each["chain"].load_state_dict(state)
        # What needs the tensors comes with them.
        assert _head(training) == dataclasses.replace(head, updates=None, skipped=0)
        for name, other in (("chain", "optimizer"), ("optimizer", "chain")):
            each[name].load_state_dict(state)
            each[name].load_parameter_state(str(folders[other] / "mp_rank_00" / "distrib_optim.pt"))
            assert _differing(training, source) == _params_that_differ(training, source) == []
            assert _head(training) == head
        bench.begin_at(training, STEPS)
        _check_near([training.step() for _ in steps], steps, IN_16_BITS)


def _chain_and_optimizer(training: Any) -> dict[str, Any]:
    return {"chain": training.optimizer, "optimizer": training.optimizer.chained_optimizers[0]}


def collect_facts(rank: int, size: int, folder: Path) -> dict[str, str]:
    from megatron.core import parallel_state

    bench = _Bench(rank, folder)
    by_layout = sorted(SAVED, key=lambda name: _layout(SAVED[name]))
    found = outcomes({f"save {name}": partial(bench.save, name) for name in by_layout})
    found |= outcomes(bench.resumes())
    parallel_state.destroy_model_parallel()
    found |= outcomes({name: partial(check, bench) for name, check in OTHERS.items()})
    return found


OTHERS = {"views and one text": _views_and_one_text, "refusals": _refusals, "legacy": _legacy}


def _layout(run: Run) -> tuple[int, int, int]:
    """Equal ones one after the other share their process groups, which are slow to make."""
    return run.tp, run.pp, run.vp


facts = facts_of(collect_facts, RANKS, seconds=300, core=True)


NAMES = [*(f"save {name}" for name in SAVED), *(f"{name}, {way}" for name, way in WAYS), *OTHERS]


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint_when_the_layout_is_another_then_state_params_and_curve_are_the_saved_ones(
    name: str, facts: Facts
) -> None:
    facts.assert_passed(name)
