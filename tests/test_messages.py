"""How the messages of the package are written: what scripts/messages.py lists.

What a message says of a fault is in the test of that fault.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.messages import Message, messages

MOST_SENTENCES = 3
#: A sentence ends before a capital letter, or a value that begins the next one.
_END = re.compile(r"[.?!] (?=[A-Z{'\"])")
#: Forms that are no English sentences, with an example of each.
TELEGRAMS = {
    r"^Invalid .*: ": "Invalid bucket_size: 100.",
    r"(^|\. )Must ": "bucket_size is 100. Must be alike.",
    r"\bhas not\b(?! been)": "3 params that the model has not.",
    r"\bmust be of (it|them)\b": "3 params, which must be of it.",
    r"\bnobody\b": "An option that nobody knows.",
    r"\bReport this\.": "Two tensors overlap. Report this.",
}
MESSAGES = list(messages())


def num_sentences(text: str) -> int:
    return len(_END.split(text.strip()))


def shown(found: list[Message]) -> str:
    return ", ".join(f"{each.file}:{each.line}" for each in found)


def test_list_when_made_then_it_has_a_known_message_with_its_file() -> None:
    known = "Cannot {action}: {error}. {remedy}."
    assert [each.file for each in MESSAGES if each.text == known] == ["checkpoint/disk.py"]


def test_list_when_a_file_has_texts_of_all_kinds_then_docstrings_and_single_words_are_left_out(
    tmp_path: Path,
) -> None:
    (tmp_path / "file.py").write_text(
        '"""Docstring of a file."""\n'
        "def check(size):\n"
        '    """Checks the size here."""\n'
        "    kind = 'two words'\n"
        "    other = 'one of these'\n"
        "    raise ValueError(\n"
        '        f"{kind} is {size!r}. "\n'
        '        f"Write {other}."\n'
        "    )\n",
        encoding="utf-8",
    )
    assert list(messages(tmp_path)) == [
        Message("file.py", 5, "one of these"),
        Message("file.py", 7, "{kind} is {size}. Write {other}."),
    ]


def test_messages_when_counted_then_none_has_more_sentences_than_a_user_reads() -> None:
    in_one_line = [each for each in MESSAGES if "\n" not in each.text]  # others are pages of help
    long = [each for each in in_one_line if num_sentences(each.text) > MOST_SENTENCES]
    assert not long, shown(long)


def test_sentences_when_counted_then_abbreviations_and_numbers_do_not_end_one() -> None:
    assert num_sentences("lr is 0.5 e.g. here. {remedy}. Write 'lr'? Write it.") == 4


@pytest.mark.parametrize("form", TELEGRAMS)
def test_messages_when_searched_then_none_is_a_telegram(form: str) -> None:
    assert re.search(form, TELEGRAMS[form])
    found = [each for each in MESSAGES if re.search(form, each.text)]
    assert not found, shown(found)
