"""How `diff` shows two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_distopt.checkpoint.manifest import MAIN, kind_of, name_of
from megatron_distopt.plugin.commands.compare import Difference
from megatron_distopt.plugin.commands.compared import Compared, Pair
from megatron_distopt.plugin.commands.places import Place
from megatron_distopt.plugin.commands.settings import Setting
from megatron_distopt.plugin.commands.show import Column, counted, facts, listed, number_text, table

__all__ = ["lines"]

#: More tensors of a kind than this are only counted; --json has all.
_LISTED = 20
#: Params that one text is about, before they are only counted.
_NAMED = 8


def lines(places: tuple[Place, Place], compared: Compared, width: int | None) -> list[str]:
    """For people.

    Args:
        places: of both checkpoints.
        compared: the outcome.
        width: of the terminal in characters; None for any.
    """
    heads = [
        (side, f"{place.path}{', ' * bool(place.chosen)}{place.chosen}")
        for side, place in zip("AB", places, strict=True)
    ]
    only = [("A", _only(compared.only_first)), ("B", _only(compared.only_second))]
    notes = list(_notes(compared.pairs))
    parts = [
        ["checkpoints", *facts(heads, width)],
        ["settings that differ", *_setting_lines(compared.settings, width)] if compared.settings else [],
        ["params in one alone", *facts(only, width)] if any(text for _, text in only) else [],
        ["shapes and dtypes that differ", *facts(notes, width)] if notes else [],
        *([] if compared.is_equal else _kind_parts(compared.pairs, width)),
    ]
    return [line for part in parts if part for line in [*part, ""]] + [_verdict(compared)]


def _only(keys: Sequence[str]) -> str:
    kinds: dict[str, list[str]] = {}
    for key in keys:
        kinds.setdefault(name_of(key), []).append(kind_of(key))
    return listed([f"{name} ({', '.join(kinds[name])})" for name in kinds], most=_NAMED)


def _notes(pairs: Sequence[Pair]) -> Iterator[tuple[str, str]]:
    """What differs beside values: param by param, or how many where it is the same of many."""
    all_kinds = dict.fromkeys(kind_of(pair.key) for pair in pairs)
    for note in dict.fromkeys(pair.note for pair in pairs if not pair.is_alike):
        keys = [pair.key for pair in pairs if pair.note == note]
        kinds = dict.fromkeys(map(kind_of, keys))
        names = list(dict.fromkeys(map(name_of, keys)))
        part = "" if kinds == all_kinds else f" ({', '.join(kinds)})"
        for name in names if len(names) <= _NAMED else [f"{len(names):,} params"]:
            yield f"{name}{part}", note


def _setting_lines(settings: Sequence[Setting], width: int | None) -> list[str]:
    columns = [Column("what", is_left=True), Column("A"), Column("B"), Column("params")]
    rows = [
        [each.what, _said(each.first), _said(each.second), f"{len(each.names):,}" if each.names else ""]
        for each in settings
    ]
    return table(columns, rows, width)


def _said(value: object) -> str:
    return "not said" if value is None else number_text(value)


def _kind_parts(pairs: Sequence[Pair], width: int | None) -> Iterator[list[str]]:
    """A table for every kind that differs, and a line for those that do not."""
    equal: list[str] = []
    for kind in dict.fromkeys(kind_of(pair.key) for pair in sorted(pairs, key=lambda pair: _order(pair.key))):
        of_kind = [pair for pair in pairs if kind_of(pair.key) == kind]
        differ = sorted((pair for pair in of_kind if not pair.has_equal_values), key=lambda pair: pair.order)
        if differ:
            yield [f"{kind}: {len(differ):,} of {counted(len(of_kind), 'tensor')} differ", *_table(differ, width)]
        else:
            equal.append(kind)
    if equal:
        yield [f"{', '.join(equal)}: equal to the bit"]


def _order(key: str) -> tuple[bool, str]:
    return kind_of(key) != MAIN, kind_of(key)


def _table(differ: Sequence[Pair], width: int | None) -> list[str]:
    columns = [
        Column("param", is_left=True),
        Column("max |A-B|"),
        Column("/ max |A|"),
        Column("elements", is_optional=True),
    ]
    rows = [_row(name_of(pair.key), pair.difference) for pair in differ[:_LISTED] if pair.difference is not None]
    more = f"  and {len(differ) - _LISTED:,} more: --json has all"
    return [*table(columns, rows, width), *([more] if len(differ) > _LISTED else [])]


def _row(name: str, found: Difference) -> list[str]:
    return [name, f"{found.largest:.3g}", f"{found.relative:.2g}", f"{found.count:,} of {found.numel:,}"]


def _verdict(compared: Compared) -> str:
    pairs, alone = compared.pairs, {name_of(key) for key in (*compared.only_first, *compared.only_second)}
    if compared.is_equal:
        params = len({name_of(pair.key) for pair in pairs})
        return f"equal to the bit: {counted(params, 'param')}, {counted(len(pairs), 'tensor')} and all settings"
    found = (
        ("values of ", sum(not pair.has_equal_values for pair in pairs), "tensor"),
        ("shapes or dtypes of ", sum(not pair.is_alike for pair in pairs), "tensor"),
        ("tensors in one alone of ", len(alone), "param"),
        ("", len(compared.settings), "setting"),
    )
    return f"different: {', '.join(said + counted(count, noun) for said, count, noun in found if count)}"
