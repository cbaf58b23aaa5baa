"""Flat buckets of optimizer state in megatron-core's distributed checkpoints, whose model has names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_distopt.checkpoint.manifest import MAIN
from megatron_distopt.errors import CheckpointError, refusal
from megatron_distopt.formats.located import Flat, Located, cut
from megatron_distopt.formats.megatron_core.flat import FlatBucket, coalesced, layer_orders, locate, whole_of
from megatron_distopt.formats.megatron_core.flat_slots import Candidate, Order
from megatron_distopt.formats.megatron_core.tensors import NamedTensor
from megatron_distopt.formats.pickles import attribute
from megatron_distopt.formats.torch.dcp_reader import DcpFolder
from megatron_distopt.layout import Box, Placement, Span

_PLACE = r"(?P<chain>(?:chained_\d+\.)?)optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\."
_BUCKET = re.compile(
    _PLACE + r"gbuf_idx_(?P<buffer>\d+)\.dtype_\(torch\.(?P<dtype>\w+), .*\)\.bucket_idx_(?P<bucket>\d+)\.(?P<kind>\w+)"
)
_OBJECT = re.compile(_PLACE + r"(?P<what>\w+)(?:/.*)?")
_WRITER = re.compile(r"(__\d+)_\d+\.distcp")
_RESAVE = "Load it with megatron-core 0.15 or newer, and save it again in its default format (dp_reshardable)"
#: Of a buffer: tensor-parallel rank and stage together, optimizer of a chain, number.
_Buffer = tuple[int, str, int]


def objects_of(folder: DcpFolder, what: str) -> list[tuple[int, Any]]:
    """What each pipeline stage and tensor-parallel rank saved as an object: its number, and the object.

    Args:
        folder: the checkpoint.
        what: "optimizer", "grad_scaler" or "param_state".
    """
    matches = [(key, _OBJECT.fullmatch(key)) for key in folder.objects]
    keys = [(int(match["group"]), key) for key, match in matches if match and match["what"] == what]
    return [(group, each) for group, key in sorted(keys) for each in folder.read_object(key)]


def located_in_buckets(folder: DcpFolder, model: Mapping[str, NamedTensor], args: Any) -> Iterator[Located]:
    """Where the params of the whole model are.

    Args:
        folder: the checkpoint.
        model: its params.
        args: of the run; None where they were not saved.

    Raises:
        CheckpointError: params cannot be found or told apart.
    """
    buffers = {**_sharded_buffers(folder), **_gathered_buffers(folder)}
    groups, size = {group for group, *_ in buffers}, _tensor_size(model, args)
    if groups != set(range(len(groups))) or len(groups) % size:
        got, rule = f"state of groups {sorted(groups)}", f"have that of {size} tensor-parallel ranks of every stage"
        raise CheckpointError(refusal(f"checkpoint {folder.folder}", got, rule, _RESAVE))
    return whole_of([list(_of_rank(rank, size, buffers, model, folder)) for rank in range(size)])


def _of_rank(
    rank: int,
    size: int,
    buffers: Mapping[_Buffer, list[FlatBucket]],
    model: Mapping[str, NamedTensor],
    folder: DcpFolder,
) -> Iterator[Located]:
    placements = {name: _placement_of(name, tensor, (rank, size)) for name, tensor in model.items()}
    known = {name: placement for name, placement in placements.items() if placement is not None}
    candidates = [
        Candidate(placement, model[name].dtype, partial(cut, placement, model[name].dtype, model[name].read))
        for name, placement in known.items()
    ]
    mine = [buckets for (group, *_), buckets in sorted(buffers.items()) if group % size == rank]
    orders = [*_orders_in_files([model[name] for name in known]), *layer_orders(list(known))]
    yield from locate(mine, candidates, orders, str(folder.folder))


def _sharded_buffers(folder: DcpFolder) -> dict[_Buffer, list[FlatBucket]]:
    keys: dict[tuple[_Buffer, int, str], dict[str, str]] = {}
    for key in folder.tensors:
        match = _BUCKET.fullmatch(key)
        if match:
            place = (int(match["group"]), match["chain"], int(match["buffer"]))
            kind = MAIN if match["kind"] == "param" else match["kind"]
            keys.setdefault((place, int(match["bucket"]), match["dtype"]), {})[kind] = key
    found: dict[_Buffer, list[FlatBucket]] = {}
    for (place, number, dtype), of_kind in sorted(keys.items(), key=lambda item: item[0]):
        where = f"{number} of buffer {place[2]} of group {place[0]} in {folder.folder}"
        found.setdefault(place, []).append(_sharded(folder, of_kind, getattr(torch, dtype), where))
    return found


def _sharded(folder: DcpFolder, keys: Mapping[str, str], dtype: torch.dtype, where: str) -> FlatBucket:
    shape = folder.tensors[keys[MAIN]].shape if MAIN in keys else ()
    if len(shape) != 1:
        got, rule = f"of shape {list(shape)}", "be one row of elements, as megatron-core saves since 0.15"
        raise CheckpointError(refusal(f"bucket {where}", got, rule, _RESAVE))

    def read(kind: str, span: Span) -> Tensor:
        return folder.read_box(keys[kind], Box((span.start,), (span.numel,)))

    kinds = {kind: folder.tensors[key].dtype for kind, key in keys.items()}
    return FlatBucket.of(Flat(kinds, read), shape[0], dtype, where, is_one_bucket=True)


def _gathered_buffers(folder: DcpFolder) -> dict[_Buffer, list[FlatBucket]]:
    found: dict[_Buffer, list[FlatBucket]] = {}
    for group, state in objects_of(folder, "param_state"):
        for number, buckets in enumerate(coalesced(state, f"of group {group} in {folder.folder}"), len(found)):
            found[group, "", number] = buckets
    return found


def _tensor_size(model: Mapping[str, NamedTensor], args: Any) -> int:
    """The tensor-parallel size: that of the arguments, or the number of parts of the vocabulary.

    A gated projection is cut into twice as many parts.
    """
    told = attribute(args, "tensor_model_parallel_size")
    cuts = [tensor.cuts[0] for name, tensor in model.items() if name.endswith("word_embeddings.weight")]
    return int(told) if told else next(iter(cuts), 1)


def _placement_of(name: str, tensor: NamedTensor, cut: tuple[int, int]) -> Placement | None:
    """The placement of a tensor; None for one that is cut in another way, such as experts."""
    (rank, size), dims = cut, [dim for dim, parts in enumerate(tensor.cuts) if parts > 1]
    if not dims or size == 1:
        return Placement(name, tensor.shape)
    stride, rest = divmod(tensor.cuts[dims[0]], size)
    shape = tuple(numel // size if dim == dims[0] else numel for dim, numel in enumerate(tensor.shape))
    if len(dims) > 1 or rest or stride not in (1, 2) or tensor.shape[dims[0]] % (size * stride):
        return None
    return Placement(name, shape, dims[0], rank, size, stride)


def _orders_in_files(tensors: Sequence[NamedTensor]) -> list[Order]:
    """A rank saves in the order of registration. Ranks may have shared the work, so that each has only some params."""
    by_writer: dict[str, list[int]] = {}
    for number, tensor in enumerate(tensors):
        match = _WRITER.fullmatch(tensor.writer)
        by_writer.setdefault(match[1] if match else "", []).append(number)
    found: list[Order] = []
    for numbers in by_writer.values():
        in_order = sorted(numbers, key=lambda number: tensors[number].place)
        found.append({number: rank for rank, number in enumerate(in_order)})
    return found
