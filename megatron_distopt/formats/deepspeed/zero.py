"""DeepSpeed's checkpoints of ZeRO stages 1 and 2.

::

    global_stepN/[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt   data-parallel rank D's part of each flat param group
                 mp_rank_MM_model_states.pt                         names and shapes of the params of each group

Rank D's part of group g is a stretch of its params, one after the other; `param_slice_mappings` says what of each param
is in it. MM counts tensor-parallel ranks, and pipeline stages of as many ranks each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN, Manifest, join
from megatron_distopt.checkpoint.param_groups import GroupRecord, options_of
from megatron_distopt.checkpoint.source import Source
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.deepspeed.state import (
    convert_with_deepspeed,
    folder_of,
    head_of,
    placement_of,
    step_of,
)
from megatron_distopt.formats.located import Flat, Located, source_of
from megatron_distopt.formats.pickles import as_number, attribute, load_file, understood
from megatron_distopt.layout import Span

_OPTIMIZER = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_LATEST = "latest"
#: Of DeepSpeed's ZeroStageEnum, where a file says the name of a member.
_STAGES = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}


@dataclass(frozen=True, eq=False)
class _Group:
    """One param group of one model-parallel rank.

    Args:
        shapes: of its params, in order.
        flats: its flat buffers, by data-parallel rank.
        numel: of the first of them, which has no padding unless it is the only one.
        fragments: what of each param is where in them, by data-parallel rank; None where the files do not say it.
        record: of a `Source`.
    """

    shapes: Mapping[str, tuple[int, ...]]
    flats: tuple[Flat, ...]
    numel: int
    fragments: tuple[Mapping[str, Span] | None, ...]
    record: GroupRecord

    def spans(self) -> dict[str, list[tuple[Flat, Span]]]:
        """Where in the flat buffers each param is, from its first element on."""
        found: dict[str, list[tuple[Flat, Span]]] = {}
        for flat, fragments in zip(self.flats, self.fragments, strict=True):
            for name, span in (fragments or {}).items():
                found.setdefault(name, []).append((flat, span))
        return found if None not in self.fragments else self._one_after_the_other()

    def _one_after_the_other(self) -> dict[str, list[tuple[Flat, Span]]]:
        """As DeepSpeed laid them out before it said so: params in order, in equal parts, padding last."""
        found: dict[str, list[tuple[Flat, Span]]] = {}
        start, each = 0, self.numel
        for name, shape in self.shapes.items():
            here = Span(start, start + math.prod(shape))
            for number, flat in enumerate(self.flats):
                both = here.intersect(Span(number * each, (number + 1) * each))
                if both is not None:
                    found.setdefault(name, []).append((flat, both.relative_to(number * each)))
            start = here.stop
        return found


@dataclass(frozen=True, eq=False)
class _ModelRank:
    """The files of one model-parallel rank.

    Args:
        model: content of its model file.
        states: contents of its optimizer files, by data-parallel rank.
        groups: param groups.
    """

    model: Mapping[str, Any]
    states: tuple[Mapping[str, Any], ...]
    groups: tuple[_Group, ...]

    @property
    def names(self) -> list[str]:
        """Names of all params."""
        return [name for group in self.groups for name in group.shapes]


def recognises(path: Path) -> bool:
    """Whether a folder holds such files, or names the step that does in its file "latest"."""
    folder = folder_of(path, _LATEST)
    return folder.is_dir() and any(_OPTIMIZER.fullmatch(each.name) for each in folder.iterdir())


def open_deepspeed_zero(path: Path) -> Source:
    """Opens a checkpoint.

    Args:
        path: folder of a step, or of all steps.

    Raises:
        CheckpointError: a file is missing or damaged, or it is of a kind that only DeepSpeed can put together.
    """
    folder = folder_of(path, _LATEST)
    with understood(folder, "be a checkpoint of DeepSpeed's ZeRO"):
        ranks = _ranks_in(folder)
        return source_of(_located(ranks, _tensor_size(ranks), folder), str(folder), lambda _: _head(ranks))


def _head(ranks: Sequence[_ModelRank]) -> Manifest:
    model, state, kinds = ranks[0].model, ranks[0].states[0], ranks[0].groups[0].flats[0].kinds
    about = {"host": "deepspeed", "deepspeed": str(state.get("ds_version", "unknown"))}
    heads = [
        head_of(
            [group.record for group in rank.groups], kinds, state.get("loss_scaler"), model.get("skipped_steps"), about
        )
        for rank in ranks
    ]
    return join(heads)


def _ranks_in(folder: Path) -> list[_ModelRank]:
    models = {int(match[1]): path for match, path in _matching(folder, _MODEL)}
    states: dict[int, dict[int, Path]] = {}
    for match, path in _matching(folder, _OPTIMIZER):
        states.setdefault(int(match[2]), {})[int(match[1])] = path
    for paths in states.values():
        _check_stage(_state_in(next(iter(paths.values()))), folder)
    if not states or states.keys() != models.keys() or sorted(states) != list(range(len(states))):
        got = f"optimizer files of model-parallel ranks {sorted(states)} and model files of {sorted(models)}"
        rule, remedy = "hold both of every rank", "Copy the files of all ranks into the folder"
        raise CheckpointError(refusal(f"checkpoint {folder}", got, rule, remedy))
    return [_opened(models[number], states[number], folder) for number in sorted(states)]


def _matching(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[re.Match[str], Path]]:
    for path in folder.iterdir():
        match = pattern.fullmatch(path.name)
        if match:
            yield match, path


def _opened(model_path: Path, state_paths: Mapping[int, Path], folder: Path) -> _ModelRank:
    model = load_file(model_path)
    states = [_state_in(path) for _, path in sorted(state_paths.items())]
    _check_count(states[0], sorted(state_paths), folder)
    shapes = [{str(name): tuple(shape) for name, shape in group.items()} for group in model["param_shapes"]]
    groups = tuple(_group(number, each, states) for number, each in enumerate(shapes))
    if None in groups[0].fragments:
        _check_order(model, folder)
    return _ModelRank(model, tuple(states), groups)


def _group(number: int, shapes: Mapping[str, tuple[int, ...]], states: Sequence[Mapping[str, Any]]) -> _Group:
    """A param group of one model-parallel rank.

    Args:
        number: of it.
        shapes: of its params, in order.
        states: contents of the optimizer files, by data-parallel rank.
    """
    base = states[0]["base_optimizer_state"]
    options = base["param_groups"][number] if isinstance(base, Mapping) else {}
    step = step_of(_inner_state(states[0], number), options, states[0].get("base_optimizer_state_step"))
    flats = tuple(_flat(_inner_state(state, number), state, number) for state in states)
    fragments = tuple(_fragments(state, number) for state in states)
    numel = states[0]["single_partition_of_fp32_groups"][number].numel()
    return _Group(shapes, flats, numel, fragments, GroupRecord(tuple(shapes), options_of(options)[0], step))


def _inner_state(state: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """What the inner optimizer keeps for a group; a list where it was saved without padding."""
    base = state["base_optimizer_state"]
    found: Mapping[str, Any] = base["state"].get(number, {}) if isinstance(base, Mapping) else base[number]
    return found


def _flat(inner: Mapping[str, Any], state: Mapping[str, Any], number: int) -> Flat:
    moments = {key: value for key, value in inner.items() if isinstance(value, Tensor) and value.dim() == 1}
    tensors = {MAIN: state["single_partition_of_fp32_groups"][number].view(-1), **moments}
    kinds: dict[str, torch.dtype] = {kind: tensor.dtype for kind, tensor in tensors.items()}
    return Flat(kinds, lambda kind, span: tensors[kind][span.as_slice()])


def _fragments(state: Mapping[str, Any], number: int) -> Mapping[str, Span] | None:
    if "param_slice_mappings" not in state:
        return None
    mapping = state["param_slice_mappings"][number]
    starts = {
        str(name): (int(attribute(each, "start")), int(attribute(each, "numel"))) for name, each in mapping.items()
    }
    return {name: Span(start, start + numel) for name, (start, numel) in starts.items()}


def _check_order(model: Mapping[str, Any], folder: Path) -> None:
    """Refuses files that do not say where params are and do not have them one after the other."""
    config = model.get("ds_config")
    options = config.get("zero_optimization") if isinstance(config, Mapping) else None
    if isinstance(options, Mapping) and options.get("round_robin_gradients"):
        got = "round_robin_gradients without param_slice_mappings"
        rule = "say where params are, or have them one after the other"
        remedy = "Save it without round_robin_gradients"
        raise CheckpointError(refusal(f"checkpoint {folder}", got, rule, remedy))


def _state_in(path: Path) -> Mapping[str, Any]:
    found = load_file(path)
    state = found.get("optimizer_state_dict") if isinstance(found, Mapping) else None
    if not isinstance(state, Mapping):
        rule, remedy = "hold the state of DeepSpeed's optimizer", "Give the folder of a step, as DeepSpeed wrote it"
        raise CheckpointError(refusal(f"file {path}", "no entry optimizer_state_dict", rule, remedy))
    return state


def _check_stage(state: Mapping[str, Any], folder: Path) -> None:
    stage = as_number(state.get("zero_stage", 1))
    stage = _STAGES.get(stage, stage)
    if not isinstance(stage, int) or stage > 2 or "fp32_flat_groups" in state:
        got, rule = f"ZeRO stage {stage}", "be of stage 1 or 2"
        raise CheckpointError(refusal(f"checkpoint {folder}", got, rule, convert_with_deepspeed(folder)))


def _check_count(state: Mapping[str, Any], numbers: Sequence[int], folder: Path) -> None:
    counts = state.get("partition_count", len(numbers))
    sizes = set(counts) if isinstance(counts, Sequence) else {counts}
    if len(sizes) > 1:
        got, rule = f"param groups over {sorted(sizes)} ranks", "have all param groups over the same ranks"
        remedy = "Convert a model without experts; DeepSpeed alone reads these"
        raise CheckpointError(refusal(f"checkpoint {folder}", got, rule, remedy))
    if list(numbers) != list(range(max(sizes))):
        got, rule = f"optimizer files of ranks {list(numbers)}", f"hold those of all {max(sizes)} data-parallel ranks"
        raise CheckpointError(refusal(f"checkpoint {folder}", got, rule, "Copy the files of all ranks into the folder"))


def _tensor_size(ranks: Sequence[_ModelRank]) -> int:
    """Tensor-parallel ranks of a stage have params of the same names, and other stages have others."""
    told = ranks[0].model.get("checkpoint_parallel_dimensions")
    if isinstance(told, Mapping) and told.get("tp_degree"):
        return int(told["tp_degree"])
    return sum(rank.names == ranks[0].names for rank in ranks)


def _located(ranks: Sequence[_ModelRank], tensor_size: int, folder: Path) -> Iterator[Located]:
    stage_of: dict[str, int] = {}
    for number, rank in enumerate(ranks):
        stage, cut = number // tensor_size, (number % tensor_size, tensor_size)
        info = rank.model.get("universal_checkpoint_info")
        for group in rank.groups:
            spans = group.spans()
            for name, shape in group.shapes.items():
                placement = placement_of(name, shape, cut, info, folder)
                is_first = stage_of.setdefault(name, stage) == stage  # other stages have a copy of a tied param
                if is_first and (cut[0] == 0 or placement.dim is not None):
                    in_param = 0
                    for flat, span in spans.get(name, ()):
                        yield Located(placement, Span(in_param, in_param + span.numel), flat, span.start)
                        in_param += span.numel
