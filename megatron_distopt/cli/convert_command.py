"""`megatron-distopt convert`: a checkpoint in another format, by `formats/`."""

from __future__ import annotations

import argparse

from megatron_distopt.cli.checkpoints import open_at
from megatron_distopt.cli.show import Answer, progress_of, rows, titled
from megatron_distopt.formats import convert


def answer(parsed: argparse.Namespace) -> Answer:
    """Reads one checkpoint and writes another; where it cannot be read or written so, nothing is
    written."""
    found = open_at(parsed.source, resume_step=parsed.resume_step)
    with progress_of("converting", found.nbytes) as progress:
        how = {"dp": parsed.dp, "resume_step": parsed.resume_step, "is_averaged": parsed.averaged}
        done = convert(found.path, parsed.target, parsed.to, progress=progress, **how)
    if done.written == "torch":
        use = f"torch.load({str(done.path)!r}, weights_only=True)"
    elif done.is_iteration:
        use = (
            "move it to iter_NNNNNNN in a --load folder, and write that number into its "
            "latest_checkpointed_iteration.txt"
        )
    else:
        use = (
            "move it to distrib_optim.distopt in the folder of its iteration, next to the model's "
            "files"
        )
    document = {
        "source": str(found.path),
        "chosen": found.chosen,
        "found": done.found,
        "target": str(done.path),
        "written": done.written,
        "is_iteration": done.is_iteration,
    }
    facts = [
        ("from", f"{found.path} ({done.found})"),
        ("which", found.chosen),
        ("to", f"{done.path} ({done.written})"),
        ("next", use),
    ]
    return Answer(document, [titled("converted", rows(facts))])
