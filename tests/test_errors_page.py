"""docs/errors.md names every exception class and every refusal: both are read off the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from megatron_distopt import config, errors
from megatron_distopt.hosts.era_a import facts as era_a
from megatron_distopt.hosts.generations import GENERATIONS
from megatron_distopt.hosts.megatron_core import facts as megatron_core
from megatron_distopt.hosts.megatron_core.facts import REFUSED
from megatron_distopt.layout import buckets

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_distopt"
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
#: Code spans of the page; a message is written as `what: got` or `what` alone, without "Invalid".
SPANS = frozenset(re.findall(r"`([^`\n]+)`", PAGE))

_SEAMS = tuple(str(seam) for generation in GENERATIONS for seam in generation.seams)
_FACTORIES = tuple(str(generation.seams[0]) for generation in GENERATIONS if generation.seams)


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
    tree = ast.parse((PACKAGE / "hosts" / "base.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name_of(node.func) == "Field"]
    return tuple(call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant))


#: What the first arguments stand for that are no text in the call.
STANDS_FOR = {
    ("config.py", "name"): (
        *_constants_given_to(config, "_check_choice", "_whole_number"),
        *("lr", "weight_decay", "eps", "momentum", "clip_grad", "growth_interval", "hysteresis"),
    ),
    ("comm/agree.py", "field.what"): _fields(),
    ("hosts/era_a/adapter.py", "str(SEAM)"): (str(era_a.SEAM),),
    ("hosts/megatron_core/adapter.py", "str(SEAM)"): (str(megatron_core.SEAM),),
    ("hosts/megatron_core/checkpoint.py", "call"): (
        *("sharded_state_dict", "save_parameter_state", "load_parameter_state"),
        *("get_parameter_state_dp_zero", "load_parameter_state_from_dp_zero"),
    ),
    ("hosts/megatron_core/config.py", "refused.option"): tuple(refused.option for refused in REFUSED),
    ("hosts/seams.py", "str(self)"): _SEAMS,
    ("hosts/source/found.py", "str(self.seam)"): _SEAMS,
    ("layout/buckets.py", "name"): _constants_given_to(buckets, "_check_numbers"),
    ("plugin/doctor/launch_flags.py", "refused.option"): tuple(refused.option for refused in REFUSED),
    ("plugin/patch_files.py", "str(found.seam)"): _FACTORIES,
    ("plugin/patch_files.py", "str(generation.seams[0])"): _FACTORIES,
    ("plugin/patcher.py", "str(each.seam)"): _SEAMS,
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
    for function in [node for node in ast.walk(_trees()[file]) if isinstance(node, ast.FunctionDef)]:
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
    pattern = _pattern(argument, function)
    patterns = (pattern,) if pattern is not None else tuple(_given_by_callers(argument, function))
    assert patterns, f"{name}: say in STANDS_FOR what {ast.unparse(argument)} stands for"
    return patterns


def _given_by_callers(argument: ast.expr, called: ast.FunctionDef) -> Iterator[str]:
    """Where the argument is a parameter of the function: what the package gives for it."""
    parameters = [parameter.arg for parameter in called.args.args]
    index = parameters.index(argument.id) if isinstance(argument, ast.Name) and argument.id in parameters else None
    for tree in _trees().values() if index is not None else ():
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
            for call in [node for node in ast.walk(function) if isinstance(node, ast.Call)]:
                if _name_of(call.func) == called.name and index is not None and len(call.args) > index:
                    pattern = _pattern(call.args[index], function)
                    given = [pattern] if pattern is not None else [*_given_by_callers(call.args[index], function)]
                    assert given, f"{called.name} is called with {ast.unparse(call.args[index])}"
                    yield from given


def _pattern(argument: ast.expr, function: ast.FunctionDef) -> str | None:
    """A regular expression with the text of the argument; None where there is no text in it or in its assignment."""
    if isinstance(argument, ast.Constant):
        return re.escape(str(argument.value))
    if isinstance(argument, ast.JoinedStr):
        parts = [re.escape(part.value) if isinstance(part, ast.Constant) else r"\S.*" for part in argument.values]
        return "".join(parts) if any(isinstance(part, ast.Constant) for part in argument.values) else None
    if isinstance(argument, ast.Name):
        texts = [pattern for value in _assigned(argument.id, function) if (pattern := _pattern(value, function))]
        return f"(?:{'|'.join(dict.fromkeys(texts))})" if texts else None
    return None


def _assigned(name: str, function: ast.FunctionDef) -> Iterator[ast.expr]:
    for node in ast.walk(function):
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
