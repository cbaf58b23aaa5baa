"""docs/errors.md names every exception class and every refusal: both are read off the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from megatron_distopt import errors
from megatron_distopt.config import FREE_OPTIONS
from megatron_distopt.hosts.generations import GENERATIONS
from megatron_distopt.hosts.megatron_2023 import facts as megatron_2023
from megatron_distopt.hosts.megatron_core import facts as megatron_core
from megatron_distopt.hosts.megatron_core.facts import HOSTS_OWN, REFUSED
from megatron_distopt.layout import buckets

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_distopt"
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
#: Code spans of the page; a message is written as `what: got` or `what` alone, without "Invalid".
SPANS = frozenset(re.findall(r"`([^`\n]+)`", PAGE))

_PATCH_POINTS = tuple(str(patch_point) for generation in GENERATIONS for patch_point in generation.patch_points)
_FACTORIES = tuple(str(generation.patch_points[0]) for generation in GENERATIONS if generation.patch_points)


def _constants_given_to(module: object, *functions: str) -> tuple[str, ...]:
    """First arguments of calls of these functions in a module, and their keywords where there are none."""
    tree = ast.parse(Path(str(vars(module)["__file__"])).read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name_of(node.func) in functions]
    given = [call.args[0].value for call in calls if call.args and isinstance(call.args[0], ast.Constant)]
    keywords = [keyword.arg for call in calls if not call.args for keyword in call.keywords if keyword.arg]
    return tuple(map(str, [*given, *keywords]))


def _name_of(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _fields() -> tuple[str, ...]:
    nodes = (
        node for file in (PACKAGE / "hosts").rglob("*.py") for node in ast.walk(ast.parse(file.read_text("utf-8")))
    )
    calls = [node for node in nodes if isinstance(node, ast.Call) and _name_of(node.func) == "Field"]
    return tuple(call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant))


#: Options whose value may be refused for itself, beside those that the calls spell out.
_OPTIONS = (*FREE_OPTIONS, "lr", "weight_decay", "eps", "momentum", "clip_grad", "growth_interval", "hysteresis")

#: What the first arguments stand for that are no text in the call.
STANDS_FOR = {
    ("config.py", "name"): _OPTIONS,
    ("option_types.py", "name"): ("OPTION",),
    ("comm/agree.py", "field.what"): _fields(),
    ("hosts/megatron_2023/adapter.py", "str(PATCH_POINT)"): (str(megatron_2023.PATCH_POINT),),
    ("hosts/megatron_core/adapter.py", "str(PATCH_POINT)"): (str(megatron_core.PATCH_POINT),),
    ("hosts/megatron_core/config.py", "name"): tuple(HOSTS_OWN),
    ("hosts/megatron_core/config.py", "refused.option"): tuple(refused.option for refused in REFUSED),
    ("hosts/base.py", "name"): ("OPTION",),
    ("hosts/patch_points.py", "str(self)"): _PATCH_POINTS,
    ("hosts/source/found.py", "str(self.patch_point)"): _PATCH_POINTS,
    ("layout/buckets.py", "name"): _constants_given_to(buckets, "_check_numbers"),
    ("plugin/doctor/launch_flags.py", "refused.option"): tuple(refused.option for refused in REFUSED),
    ("plugin/patch_files.py", "str(found.patch_point)"): _FACTORIES,
    ("plugin/patch_files.py", "str(generation.patch_points[0])"): _FACTORIES,
    ("plugin/patcher.py", "str(each.patch_point)"): _PATCH_POINTS,
}


@dataclass(frozen=True)
class Refusal:
    """One call of `refusal`.

    Args:
        place: file and line.
        patterns: of what must be in the page; one for each value of a first argument that is no text.
    """

    place: str
    patterns: tuple[str, ...]


@cache
def _trees() -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(PACKAGE.rglob("*.py"))}


def _refusals(file: Path) -> Iterator[Refusal]:
    name = file.relative_to(PACKAGE).as_posix()
    for function in _functions(_trees()[file]):
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "refusal":
                # The page has one word for what is the same in all of its rows.
                got = (
                    "DIFFERENCE"
                    if name == "comm/agree.py" and ast.unparse(call.args[0]) == "field.what"
                    else _pattern(call.args[1], function)
                )
                ending = r"(: .+)?" if got is None else f": {got}"
                whats = _whats(name, call.args[0], function)
                yield Refusal(f"{name}:{call.lineno}", tuple(what + ending for what in whats))


def _whats(name: str, argument: ast.expr, function: ast.FunctionDef) -> tuple[str, ...]:
    known = STANDS_FOR.get((name, ast.unparse(argument)))
    if known is not None:
        return tuple(map(re.escape, known))
    patterns = _patterns(argument, function) or tuple(_given_by_callers(argument, function, name))
    assert patterns, f"{name}: say in STANDS_FOR what {ast.unparse(argument)} stands for"
    return tuple(dict.fromkeys(patterns))


def _given_by_callers(argument: ast.expr, called: ast.FunctionDef, name: str) -> Iterator[str]:
    """Where the argument is a parameter of the function: what the package gives for it.

    Functions of several modules have the same name; one with an underscore is called in its own module alone.
    """
    parameters = [parameter.arg for parameter in called.args.args if parameter.arg not in ("self", "cls")]
    if not (isinstance(argument, ast.Name) and argument.id in parameters):
        return
    for where, function, call in _calls().get(called.name, ()):
        given = _given_in(call, called, argument.id, parameters.index(argument.id))
        if given is not None and (where == name or not called.name.startswith("_")):
            found = _patterns(given, function) or tuple(_given_by_callers(given, function, where))
            assert found, f"{called.name} is called with {ast.unparse(given)}"
            yield from found


def _given_in(call: ast.Call, called: ast.FunctionDef, parameter: str, index: int) -> ast.expr | None:
    """By position, by name or by default; None where the call is of another function of that name."""
    by_name = [keyword.value for keyword in call.keywords if keyword.arg == parameter]
    names, defaults = [each.arg for each in called.args.args], called.args.defaults
    by_default = dict(zip(reversed(names), reversed(defaults), strict=False)).get(parameter)
    return next(iter([*call.args[index : index + 1], *by_name]), by_default)


@cache
def _calls() -> dict[str, list[tuple[str, ast.FunctionDef, ast.Call]]]:
    """By name of what is called: file, calling function and call."""
    found: dict[str, list[tuple[str, ast.FunctionDef, ast.Call]]] = {}
    for file, tree in _trees().items():
        for function in _functions(tree):
            for call in [node for node in ast.walk(function) if isinstance(node, ast.Call)]:
                entry = (file.relative_to(PACKAGE).as_posix(), function, call)
                found.setdefault(_name_of(call.func), []).append(entry)
    return found


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def _pattern(argument: ast.expr, function: ast.FunctionDef) -> str | None:
    """A regular expression with the text of the argument; None where there is no text in it or in its assignment."""
    patterns = _patterns(argument, function)
    return f"(?:{'|'.join(patterns)})" if patterns else None


def _patterns(argument: ast.expr, function: ast.FunctionDef) -> tuple[str, ...]:
    """The same, one for each text that the argument may have."""
    if isinstance(argument, ast.Constant):
        return (re.escape(str(argument.value)),)
    if isinstance(argument, ast.JoinedStr):
        parts = [re.escape(part.value) if isinstance(part, ast.Constant) else r"\S.*" for part in argument.values]
        return ("".join(parts),) if any(isinstance(part, ast.Constant) for part in argument.values) else ()
    if isinstance(argument, ast.Name):
        texts = [text for value in _assigned(argument.id, function) for text in _patterns(value, function)]
        return tuple(dict.fromkeys(texts))
    return ()


def _assigned(name: str, function: ast.FunctionDef) -> Iterator[ast.expr]:
    """What a name stands for in the function: values of assignments, and items of a list that a loop goes through."""
    for node in ast.walk(function):
        if isinstance(node, ast.For) and isinstance(node.iter, (ast.Tuple, ast.List)):
            yield from node.iter.elts if isinstance(node.target, ast.Name) and node.target.id == name else ()
        for target in node.targets if isinstance(node, ast.Assign) else ():
            assert isinstance(node, ast.Assign)
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts, strict=True)
                yield from (value for each, value in pairs if isinstance(each, ast.Name) and each.id == name)
            elif isinstance(target, ast.Name) and target.id == name:
                yield node.value


@cache
def every_refusal() -> tuple[Refusal, ...]:
    return tuple(refusal for file in _trees() for refusal in _refusals(file))


def test_refusals_when_counted_then_the_search_found_them() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py"))
    defined, in_docstring, methods = 1, 1, len(re.findall(r"def refusal\(self|\.refusal\(", text))
    assert len(every_refusal()) == len(re.findall(r"\brefusal\(", text)) - defined - in_docstring - methods


def test_page_when_compared_with_the_source_then_every_refusal_is_there() -> None:
    missing = [
        f"{refusal.place}: {pattern}"
        for refusal in every_refusal()
        for pattern in refusal.patterns
        if not any(re.fullmatch(pattern, span) for span in SPANS)
    ]
    assert not missing, "docs/errors.md lacks\n" + "\n".join(missing)


def test_page_when_compared_with_the_source_then_no_message_is_left_over() -> None:
    patterns = {re.compile(pattern) for refusal in every_refusal() for pattern in refusal.patterns}
    first_columns = re.findall(r"^\| (`[^|]+) \|", PAGE, re.MULTILINE)
    shown = {span for column in first_columns for span in re.findall(r"`([^`]+)`", column)} - set(errors.__all__)
    left_over = [span for span in sorted(shown) if not any(pattern.fullmatch(span) for pattern in patterns)]
    assert shown, "the page has no rows"
    assert not left_over, "nothing in the package says\n" + "\n".join(left_over)


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "refusal"])
def test_page_when_compared_with_the_classes_then_each_has_a_row(name: str) -> None:
    assert re.search(rf"^\| `{name}`", PAGE, re.MULTILINE)


def test_stand_ins_when_compared_with_the_source_then_none_is_left_over() -> None:
    used = set()
    for file, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "refusal":
                used.add((file.relative_to(PACKAGE).as_posix(), ast.unparse(node.args[0])))
    assert set(STANDS_FOR) <= used
