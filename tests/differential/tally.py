"""What came of many programs, in numbers."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from tests.differential.compare import Outcome
from tests.differential.programs import Program


@dataclass
class Tally:
    """Counts programs by outcome, refusals by message, and programs by what they contain."""

    outcomes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    idioms: Counter[str] = field(default_factory=Counter)

    def add(self, program: Program, outcome: Outcome) -> None:
        """Counts one program."""
        self.outcomes["equal to the bit" if outcome.is_exact else outcome.kind] += 1
        self.idioms.update(program.idioms)
        if outcome.kind == "refused":
            self.refusals[first_words(outcome.text)] += 1

    @property
    def num_equal(self) -> int:
        """Programs that gave what the reference gave."""
        return self.outcomes["equal to the bit"] + self.outcomes["equal"]

    def lines(self) -> list[str]:
        """For a person."""
        yes = [f"{number} {kind}" for kind, number in self.outcomes.most_common()]
        refused = [f"  {number:4} {text}" for text, number in self.refusals.most_common()]
        contained = ", ".join(f"{word} {number}" for word, number in sorted(self.idioms.items()))
        return [f"{self.outcomes.total()} programs: {', '.join(yes)}", *refused, f"programs with: {contained}"]


def first_words(text: str) -> str:
    """A message without what differs from program to program.

    >>> first_words("LayoutError: Invalid param 'first.layer.weight': frozen on rank 2. Unfreeze it.")
    "LayoutError: Invalid param '…': frozen on rank #."
    """
    text = re.sub(r"'[^']*'", "'…'", text.partition("\n")[0])
    text = re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", text)
    return re.split(r"(?<=\.) ", text)[0][:120]
