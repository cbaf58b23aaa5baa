"""The exception tree is the one that the docstring of errors.py draws."""

from __future__ import annotations

import builtins
import re

import pytest

from megatron_distopt import errors

#: The branches of a drawn line, the name, and a second base in brackets where there is one.
LINE = re.compile(r"^ {4}(?P<branch>[│├└─ ]*)(?P<name>\w+Error)(?: \((?P<base>\w+)\))?(?:  +\w.*)?$", re.MULTILINE)


def drawn_tree() -> dict[str, tuple[str, ...]]:
    """Bases by name, read off the drawing: the parent is the last line above with shorter branches."""
    tree: dict[str, tuple[str, ...]] = {}
    above: list[tuple[int, str]] = []
    for match in LINE.finditer(errors.__doc__ or ""):
        depth = len(match["branch"])
        above = [(their_depth, name) for their_depth, name in above if their_depth < depth]
        tree[match["name"]] = tuple(base for base in (above[-1][1] if above else "", match["base"]) if base)
        above.append((depth, match["name"]))
    return tree


def defined_exceptions() -> dict[str, type[BaseException]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == errors.__name__
    }


def test_tree_when_read_off_the_docstring_then_the_classes_have_these_bases() -> None:
    drawn = drawn_tree()
    assert drawn.pop("DistOptError") == ()
    assert errors.DistOptError.__bases__ == (Exception,)
    for name, bases in drawn.items():
        assert tuple(base.__name__ for base in getattr(errors, name).__bases__) == bases


def test_tree_when_compared_with_the_module_then_nothing_is_left_out() -> None:
    assert set(drawn_tree()) == set(defined_exceptions())


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
def test_error_when_raised_then_callers_catch_it_as_what_they_know(name: str, caught_as: str) -> None:
    ours = getattr(errors, name)
    theirs = getattr(errors, caught_as, None) or getattr(builtins, caught_as)
    with pytest.raises(theirs) as error:
        raise ours("text")
    assert isinstance(error.value, errors.DistOptError)
    assert str(error.value) == "text"


def test_errors_when_they_have_a_docstring_then_it_is_their_own() -> None:
    texts = [vars(value).get("__doc__") for value in defined_exceptions().values()]
    assert all(texts)
    assert len(set(texts)) == len(texts)
