"""Params as a tree of names, in which layers that are alike are one line with the lines of one of them below it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_distopt.plugin.commands.show import ranges

__all__ = ["Param", "Row", "in_order", "rows"]


@dataclass(frozen=True)
class Param:
    """All tensors of one param.

    Args:
        name: in the whole model.
        shape: of its first tensor.
        numel: of that one.
        nbytes: of all.
        kinds: dtypes by kind, such as {"main": "float32"}.
        group: number of its param group; None for none.
        files: numbers of the files that hold parts of it.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    nbytes: int
    kinds: Mapping[str, str]
    group: int | None
    files: frozenset[int] = frozenset()

    @property
    def look(self) -> tuple[object, ...]:
        """What is the same for params that are alike."""
        return self.shape, tuple(self.kinds.items()), self.group


@dataclass(frozen=True)
class Row:
    """One line of the tree.

    Args:
        depth: 0 at the left.
        label: the name below that of the row which it belongs to; with ranges, "layers.0-3".
        count: how many are alike; the rows below it, and `numel` of a param, are of one of them.
        numel, nbytes: of the param, or of all that is alike together.
        files: of the param, or of all that is alike.
        param: None for what has rows below it.
    """

    depth: int
    label: str
    count: int
    numel: int
    nbytes: int
    files: frozenset[int]
    param: Param | None = None


_Item = tuple[tuple[str, ...], Param]


def in_order(names: Iterable[str]) -> list[str]:
    """By the alphabet, and numbers by size.

    >>> in_order(["layers.10.w", "layers.9.w"])
    ['layers.9.w', 'layers.10.w']
    """
    return sorted(names, key=_order)


def _order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"[.]", name)]


def rows(params: Sequence[Param]) -> list[Row]:
    """The tree, from top to bottom."""
    by_name = {param.name: param for param in params}
    return list(_rows([(tuple(name.split(".")), by_name[name]) for name in in_order(by_name)], 0))


def _rows(items: Sequence[_Item], depth: int) -> Iterator[Row]:
    """Items below one name, in order."""
    numbered: dict[tuple[str, ...], dict[int, list[_Item]]] = {}
    for parts, param in items:
        prefix, number, rest = _split(parts)
        numbered.setdefault(prefix, {}).setdefault(number, []).append((rest, param))
    for prefix, by_number in numbered.items():
        for numbers, below in _alike(by_number):
            label = ".".join([*prefix, *([ranges(numbers)] if numbers != [-1] else [])])
            yield from _of_one(label, numbers, below, depth)


def _split(parts: tuple[str, ...]) -> tuple[tuple[str, ...], int, tuple[str, ...]]:
    """Before, at and after the first number; -1 where there is none."""
    at = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
    return (parts, -1, ()) if at is None else (parts[:at], int(parts[at]), parts[at + 1 :])


def _alike(by_number: Mapping[int, list[_Item]]) -> Iterator[tuple[list[int], list[list[_Item]]]]:
    """Numbers below which the same names look the same, and the items of each."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, items in by_number.items():
        alike.setdefault(tuple((rest, param.look) for rest, param in items), []).append(number)
    for numbers in alike.values():
        yield numbers, [by_number[number] for number in numbers]


def _of_one(label: str, numbers: Sequence[int], below: Sequence[list[_Item]], depth: int) -> Iterator[Row]:
    params = [param for items in below for _, param in items]
    numel, nbytes = sum(param.numel for param in params), sum(param.nbytes for param in params)
    files = frozenset().union(*(param.files for param in params))
    rest, first = below[0][0]
    if len(params) == 1:
        yield Row(depth, ".".join([label, *rest]), 1, numel, nbytes, files, first)
    elif not rest:
        yield Row(depth, label, len(numbers), first.numel, first.nbytes, files, first)
    else:
        yield Row(depth, label, len(numbers), numel, nbytes, files)
        merged = [_merged([items[at] for items in below]) for at in range(len(below[0]))]
        yield from _rows(merged, depth + 1)


def _merged(items: Sequence[_Item]) -> _Item:
    """One of them, that lies in the files of all."""
    rest, param = items[0]
    return rest, replace(param, files=frozenset().union(*(each.files for _, each in items)))
