"""`megatron-distopt convert`: a checkpoint in another format, by `checkpoint/exchange`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from megatron_distopt.checkpoint.exchange import Converted, convert, open_any
from megatron_distopt.plugin.commands.answer import Answer
from megatron_distopt.plugin.commands.places import Place, find
from megatron_distopt.plugin.commands.progress import Progress
from megatron_distopt.plugin.commands.show import facts
from megatron_distopt.plugin.commands.tensors import nbytes_of

__all__ = ["answer"]


def answer(parsed: argparse.Namespace) -> Answer:
    """Reads one checkpoint and writes another.

    Raises:
        CheckpointError: it cannot be read, or cannot become what is wanted; nothing is written then.
    """
    place = find(parsed.source)
    source = open_any(place.path, resume_step=parsed.resume_step)
    with Progress("converting", sum(map(nbytes_of, source.tensors.values()))) as progress:
        done = convert(
            place.path, parsed.target, parsed.to, progress=progress, dp=parsed.dp, resume_step=parsed.resume_step
        )
    document = {
        "source": str(place.path),
        "chosen": place.chosen,
        "found": done.found,
        "target": str(done.path),
        "written": done.written,
        "is_iteration": done.is_iteration,
    }
    return Answer(document, lambda width: ["converted", *facts(_rows(place, done), width)])


def _rows(place: Place, done: Converted) -> Iterator[tuple[str, str]]:
    yield "from", f"{place.path} ({done.found})"
    yield "which", place.chosen
    yield "to", f"{done.path} ({done.written})"
    yield "next", _next(done)


def _next(done: Converted) -> str:
    """How a run, or a script, takes it."""
    if done.written == "torch":
        return f"torch.load({str(done.path)!r}, weights_only=True)"
    if done.is_iteration:
        return "move it to iter_NNNNNNN in a --load folder whose latest_checkpointed_iteration.txt says that number"
    return "move it to distrib_optim.distopt in the folder of its iteration, beside the model's files"
