"""How `inspect` shows a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_distopt.checkpoint.manifest import FileRecord
from megatron_distopt.checkpoint.param_groups import GroupRecord
from megatron_distopt.plugin.commands.held import Held
from megatron_distopt.plugin.commands.settings import settings_of
from megatron_distopt.plugin.commands.show import (
    Column,
    counted,
    facts,
    listed,
    number_text,
    options_text,
    ranges,
    size_text,
    table,
)
from megatron_distopt.plugin.commands.tree import Param, Row, rows

__all__ = ["lines"]

#: More files than this are not listed one by one.
_FILES_LISTED = 16


def lines(held: Held, params: Sequence[Param], width: int | None) -> list[str]:
    """For people.

    Args:
        held: the checkpoint.
        params: its params.
        width: of the terminal in characters; None for any.
    """
    parts = [
        ["checkpoint", *facts(_head(held, params), width)],
        ["param groups", *_group_lines(held.manifest.groups, params, width)],
        _param_lines(params, width),
        ["files", *_file_lines(held, width)] if held.manifest.files else [],
    ]
    return [line for part in parts if part for line in [*part, ""]][:-1]


def _head(held: Held, params: Sequence[Param]) -> Iterator[tuple[str, str]]:
    manifest = held.manifest
    skipped = f"; {manifest.num_skipped:,} skipped beside them" if manifest.num_skipped else ""
    kept = {_kept(param) for param in params}
    yield "where", str(held.place.path)
    yield "which", held.place.chosen
    yield "written by", options_text({key: said for key, said in manifest.about.items() if isinstance(said, str)})
    yield "layout", options_text({key: said for key, said in manifest.about.items() if not isinstance(said, str)})
    yield "optimizer", manifest.inner
    yield "steps", listed(list(dict.fromkeys(_step(group) for group in manifest.groups))) + skipped
    yield "loss scale", options_text(manifest.loss_scale) or "none, or one that never changes"
    numel, nbytes = sum(param.numel for param in params), sum(param.nbytes for param in params)
    yield "size", f"{counted(len(params), 'param')}, {counted(numel, 'element')}, {size_text(nbytes)} of state"
    yield "of each", kept.pop() if len(kept) == 1 else ""


def _kept(param: Param) -> str:
    """
    >>> _kept(Param("w", (), 1, 12, {"main": "float32", "exp_avg": "bfloat16", "exp_avg_sq": "bfloat16"}, 0))
    'main in float32; exp_avg, exp_avg_sq in bfloat16'
    """
    by_dtype: dict[str, list[str]] = {}
    for kind, dtype in param.kinds.items():
        by_dtype.setdefault(dtype, []).append(kind)
    return "; ".join(f"{', '.join(kinds)} in {dtype}" for dtype, kinds in by_dtype.items())


def _group_lines(groups: Sequence[GroupRecord], params: Sequence[Param], width: int | None) -> list[str]:
    """What differs between groups as columns, what does not below them."""
    if not groups:
        return ["  none"]
    settings = [{**settings_of(group), "step": _step(group)} for group in groups]
    keys = list(dict.fromkeys(key for each in settings for key in each))
    same = [key for key in keys if all(key in each and each[key] == settings[0][key] for each in settings)]
    columns = [Column(title) for title in ("group", "params", "elements", *(key for key in keys if key not in same))]
    numels = [sum(param.numel for param in params if param.group == number) for number in range(len(groups))]
    lines = [
        [str(number), f"{len(group.names):,}", f"{numels[number]:,}"]
        + [number_text(settings[number].get(key, "")) for key in keys if key not in same]
        for number, group in enumerate(groups)
    ]
    drawn = table(columns, lines)
    if width is not None and any(len(line) > width for line in drawn):
        heads = ("params", *(column.title for column in columns[2:]))
        drawn = facts([(line[0], ", ".join(map(" ".join, zip(heads, line[1:], strict=True)))) for line in lines], width)
    return [*drawn, *facts([("  all", options_text({key: settings[0][key] for key in same}))], width)]


def _step(group: GroupRecord) -> str:
    return "not counted" if group.step is None else str(group.step)


def _param_lines(params: Sequence[Param], width: int | None) -> list[str]:
    is_same = len({_kept(param) for param in params}) == 1
    columns = [
        Column("name", is_left=True),
        Column("shape"),
        Column("size"),
        Column("group"),
        Column("elements", is_optional=True),
        Column("files", is_left=True, is_optional=True),
        Column("kept", is_left=True, is_optional=True),
    ]
    drawn = rows(params)
    heading = "params; below those that are alike, one of them" if any(row.depth for row in drawn) else "params"
    return [heading, *table(columns, [_param_row(row, is_same=is_same) for row in drawn], width)]


def _param_row(row: Row, *, is_same: bool) -> list[str]:
    shape = [] if row.param is None else [str(list(row.param.shape))]
    times = [f"{row.count} alike"] if row.count > 1 and row.param is None else [f"{row.count} x"] * (row.count > 1)
    files = ranges(row.files)
    return [
        "  " * row.depth + row.label,
        " ".join([*times, *shape]),
        size_text(row.nbytes),
        "" if row.param is None else "none" if row.param.group is None else str(row.param.group),
        f"{row.numel:,}",
        files if len(files) <= 12 else f"{len(row.files)} files",
        "" if row.param is None or is_same else _kept(row.param),
    ]


def _file_lines(held: Held, width: int | None) -> list[str]:
    files = held.manifest.files
    if len(files) <= _FILES_LISTED:
        lines = [[str(at), file.name, size_text(file.nbytes), _fault(held, file)] for at, file in enumerate(files)]
        columns = [Column("file"), Column("name", is_left=True), Column("size"), Column("", is_left=True)]
        return table(columns, lines, width)
    sizes = sorted(file.nbytes for file in files)
    faults = [f"{file.name} {_fault(held, file)}" for file in files if _fault(held, file)]
    said = f"{files[0].name} to {files[-1].name}, {size_text(sizes[0])} to {size_text(sizes[-1])} each"
    return facts([(f"{len(files):,} files", said), ("not whole", listed(faults, most=8))], width)


def _fault(held: Held, file: FileRecord) -> str:
    found = held.sizes.get(file.name)
    if found is None:
        return "is missing"
    return "" if found == file.nbytes else f"has {found:,} bytes, not {file.nbytes:,}"
