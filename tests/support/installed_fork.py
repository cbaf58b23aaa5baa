"""The small fork with the package installed from one training of ours to the next.

Installing and undoing looks through all modules of the process and through the source of the fork, which costs more
than a training of a few steps. In a rank, in the place of `MiniFork`:

    fork = InstalledFork.imported(file_layout="gathered")
    run = fork.train("--bf16", "--use-distributed-optimizer", ours=True)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import megatron_distopt
from tests.support.mini_fork import MiniFork, TrainingRun


@dataclass(frozen=True)
class InstalledFork(MiniFork):
    """Takes the package out only where the next training is the fork's own.

    Args:
        kept: the installation, while there is one.
    """

    kept: list[megatron_distopt.Installation] = field(default_factory=list)

    def train(
        self, *words: str, ours: bool = True, options: megatron_distopt.DistOptConfig | None = None
    ) -> TrainingRun:
        """Collective: see `MiniFork.train`. With `options`, the package is installed for this training alone."""
        if ours and options is None:
            self.install()
            return super().train(*words, ours=False)
        self.uninstall()
        return super().train(*words, ours=ours, options=options)

    def install(self) -> None:
        if not self.kept:
            self.kept.append(megatron_distopt.install())

    def uninstall(self) -> None:
        while self.kept:
            self.kept.pop().undo()
