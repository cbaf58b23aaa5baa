"""What the user sees while it trains: a bar on a terminal, a line every few seconds anywhere
else."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from byte_gpt.records import Iteration

SECONDS_BETWEEN_LINES = 10.0
Report = Callable[[Iteration], None]


@contextmanager
def reporting(title: str, iterations: int, *, rank: int) -> Iterator[Report]:
    """The function to call after each iteration. Ranks other than 0 say nothing."""
    if rank != 0:
        yield lambda iteration: None
        return
    print(title, flush=True)
    if Console().is_terminal:
        with _bar() as bar:
            task = bar.add_task(title, total=iterations, figures="")
            yield lambda iteration: bar.update(
                task, completed=iteration.iteration, figures=figures(iteration)
            )
    else:
        yield _lines(iterations)


def figures(iteration: Iteration) -> str:
    """Short enough for a terminal of 80 columns beside the bar; lr and norm: learning rate and
    gradient norm."""
    norm = "skipped" if iteration.grad_norm is None else f"{iteration.grad_norm:.2f}"
    speed = f"{iteration.tokens_per_second:,.0f} tokens/s"
    return f"loss {iteration.loss:.3f} | lr {iteration.learning_rate:.1e} | norm {norm} | {speed}"


def _bar() -> Progress:
    text = TextColumn("{task.fields[figures]}")
    return Progress(
        BarColumn(bar_width=10), MofNCompleteColumn(), text, TimeRemainingColumn(compact=True)
    )


def _lines(iterations: int) -> Report:
    last_line = 0.0

    def report(iteration: Iteration) -> None:
        nonlocal last_line
        is_end = iteration.iteration in (1, iterations)
        if not is_end and time.monotonic() - last_line < SECONDS_BETWEEN_LINES:
            return
        last_line = time.monotonic()
        left = iteration.seconds / iteration.iteration * (iterations - iteration.iteration)
        print(
            f"{iteration.iteration}/{iterations} | {figures(iteration)} | {left:.0f} s left",
            flush=True,
        )

    return report
