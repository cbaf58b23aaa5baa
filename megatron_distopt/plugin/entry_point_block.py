"""The block of text that lets a fork find packages by itself, see plugin/entry_point.py.

It comes right after the fork's `get_megatron_optimizer`, runs on Python 3.8, which a fork may use,
and leaves the function as it is where no package registers itself. `plugin/fork_edit.py` puts it
in and takes it out.
"""

from __future__ import annotations

import re

GROUP = "megatron.optimizer_factories"
BEGIN = f"# >>> {GROUP} (put in by: megatron-distopt patch --apply; taken out by: --undo)"
END = f"# <<< {GROUP}"

#: One entry point may be listed twice on Python 3.8 and 3.9, where an installed package also lies
#: on the path.
BLOCK = (
    BEGIN,
    "def _with_optimizer_factories(factory):",
    "    from importlib.metadata import entry_points",
    f'    group, found = "{GROUP}", entry_points()',
    '    found = found.select(group=group) if hasattr(found, "select") else found.get(group, ())',
    "    for _, entry in sorted({(entry.name, entry.value): entry for entry in found}.items()):",
    "        factory = entry.load()(factory)",
    "    return factory",
    "",
    "",
    "get_megatron_optimizer = _with_optimizer_factories(get_megatron_optimizer)",
    END,
)


def as_bytes(newline: bytes) -> bytes:
    """Returns the block with a file's own newlines, one after every line."""
    return b"".join(line.encode("ascii") + newline for line in BLOCK)


def has_marker(content: bytes) -> bool:
    return any(line in (BEGIN.encode(), END.encode()) for line in content.splitlines())


def intact_block(content: bytes) -> slice | None:
    """Finds the one whole and unedited block, in bytes; returns None where there is none.

    Where the function was the last of a file without a final newline, the newline before the block
    belongs to it.
    """
    markers = [line for line in content.splitlines() if line in (BEGIN.encode(), END.encode())]
    whole = rb"\1".join(re.escape(line.encode()) for line in BLOCK)
    found = re.search(rb"(\r\n|\n|\r)" + whole + rb"(\1|\Z)", content)
    if found is None or markers != [BEGIN.encode(), END.encode()]:
        return None
    return slice(found.end(1) if found[2] else found.start(), found.end())
