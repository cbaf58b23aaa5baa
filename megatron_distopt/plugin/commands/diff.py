"""`megatron-distopt diff`: in what two checkpoints differ, and by how much."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from megatron_distopt.plugin.commands.answer import Answer
from megatron_distopt.plugin.commands.compared import Compared, Pair, compare_all
from megatron_distopt.plugin.commands.diff_text import lines
from megatron_distopt.plugin.commands.places import Place, find, open_place

__all__ = ["answer"]


def answer(parsed: argparse.Namespace) -> Answer:
    """Reads both.

    Raises:
        CheckpointError: one is none, or is damaged.
    """
    places = find(parsed.first), find(parsed.second)
    compared = compare_all(open_place(places[0]), open_place(places[1]))
    document = _document(places, compared)
    return Answer(document, lambda width: lines(places, compared, width), status=0 if compared.is_equal else 1)


def _document(places: Iterable[Place], compared: Compared) -> dict[str, Any]:
    return {
        "checkpoints": [str(place.path) for place in places],
        "is_equal": compared.is_equal,
        "settings": [*map(asdict, compared.settings)],
        "only_in_first": list(compared.only_first),
        "only_in_second": list(compared.only_second),
        "tensors": [_pair_document(pair) for pair in sorted(compared.pairs, key=lambda pair: pair.order)],
    }


def _pair_document(pair: Pair) -> dict[str, Any]:
    found = pair.difference
    numbers = {} if found is None else {**asdict(found), "relative": found.relative}
    is_equal = pair.is_alike and pair.has_equal_values
    return {"key": pair.key, "is_equal": is_equal, **numbers, "note": pair.note}
