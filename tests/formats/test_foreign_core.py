"""megatron-core's own checkpoints, written by it on two ranks: every tensor is the live one to the
bit.

One spawn trains four models and saves them in all the formats that the installed megatron-core
writes. Those with names are read offline; all are loaded into a run of ours with the same buffers,
as an unedited script does it.

Exercises hosts/megatron_core/resume.py.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import multiprocessing
import queue
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distopt.checkpoint.whole_model import owned_pieces
from megatron_distopt.errors import CheckpointError, RanksDisagreeError
from megatron_distopt.formats import open_any
from megatron_distopt.optimizer.inner_state import moments_of
from tests.support.cases import Case
from tests.support.core_version import core_mentions
from tests.support.facts import Facts, facts_of

pytestmark = pytest.mark.long

STEPS = 2
CASES = {
    # Several buckets, the work of saving shared by the ranks: the file lists params in the order of
    # neither.
    "dp2": Case(
        "host-distributed", dp=2, precision="bf16", bucket_size=20000, overlap_grad_reduce=True
    ),
    "tp2-gated": Case("host-distributed", tp=2, precision="bf16"),
    # the last stage has a copy of the embedding
    "pp2": Case("host-distributed", pp=2, precision="bf16"),
    "dp2-fp32": Case("host-distributed", dp=2, precision="fp32"),
}
GATHERED, OWN_FILES = "dp_zero_gather_scatter", "own files"
#: Whether it is 0.15 or newer, whose names for the same two are others, and which writes params as
#: they are.
IS_NEW = core_mentions("optimizer/distrib_optimizer.py", "dp_reshardable")
BY_PARAM, IN_BUCKETS = (
    ("fully_reshardable", "dp_reshardable")
    if IS_NEW
    else ("fully_sharded_model_space", "fully_sharded_bucket_space")
)
#: See tests/hosts/test_megatron_core_parity.py.
MISPLACES_TIED = core_mentions(
    "distributed/param_and_grad_buffer.py",
    "if param_start_index % self.data_parallel_world_size != 0",
)
FORMATS = {
    "dp2": (BY_PARAM, IN_BUCKETS, GATHERED, OWN_FILES),
    "tp2-gated": (BY_PARAM, IN_BUCKETS, GATHERED, OWN_FILES),
    "pp2": (BY_PARAM, IN_BUCKETS, OWN_FILES),
    "dp2-fp32": (IN_BUCKETS, OWN_FILES),
}
if not IS_NEW:  # its writer fails on more than one param a bucket
    FORMATS = {
        name: tuple(kind for kind in kinds if kind != IN_BUCKETS) for name, kinds in FORMATS.items()
    }
if MISPLACES_TIED:  # it cannot train such a model
    del CASES["pp2"], FORMATS["pp2"]
NAMELESS = [(case, kind) for case, kinds in FORMATS.items() for kind in kinds if kind != BY_PARAM]
#: What ours is to write, and the host's own to read.
BACK = [("tp2-gated", BY_PARAM), ("dp2", IN_BUCKETS), ("dp2", OWN_FILES)] if IS_NEW else []
#: Before 0.16 it writes these formats with a fused Adam only, which counts steps in its groups.
NEEDS_FUSED = not core_mentions("optimizer/distrib_optimizer.py", "if key == 'step':")
#: Of a layer the model calls its norms one way, and megatron-core's distributed checkpoints
#: another.
RENAMED = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


@dataclass(frozen=True)
class Piece:
    """What one rank owns of a param: elements of its own part of it, and how that part was cut from
    the whole."""

    start: int
    shape: tuple[int, ...]
    dim: int | None
    rank: int
    size: int
    is_gated: bool
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def put(self, kind: str, into: dict[str, Tensor], key: str) -> None:
        """Into the whole tensor, which is made of nan until it is there."""
        shape = [
            numel * self.size if dim == self.dim else numel for dim, numel in enumerate(self.shape)
        ]
        whole = into.setdefault(key, torch.full(shape, torch.nan))
        halves = whole.chunk(2, 0) if self.is_gated else (whole,)
        mine = [
            half if self.dim is None else half.chunk(self.size, self.dim)[self.rank]
            for half in halves
        ]
        local = torch.cat(mine).reshape(-1)
        local[self.start : self.start + self.tensors[kind].numel()] = self.tensors[kind]
        for part, values in zip(mine, local.view(self.shape).chunk(len(mine)), strict=True):
            part.copy_(values)


def save_all(
    rank: int, size: int, folder: Path
) -> tuple[dict[str, dict[str, list[Piece]]], dict[str, Any]]:
    """Trains every case and saves it in every format, then loads what has no names.

    Returns:
        The live state of this rank by case and name; and by case and format what came of the load,
        see `resume`.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # The host writes in processes of its own, and asks another one to hold their results, which
    # takes seconds to start.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    if IS_NEW:
        filesystem_async._results_queue = queue.Queue()
    if not core_mentions(
        "dist_checkpointing/strategies/filesystem_async.py", "serialization_format"
    ):
        filesystem_async._write_item = as_today(filesystem_async._write_item)
    live = {name: save_case(name, case, folder / name) for name, case in CASES.items()}
    found: dict[Any, Any] = {
        (name, kind): resume(CASES[name], folder / name, kind, live[name])
        for name, kinds in FORMATS.items()
        for kind in kinds
    }
    name, kind = next(each for each in NAMELESS if each[0] == "dp2")
    found["other buckets"] = resume(
        CASES[name].of(bucket_size=3000), folder / name, kind, live[name]
    )
    found["without weights"] = resume(
        CASES[name], folder / name, kind, live[name], has_weights=False
    )
    for name, kind in BACK:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MEGATRON_DISTOPT_CHECKPOINT_FORMAT", "gathered")
            kept = save_case(name, CASES[name].of(optimizer="distopt"), folder / "ours" / name)
        # With torch's Adam the host fails to load state with names, its own as well: that is read
        # as the host's is.
        go_on = resume_in_host if kind == IN_BUCKETS else resume
        found["back", name, kind] = go_on(CASES[name], folder / "ours" / name, kind, kept)
    return live, found


def resume_in_host(case: Case, folder: Path, kind: str, kept: dict[str, list[Piece]]) -> list[str]:
    """What differs in the host's own optimizer after it has loaded what ours saved in its
    format."""
    from tests.support import gpt

    with contextlib.closing(gpt.Training(case)) as host, host.type_strings():
        for _ in range(STEPS):  # of torch's Adam the host keeps the count that it has
            host.step()
        load_sharded(host, kind, folder / kind)
        found = live_state(host)
    pairs = [
        (name, *pair)
        for name, pieces in kept.items()
        for pair in zip(pieces, found[name], strict=True)
    ]
    return [
        name
        for name, one, other in pairs
        for key in one.tensors
        if not torch.equal(one.tensors[key], other.tensors[key])
    ]


def resume(
    case: Case, folder: Path, kind: str, live: dict[str, list[Piece]], *, has_weights: bool = True
) -> list[str] | str:
    """A run of ours that loads what the host saved: names of params of which a value differs, or
    the refusal."""
    from megatron_distopt.hosts.megatron_core.model_parallel import whole_model_of
    from tests.support import gpt

    with pytest.MonkeyPatch.context() as patch:
        if "gated" in folder.name:
            patch.setattr(gpt, "transformer_config", gated(gpt.transformer_config))
        with contextlib.closing(gpt.Training(case.of(optimizer="distopt"))) as training:
            flats = [
                flat for each in training.optimizer.ours() for flat in each.sharded.flat_params
            ]
            before = [flat.main.detach().clone() for flat in flats]
            try:
                if kind == OWN_FILES:
                    training.chunks[0].load_state_dict(
                        torch.load(folder / f"{dist.get_rank()}.pt", weights_only=True)
                    )
                    training.optimizer.load(folder / kind)
                else:
                    load_sharded(training, kind, folder / kind, has_weights=has_weights)
            except (CheckpointError, RanksDisagreeError) as error:
                after = [flat.main.detach() for flat in flats]
                assert all(map(torch.equal, before, after)), "a refused load changed something"
                return str(error)
            names = {param: name.split(".", 1)[1] for name, param in training.named_params()}
            differs = []
            for optimizer in training.optimizer.ours():
                steps = {
                    float(state["step"])
                    for state in optimizer.sharded.inner.state.values()
                    if "step" in state
                }
                steps |= {
                    float(group["step"]) for group in optimizer.param_groups if "step" in group
                }
                differs += [] if steps == {float(STEPS)} else [f"steps {steps}"]
                for piece in owned_pieces(whole_model_of([optimizer])):
                    name, shard = global_name(names[optimizer.named[piece.shard.name]]), piece.shard
                    (saved,) = [each for each in live[name] if each.start == shard.in_param.start]
                    kept = {
                        "main": piece.flat.main,
                        **moments_of(optimizer.sharded.inner, piece.flat.main),
                    }
                    for key, _ in piece.tensors():
                        mine = piece.flat.cut(kept[key.split("/")[0]], shard)
                        differs += (
                            []
                            if torch.equal(mine, saved.tensors[key.split("/")[0]].reshape(-1))
                            else [key]
                        )
            return differs


def load_sharded(training: Any, kind: str, folder: Path, *, has_weights: bool = True) -> None:
    """In the order of Megatron-LM's script."""
    from megatron.core import dist_checkpointing

    metadata = metadata_of(kind)
    model = {"model": training.chunks[0].module.sharded_state_dict(metadata=metadata)}
    optimizer = training.optimizer.sharded_state_dict(model, is_loading=True, metadata=metadata)
    # older versions read it by torch's default
    with torch.serialization.safe_globals([argparse.Namespace]):
        loaded = dist_checkpointing.load(
            {**(model if has_weights else {}), "optimizer": optimizer}, str(folder)
        )
    if has_weights:
        training.chunks[0].module.load_state_dict(loaded["model"])
    training.optimizer.load_state_dict(loaded["optimizer"])


def metadata_of(kind: str) -> dict[str, Any]:
    """Layers stacked in one tensor, or one by one with the halves of gated projections apart."""
    is_new = IS_NEW and kind != GATHERED
    return {
        "distrib_optim_sharding_type": kind,
        "singleton_local_shards": is_new,
        "chained_optim_avoid_prefix": True,
    }


def as_today(write_item: Any) -> Any:
    """torch's function, which takes two arguments more than when megatron-core 0.9 to 0.12 were
    written."""
    from torch.distributed.checkpoint.filesystem import (
        SerializationFormat,
        _StorageWriterTransforms,
    )

    def write(*args: Any) -> Any:
        return write_item(_StorageWriterTransforms(), *args[-4:], SerializationFormat.TORCH_SAVE)

    return write


def save_case(name: str, case: Case, folder: Path) -> dict[str, list[Piece]]:
    from tests.support import gpt

    with pytest.MonkeyPatch.context() as patch:
        if "gated" in name:
            patch.setattr(gpt, "transformer_config", gated(gpt.transformer_config))
        with contextlib.closing(gpt.Training(case)) as training:
            for _ in range(STEPS):
                training.step()
            if NEEDS_FUSED:
                count_steps_in_groups(training, patch)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(training.chunks[0].state_dict(), folder / f"{dist.get_rank()}.pt")
            for kind in FORMATS[name]:
                if kind == OWN_FILES:
                    save_own_files(training, folder / kind)
                else:
                    save_sharded(training, case, kind, folder / kind)
            return live_state(training)


def count_steps_in_groups(training: Any, patch: pytest.MonkeyPatch) -> None:
    from megatron.core.optimizer import distrib_optimizer

    from tests.support.gpt import parts_of

    for switch in ("HAVE_APEX_OR_TE", "USING_APEX_OPTIMIZER"):
        patch.setattr(distrib_optimizer, switch, True, raising=False)
    for optimizer in parts_of(training.optimizer):
        for state in optimizer.optimizer.state.values():
            state.pop("step", None)
        for group in optimizer.optimizer.param_groups:
            group["step"] = STEPS


def gated(config_of: Any) -> Any:
    def changed(case: Case) -> Any:
        config = config_of(case)
        config.gated_linear_unit, config.activation_func = True, torch.nn.functional.silu
        config.add_bias_linear, config.ffn_hidden_size = False, 96
        return config

    return changed


def save_sharded(training: Any, case: Case, kind: str, folder: Path) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper,
    )

    from tests.support.gpt import parts_of

    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    metadata = metadata_of(kind)
    model = {"model": training.chunks[0].module.sharded_state_dict(metadata=metadata)}
    save = training.optimizer.sharded_state_dict
    of_one = inspect.signature(parts_of(training.optimizer)[0].sharded_state_dict)
    takes_metadata = "metadata" in of_one.parameters
    how = {"metadata": metadata} if takes_metadata else {"sharding_type": kind}
    with training.type_strings():
        optimizer = save(model, **how)
    args = argparse.Namespace(tensor_model_parallel_size=case.tp)
    state = {**model, "optimizer": optimizer, "iteration": STEPS, "args": args}
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group)
    takes_more = "content_metadata" in inspect.signature(dist_checkpointing.save).parameters
    dist_checkpointing.save(
        state, str(folder), strategy, **({"content_metadata": metadata} if takes_more else {})
    )


def save_own_files(training: Any, folder: Path) -> None:
    from megatron.core import parallel_state

    stage, tensor = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    here = folder / (f"mp_rank_{tensor:02d}" + (f"_{stage:03d}" if stages > 1 else ""))
    here.mkdir(parents=True, exist_ok=True)
    training.optimizer.save_parameter_state(str(here / "distrib_optim.pt"))
    if parallel_state.get_data_parallel_rank() == 0:
        model = training.chunks[0].state_dict_for_save_checkpoint()
        state = {"args": argparse.Namespace(), "iteration": STEPS, "model": model}
        torch.save(
            {**state, "optimizer": training.optimizer.state_dict()}, here / "model_optim_rng.pt"
        )


def live_state(training: Any) -> dict[str, list[Piece]]:
    names = {param: name.split(".", 1)[1] for name, param in training.named_params()}
    from tests.support.gpt import parts_of

    found: dict[str, list[Piece]] = {}
    for optimizer in parts_of(training.optimizer):
        for maps in optimizer.gbuf_ranges:
            for buckets in maps.values():
                for bucket in buckets:
                    for param, ranges in bucket["param_map"].items():
                        kept = kept_of(optimizer, param)
                        found.setdefault(global_name(names[param]), []).append(
                            piece_of(param, ranges, kept, names)
                        )
    return found


def kept_of(optimizer: Any, param: Any) -> dict[str, Tensor]:
    index, order = optimizer.model_param_group_index_map[param]
    main = optimizer.optimizer.param_groups[index]["params"][order]
    return {"param": main, **optimizer.optimizer.state[main]}


def global_name(name: str) -> str:
    """The second of two stages has the second of two layers, and a copy of the embedding."""
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_rank() == 0:
        return name
    return {"output_layer.weight": "embedding.word_embeddings.weight"}.get(
        name, name.replace("layers.0.", "layers.1.")
    )


def piece_of(param: Any, ranges: Any, kept: dict[str, Tensor], names: dict[Any, str]) -> Piece:
    from megatron.core import parallel_state

    rank, size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    dim = (
        param.partition_dim if size > 1 and getattr(param, "tensor_model_parallel", False) else None
    )
    is_gated = dim is not None and "linear_fc1" in names[param]
    tensors = {
        ("main" if kind == "param" else kind): tensor
        for kind, tensor in kept.items()
        if kind != "step"
    }
    copies = {kind: tensor.detach().clone() for kind, tensor in tensors.items()}
    return Piece(ranges["param"].start, tuple(param.shape), dim, rank, size, is_gated, copies)


@dataclass(frozen=True)
class Saved:
    """All that the ranks saved, and what they had."""

    folder: Path
    live: dict[str, dict[str, Tensor]]  # by case and key
    resumed: list[dict[Any, Any]]  # by rank, see `save_all`


facts = facts_of(save_all, 2, seconds=300, core=True)


@pytest.fixture(scope="module")
def saved(facts: Facts) -> Saved:
    live: dict[str, dict[str, Tensor]] = {case: {} for case in CASES}
    for case in CASES:
        for of_rank, _ in facts.by_rank:
            for name, pieces in of_rank[case].items():
                for piece in pieces:
                    for kind in piece.tensors:
                        piece.put(kind, live[case], f"{kind}/{name}")
    return Saved(facts.folder, live, [found for _, found in facts.by_rank])


def with_names_of_the_model(key: str) -> str:
    for theirs, ours in RENAMED:
        key = key.replace(theirs, ours)
    return key


#: megatron-core misplaces params in what it saves where a bucket has padding and another follows: a
#: defect of its own.
MISPLACES = IS_NEW and not core_mentions(
    "optimizer/distrib_optimizer.py", "cumulative_padding_stripped"
)
MISPLACED = ("dp2", "pp2") if MISPLACES else ()
READABLE = [
    (case, BY_PARAM)
    for case, kinds in FORMATS.items()
    if BY_PARAM in kinds and case not in MISPLACED
]


@pytest.mark.parametrize(("case", "kind"), READABLE)
def test_open_when_megatron_core_saved_then_tensors_are_the_live_ones_and_groups_those_of_its_rule(
    saved: Saved, case: str, kind: str
) -> None:
    assert [found[case, kind] for found in saved.resumed] == [[], []]
    source = open_any(saved.folder / case / kind)
    live = saved.live[case]
    found = {with_names_of_the_model(key): source.read(key) for key in source.tensors}
    assert not any(tensor.isnan().any() for tensor in live.values()), "the ranks own not all of it"
    assert found.keys() == live.keys() and len(found) == 3 * (20 if "gated" in case else 28)
    assert [key for key in live if not torch.equal(live[key], found[key])] == []
    assert all(source.tensors[key].shape == tuple(source.read(key).shape) for key in source.tensors)
    head = source.head
    decaying, other = sorted(head.groups, key=lambda group: -group.options["wd_mult"])
    assert (decaying.options["wd_mult"], other.options["wd_mult"]) == (1.0, 0.0)
    assert decaying.step == other.step == STEPS
    assert all(not name.endswith("bias") and "norm" not in name for name in decaying.names)
    assert all(name.endswith("bias") or "norm" in name for name in other.names)
    assert decaying.options["lr"] == CASES[case].lr and decaying.options["betas"] == [0.9, 0.999]
    assert (
        head.inner == "adam"
        and head.about["host"] == "megatron-core"
        and head.about["iteration"] == STEPS
    )


@pytest.mark.skipif(not BACK, reason="the formats of megatron-core before 0.15 are not written")
@pytest.mark.parametrize(("case", "kind"), BACK)
def test_load_when_ours_saved_as_the_host_does_then_every_element_is_taken(
    saved: Saved, case: str, kind: str
) -> None:
    assert [found["back", case, kind] for found in saved.resumed] == [[], []]


@pytest.mark.parametrize("case", MISPLACED)
def test_read_when_megatron_core_misplaced_params_then_it_is_refused(
    saved: Saved, case: str
) -> None:
    folder = saved.folder / case / BY_PARAM
    source = open_any(folder)
    with pytest.raises(CheckpointError) as error:
        for key in source.tensors:
            source.read(key)
    name, count = {
        "dp2": ("decoder.layers.0.mlp.linear_fc2.bias", 40),
        "pp2": ("embedding.word_embeddings.weight", 5120),
    }[case]
    for text in (str(error.value), *(found[case, BY_PARAM] for found in saved.resumed)):
        assert str(folder) in text and " main values of " in text
        assert "save without --dist-ckpt-optim-fully-reshardable" in text
    assert f" of {count} main values of {name!r} " in str(error.value)


@pytest.mark.parametrize(("case", "kind"), NAMELESS)
def test_load_when_megatron_core_saved_without_names_then_the_same_buffers_take_every_element(
    saved: Saved, case: str, kind: str
) -> None:
    assert [found[case, kind] for found in saved.resumed] == [[], []]
    with pytest.raises(CheckpointError, match="--dist-ckpt-optim-fully-reshardable"):
        open_any(saved.folder / case / kind)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("other buckets", "loads only into the buffers that it was saved from"),
        ("without weights", "Load the model's weights of the same iteration first"),
    ],
)
def test_load_when_names_are_missing_and_buffers_or_weights_are_others_then_refused_on_all_ranks(
    saved: Saved, how: str, words: str
) -> None:
    for found in saved.resumed:
        assert words in found[how] and "--dist-ckpt-optim-fully-reshardable" in found[how]
