"""What callers catch, and that docs/errors.md has a row for each exception class with its base."""

from __future__ import annotations

import builtins
import re
from pathlib import Path

import pytest

from megatron_distopt import errors

PAGE = (Path(__file__).parents[1] / "docs" / "errors.md").read_text(encoding="utf-8")
#: Class and second base in the first two columns of the table of classes.
ROWS = dict(re.findall(r"^\| `(\w+)` \| `?(\w*)`? ?\|", PAGE, re.MULTILINE))
CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and value.__module__ == errors.__name__
}


def test_page_when_compared_with_the_classes_then_each_has_a_row_and_no_other() -> None:
    assert set(ROWS) == set(CLASSES)


@pytest.mark.parametrize("name", CLASSES)
def test_row_when_it_names_a_base_then_the_class_has_it(name: str) -> None:
    bases = {base.__name__ for base in CLASSES[name].__mro__[1:]}
    assert ROWS[name] in bases or (
        ROWS[name] == "" and CLASSES[name].__bases__ == (errors.DistOptError,)
    )


@pytest.mark.parametrize(
    ("name", "caught_as"),
    [
        ("ConfigError", "ValueError"),
        ("LayoutError", "ValueError"),
        ("UnknownHostError", "HostError"),
        ("HostMismatchError", "HostError"),
        ("NonFiniteGradError", "FloatingPointError"),
        ("NonFiniteGradError", "ArithmeticError"),
        ("InvariantError", "AssertionError"),
    ],
)
def test_error_when_raised_then_callers_catch_it_as_what_they_know(
    name: str, caught_as: str
) -> None:
    ours = getattr(errors, name)
    theirs = getattr(errors, caught_as, None) or getattr(builtins, caught_as)
    with pytest.raises(theirs) as error:
        raise ours("text")
    assert isinstance(error.value, errors.DistOptError)
    assert str(error.value) == "text"
