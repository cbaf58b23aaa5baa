"""`megatron-distopt convert`: a checkpoint in another format, by `formats/`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from megatron_distopt.cli.checkpoints import CheckpointPath, find, nbytes_of
from megatron_distopt.cli.show import Answer, Progress, facts, titled
from megatron_distopt.formats import Converted, convert, open_any

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
    return Answer(document, [titled("converted", facts(_rows(place, done)))])


def _rows(place: CheckpointPath, done: Converted) -> Iterator[tuple[str, str]]:
    yield "from", f"{place.path} ({done.found})"
    yield "which", place.chosen
    yield "to", f"{done.path} ({done.written})"
    yield "next", _next(done)


def _next(done: Converted) -> str:
    """Says how a run or a script uses the result."""
    if done.written == "torch":
        return f"torch.load({str(done.path)!r}, weights_only=True)"
    if done.is_iteration:
        return "move it to iter_NNNNNNN in a --load folder whose latest_checkpointed_iteration.txt says that number"
    return "move it to distrib_optim.distopt in the folder of its iteration, next to the model's files"
