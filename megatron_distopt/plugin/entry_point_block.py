"""The block of code with which a fork finds installed packages, see plugin/entry_point.py.

It follows the fork's `get_megatron_optimizer` and runs on Python 3.8, which a fork may use. If no
package registers itself, it does not change the function. `plugin/fork_edit.py` inserts and removes
it.
"""

from __future__ import annotations

import re

GROUP = "megatron.optimizer_factories"
BEGIN = f"# >>> {GROUP} (put in by: megatron-distopt patch --apply; taken out by: --undo)"
END = f"# <<< {GROUP}"

#: Python 3.8 and 3.9 list an entry point twice if an installed package is also on the path.
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
    """Finds the complete and unedited block, as a slice of bytes; None if there is none.

    If the function ends a file without a final newline, the newline before the block belongs to the
    block.
    """
    markers = [line for line in content.splitlines() if line in (BEGIN.encode(), END.encode())]
    whole = rb"\1".join(re.escape(line.encode()) for line in BLOCK)
    found = re.search(rb"(\r\n|\n|\r)" + whole + rb"(\1|\Z)", content)
    if found is None or markers != [BEGIN.encode(), END.encode()]:
        return None
    return slice(found.end(1) if found[2] else found.start(), found.end())
