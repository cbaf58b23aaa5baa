"""The way back: the newest snapshot that the nodes together have whole, loaded at whatever parallel
sizes the run has.

Nothing of the running state changes before every file that is needed is on the node that reads it,
with the bytes that its rank once wrote. In place of a damaged copy the other node's is used, and in
place of a damaged or incomplete snapshot the one before it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_distopt.checkpoint.folder import check_complete
from megatron_distopt.checkpoint.load import check_state, loadable_files, take_checked
from megatron_distopt.checkpoint.load_plan import LoadPlan
from megatron_distopt.checkpoint.manifest import Manifest, join
from megatron_distopt.checkpoint.protect.nodes import Nodes
from megatron_distopt.checkpoint.protect.snapshots import (
    ENDED,
    FORM,
    NUM_RANKS,
    Snapshot,
    form_of,
    held,
    key_of_state,
    unpacked,
)
from megatron_distopt.checkpoint.protect.transfer import Connections, receive_copy, send_copy
from megatron_distopt.checkpoint.source import read_saved
from megatron_distopt.checkpoint.whole_model import WholeModel
from megatron_distopt.comm import all_gather_objects, all_gather_results, raise_together
from megatron_distopt.errors import CheckpointError
from megatron_distopt.layout import Box

_log = logging.getLogger("megatron_distopt")


@dataclass(frozen=True)
class Resumed:
    """What a run goes on from."""

    step: int  # number of steps that were done
    # what this rank's `state` returned then; that of rank 0 if the parallel sizes have changed
    state: Any
    is_same_size: bool  # whether the parallel sizes are those of the run that was saved


@dataclass(frozen=True)
class Copies:
    """The copies of a snapshot that are whole."""

    snapshot: Snapshot
    nodes_of: dict[int, list[int]]  # by rank that wrote it: the nodes that have a copy
    parts: dict[int, Manifest]  # by the same
    damages: list[str]  # what is wrong with the other copies

    def joined(self) -> Manifest:
        """The manifest of all of them; file k is that of rank k.

        Raises:
            CheckpointError: together they are not the whole model.
        """
        size = max((int(part.about[NUM_RANKS]) for part in self.parts.values()), default=1)
        missing = [str(rank) for rank in range(size) if rank not in self.parts]
        if missing:
            raise CheckpointError(
                f"The snapshot of step {self.snapshot.step} has no whole copy of rank "
                f"{', '.join(missing)}. An older snapshot will be tried."
            )
        manifest = join([self.parts[rank] for rank in range(size)])
        check_complete(manifest)
        return manifest


def restore(
    base: Path,
    lines: Connections,
    whole: Callable[[], WholeModel],
    newer_than: int,
    prepare: Callable[[Manifest], None],
) -> tuple[Snapshot, Resumed] | None:
    """Collective: loads the newest snapshot that can be taken; None, and nothing has changed, where
    there is none.

    Says on rank 0 where the state came from, or why none was taken.
    """
    start, nodes = time.monotonic(), lines.nodes
    here = held(base)
    end_here = [path.read_text(encoding="utf-8") for path in base.glob(ENDED)]
    listings, ends = zip(*all_gather_objects((list(here), end_here), nodes.group), strict=True)
    ended = list(chain(*ends))[:1]  # how the run before ended, as a node says it
    found = sorted({snapshot for listing in listings for snapshot in listing}, reverse=True)
    passed_over = [
        f"step {each.step} is not newer than {newer_than}"
        for each in found
        if each.step <= newer_than
    ]
    damages = list[str]()
    for snapshot in found[: len(found) - len(passed_over)]:
        folder = snapshot.folder(base)
        copies = _whole_copies(base, snapshot, here.get(snapshot, []), nodes)
        damages += copies.damages
        try:
            manifest = copies.joined()
            prepare(manifest)
            model = whole()
            is_same = (
                model.about.items() <= manifest.about.items()
                and len(manifest.files) == nodes.group.size
            )
            key = key_of_state(nodes.group.rank if is_same else 0)
            opened = partial(loadable_files, folder, manifest)
            plan = check_state(opened, model, nodes.group)
            num_moved = _bring(base, copies, plan, key, lines)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, all ranks go further together
            passed_over.insert(0, str(error))
            continue
        take_checked(plan, nodes.group)
        state = raise_together(partial(_read_state, folder, manifest, key), nodes.group, "resume")
        text = (
            f"resumed at step {snapshot.step} from memory: {len(manifest.files)} files, "
            f"{num_moved} of them brought to another node, "
            f"{time.monotonic() - start:.1f} s"
        )
        others = [] if is_same else ["the parallel sizes have changed"]
        if (was := manifest.about.get(FORM)) not in (None, form_of(model)):
            others.append(f"the state was saved as {was} and continues as {form_of(model)}")
        _tell("; ".join((text, *others, *ended, *passed_over, *_in_brief(damages))), nodes)
        return snapshot, Resumed(snapshot.step, state, is_same)
    if found or ended or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        why = [*ended, *passed_over, *_in_brief(damages)] or ["there is none"]
        _tell("; ".join(("no snapshot in memory is used", *why)), nodes)
    return None


def _tell(text: str, nodes: Nodes) -> None:
    if nodes.group.rank == 0:
        _log.warning("%s", text)


def _in_brief(damages: Sequence[str]) -> list[str]:
    """What the line of a start says of copies that are not whole: files of large runs are many."""
    return [f"{len(damages)} copies are damaged, for example: {damages[0]}"] if damages else []


def _read_state(folder: Path, manifest: Manifest, key: str) -> Any:
    return unpacked(read_saved(folder, manifest, key, Box.whole(manifest.tensors[key].shape)))


def _whole_copies(base: Path, snapshot: Snapshot, here: Sequence[int], nodes: Nodes) -> Copies:
    """Collective: checks every copy of a snapshot, each on its node by one of the ranks there."""
    own, good, damages = nodes.own, dict[int, Manifest](), list[str]()
    for rank in here[own.index(nodes.group.rank) :: len(own)]:
        try:
            good[rank] = snapshot.checked(base, rank)
        except CheckpointError as error:
            damages.append(str(error))
    copies = Copies(snapshot, {}, {}, [])
    for reader, (of_reader, damages_there) in enumerate(
        all_gather_objects((good, damages), nodes.group)
    ):
        copies.damages.extend(damages_there)
        for rank, part in of_reader.items():
            copies.nodes_of.setdefault(rank, []).append(nodes.numbers[reader])
            copies.parts[rank] = part
    return copies


def _bring(base: Path, copies: Copies, plan: LoadPlan, state: str, lines: Connections) -> int:
    """Collective: brings the files that a node needs and lacks there; returns how many they are.

    `state` is the key of the training state that this rank reads.

    Raises:
        Exception: on all ranks: a node has no room.
    """
    group, tensors = lines.nodes.group, plan.state.manifest.tensors

    def needed() -> set[int]:
        copies.snapshot.folder(base).mkdir(exist_ok=True)
        keys = [state, *(key for saved in plan.saved.values() for key in saved.owned)]
        read_whole = {chunk.file for key in keys for chunk in tensors[key].chunks}
        return read_whole.union(read.chunk.file for read in plan.reads)

    moves = _moves(copies, all_gather_results(needed, group, "resume"), lines.nodes)
    raise_together(lambda: _move(base, copies, moves, lines), group, "resume")
    return len(moves)


@dataclass(frozen=True, order=True)
class _Move:
    """One file that is brought to a node."""

    sender: int
    receiver: int
    file: int  # the rank that wrote it


def _moves(copies: Copies, wanted: Sequence[Iterable[int]], nodes: Nodes) -> list[_Move]:
    """The files that nodes lack, the same list on all ranks: the work is spread over the ranks of
    both nodes."""
    moves = []
    for node in range(nodes.num_nodes):
        there = nodes.ranks(node)
        lacking = sorted(
            {file for rank in there for file in wanted[rank] if node not in copies.nodes_of[file]}
        )
        for number, file in enumerate(lacking):
            sources = nodes.ranks(copies.nodes_of[file][number % len(copies.nodes_of[file])])
            moves.append(_Move(sources[number % len(sources)], there[number % len(there)], file))
    return sorted(moves)


def _move(base: Path, copies: Copies, moves: Sequence[_Move], lines: Connections) -> None:
    """Sends and receives in one order on all ranks, so that nobody waits for one that waits for
    it."""
    own = lines.nodes.group.rank
    for move in moves:
        if own == move.sender:
            send_copy(
                lines.to(move.receiver),
                copies.snapshot.file(base, move.file),
                copies.parts[move.file],
            )
        elif own == move.receiver:
            receive_copy(lines.to(move.sender), copies.snapshot, base, move.file)
