"""The rules of the tree, held by reading it: who may import whom, what stays in one file, what is
never written.

The checker is the first part; the second runs it on the package; the third runs it on bad files, to
see it fail.
"""

from __future__ import annotations

import ast
import graphlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

import megatron_distopt

NAME = "megatron_distopt"
PACKAGE = Path(megatron_distopt.__file__).parent
#: Each may import those before it and itself.
LAYERS = (
    "layout",
    "buffers",
    "comm",
    "optimizer",
    "checkpoint",
    "formats",
    "session",
    "hosts",
    "plugin",
    "cli",
)
#: Each may import those before it, and everybody may import them.
COMMON = (
    "version",
    "errors",
    "options",
    "config",
    "compatibility",
    "device",
    "stand_ins",
    "patch_points",
)
ACCELERATOR = "optimizer/accelerator.py"


@dataclass(frozen=True)
class Source:
    """One file of the package: its path from the package's folder, its text, and what Python makes
    of it."""

    path: str
    text: str

    @property
    def layer(self) -> str:
        return self.path.partition("/")[0].removesuffix(".py")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text)))

    @cached_property
    def imported(self) -> list[str]:
        return [name for node in self.nodes for name in imported(node)]


Rule = Callable[[Source], Iterator[str]]


#: One for each path and text, so that rules share what Python makes of it.
_source = cache(Source)


def sources(folder: Path) -> list[Source]:
    files = sorted(folder.rglob("*.py"))
    return [
        _source(file.relative_to(folder).as_posix(), file.read_text(encoding="utf-8"))
        for file in files
    ]


def violations(folder: Path, rule: Rule) -> list[str]:
    return [f"{source.path}: {what}" for source in sources(folder) for what in rule(source)]


def imported(node: ast.AST) -> list[str]:
    """Dotted names that a node imports: by statement, or by import_module with the name spelled
    out."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
        "import_module",
        "__import__",
    ):
        return [
            arg.value
            for arg in node.args[:1]
            if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
        ]
    return []


def follows_the_arrow(source: Source) -> Iterator[str]:
    """The package's own __init__ is the shop window: it names things of every layer and imports
    them when asked."""
    order = COMMON if source.layer in COMMON else (*COMMON, *LAYERS)
    allowed = order[: order.index(source.layer) + 1] if source.layer in order else order
    for name in source.imported:
        parts = name.split(".")
        if name.startswith("."):
            yield f"relative import {name}"
        elif parts[0] == NAME and (len(parts) == 1 or parts[1] not in allowed):
            yield f"imports {name}"


def keeps_layout_pure(source: Source) -> Iterator[str]:
    for name in source.imported if source.layer == "layout" else ():
        ours = name.startswith((f"{NAME}.layout.", f"{NAME}.errors."))
        if not ours and name.split(".")[0] not in sys.stdlib_module_names:
            yield f"imports {name}"


def keeps_collectives_in_comm(source: Source) -> Iterator[str]:
    used = [ast.unparse(node) for node in source.nodes if isinstance(node, ast.Attribute)]
    for name in [*source.imported, *used] if source.layer not in ("comm", "checkpoint") else ():
        if name == "torch.distributed" or name.startswith("torch.distributed."):
            yield f"uses {name}"


def keeps_megatron_in_hosts(source: Source) -> Iterator[str]:
    for name in source.imported if source.layer != "hosts" else ():
        if name.split(".")[0] == "megatron":
            yield f"imports {name}"


def keeps_device_names_in_accelerator(source: Source) -> Iterator[str]:
    for node in source.nodes if source.path != ACCELERATOR else ():
        if isinstance(node, ast.Attribute) and node.attr == "cuda":
            yield f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Constant) and re.fullmatch(r"cuda(:.*)?", str(node.value)):
            yield f"line {node.lineno}: {node.value!r}"


def prints_only_in_cli(source: Source) -> Iterator[str]:
    for node in source.nodes if source.path != "cli/main.py" else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            yield f"line {node.lineno}: print"


def asserts_with_a_message(source: Source) -> Iterator[str]:
    yield from (
        f"line {node.lineno}: assert"
        for node in source.nodes
        if isinstance(node, ast.Assert) and not node.msg
    )


def names_what_it_catches(source: Source) -> Iterator[str]:
    handlers = [node for node in source.nodes if isinstance(node, ast.ExceptHandler)]
    yield from (f"line {node.lineno}: bare except" for node in handlers if node.type is None)


def leaves_nothing_to_do(source: Source) -> Iterator[str]:
    yield from re.findall(r"\b(?:TODO|FIXME|XXX)\b.*", source.text)


def has_properties_that_answer_at_once(source: Source) -> Iterator[str]:
    """A property neither meets other ranks nor builds what does: a rank that reads it alone would
    hang."""
    from_comm = {name.rpartition(".")[2] for name in source.imported if ".comm." in name}
    properties = [
        node
        for node in source.nodes
        if isinstance(node, ast.FunctionDef)
        and {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
        & {"property", "cached_property"}
    ]
    for node in properties if source.layer in ("session", "hosts") else ():
        calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
        called = {each.func.id for each in calls if isinstance(each.func, ast.Name)} & from_comm
        if called or (ast.get_docstring(node) or "").startswith("Collective"):
            yield f"line {node.lineno}: property {node.name} communicates"


def leaves_internal_names_internal(source: Source) -> Iterator[str]:
    """What is public is said by the root and the packages' `__init__` alone."""
    if source.path.rpartition("/")[2] != "__init__.py" and re.search(
        r"^__all__\b", source.text, re.MULTILINE
    ):
        yield "has an __all__"


RULES: tuple[Rule, ...] = (
    follows_the_arrow,
    keeps_layout_pure,
    keeps_collectives_in_comm,
    keeps_megatron_in_hosts,
    keeps_device_names_in_accelerator,
    prints_only_in_cli,
    asserts_with_a_message,
    names_what_it_catches,
    leaves_nothing_to_do,
    has_properties_that_answer_at_once,
    leaves_internal_names_internal,
)

#: What `import megatron_distopt` must leave alone.
HEAVY = ("apex", "deepspeed", "megatron", "numpy", "torch", "transformer_engine")


def heavy_after(statement: str) -> list[str]:
    """Which of them a fresh interpreter has loaded after a statement."""
    probe = (
        f"import json, sys\n{statement}\nprint(json.dumps([name for name in {HEAVY!r} if name in "
        "sys.modules]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=120
    )
    loaded: list[str] = json.loads(result.stdout)
    return loaded


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_when_read_then_it_keeps_the_rule(rule: Rule) -> None:
    assert violations(PACKAGE, rule) == []


def cycle_of_imports(folder: Path) -> list[str]:
    """Files that import each other in a circle, typing imports included; empty where there is no
    circle."""
    files = {
        f"{NAME}.{source.path[:-3].replace('/', '.').removesuffix('.__init__')}": source
        for source in sources(folder)
    }
    graph = {
        name: {each if each in files else each.rpartition(".")[0] for each in source.imported}
        & files.keys() - {name}
        for name, source in files.items()
        # the shop window imports things of every layer when it is asked
        if source.path != "__init__.py"
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_package_when_its_imports_are_followed_then_they_never_come_back() -> None:
    assert cycle_of_imports(PACKAGE) == []


def test_cycle_when_two_files_import_each_other_for_their_types_then_found(tmp_path: Path) -> None:
    write(tmp_path, "comm/a.py", f"from {NAME}.comm.b import B")
    assert cycle_of_imports(tmp_path) == []
    write(tmp_path, "comm/b.py", f"if TYPE_CHECKING:\n    from {NAME}.comm import a")
    assert set(cycle_of_imports(tmp_path)) == {f"{NAME}.comm.a", f"{NAME}.comm.b"}


#: Other classes of ours from which a class may inherit, directly or through others.
MOST_ANCESTORS = 2


def ancestors(folder: Path) -> dict[str, set[str]]:
    """By class of the package, with its file, the other classes of the package that it inherits
    from."""
    bases: dict[str, set[str]] = {}
    for source in sources(folder):
        module = f"{NAME}.{source.path[:-3].replace('/', '.')}"
        defined = [node for node in source.nodes if isinstance(node, ast.ClassDef)]
        home = {node.name: f"{module}.{node.name}" for node in defined}
        imports = {name.rpartition(".")[2]: name for name in source.imported if NAME in name}
        for node in defined:
            named = {ast.unparse(base).partition("[")[0] for base in node.bases}
            bases[home[node.name]] = {(imports | home).get(name, name) for name in named}
    # what an __init__ shows is defined in a file of its folder
    of_name = {(name.split(".")[1], name.rpartition(".")[2]): name for name in bases}

    def all_of(name: str) -> set[str]:
        found: set[str] = set()
        for base in bases[name]:
            parts = base.split(".")
            ours = of_name.get((parts[1], parts[-1])) if parts[0] == NAME else None
            found |= {ours, *all_of(ours)} if ours else set()
        return found

    return {name: all_of(name) for name in bases}


def test_classes_when_listed_then_none_inherits_from_more_than_two_others() -> None:
    found = ancestors(PACKAGE)
    assert f"{NAME}.session.session_calls.SessionCalls" in set().union(*found.values())
    assert {name: of for name, of in found.items() if len(of) > MOST_ANCESTORS} == {}


def test_class_when_it_inherits_over_files_then_all_its_ancestors_are_found(tmp_path: Path) -> None:
    write(tmp_path, "session/a.py", "class One: ...\nclass Two(One): ...")
    text = f"from {NAME}.session import Two\nimport torch\nclass Three(Two, torch.One): ..."
    write(tmp_path, "hosts/b.py", text)
    found = {name.rpartition(".")[2]: of for name, of in ancestors(tmp_path).items()}
    assert found["Three"] == {f"{NAME}.session.a.One", f"{NAME}.session.a.Two"}
    assert found["Two"] == {f"{NAME}.session.a.One"}


def test_package_when_listed_then_every_layer_is_there_and_nothing_else() -> None:
    layers = {source.layer for source in sources(PACKAGE)}
    assert layers == {*LAYERS, *COMMON, "__init__"} | (layers & {"__main__"})
    assert len(sources(PACKAGE)) >= 40


def test_package_when_imported_then_nothing_heavy_is_loaded() -> None:
    assert heavy_after(f"import {NAME}") == []


def test_probe_when_something_heavy_is_imported_then_it_sees_it() -> None:
    assert heavy_after("import numpy") == ["numpy"]


BAD: list[tuple[Rule, str, str, str]] = [
    (
        follows_the_arrow,
        "layout/a.py",
        f"from {NAME}.buffers import grads",
        f"imports {NAME}.buffers.grads",
    ),
    (
        follows_the_arrow,
        "comm/a.py",
        f"import {NAME}.optimizer.step",
        f"imports {NAME}.optimizer.step",
    ),
    (
        follows_the_arrow,
        "hosts/new/a.py",
        f"def f():\n    import {NAME}.plugin",
        f"imports {NAME}.plugin",
    ),
    (follows_the_arrow, "hosts/a.py", f"import {NAME}", f"imports {NAME}"),
    (
        follows_the_arrow,
        "hosts/a.py",
        "from ..plugin import install",
        "relative import ..plugin.install",
    ),
    (
        follows_the_arrow,
        "config.py",
        f"from {NAME}.layout import Span",
        f"imports {NAME}.layout.Span",
    ),
    (
        follows_the_arrow,
        "comm/a.py",
        f"import_module('{NAME}.hosts.torch')",
        f"imports {NAME}.hosts.torch",
    ),
    (
        follows_the_arrow,
        "comm/a.py",
        f"if TYPE_CHECKING:\n    from {NAME}.hosts import base",
        f"imports {NAME}.hosts.base",
    ),
    (keeps_layout_pure, "layout/a.py", "import torch", "imports torch"),
    (
        keeps_layout_pure,
        "layout/a.py",
        f"from {NAME}.config import Switch",
        f"imports {NAME}.config.Switch",
    ),
    (
        keeps_collectives_in_comm,
        "optimizer/a.py",
        "import torch.distributed as dist",
        "uses torch.distributed",
    ),
    (
        keeps_collectives_in_comm,
        "plugin/a.py",
        "import torch\nx = torch.distributed",
        "uses torch.distributed",
    ),
    (
        keeps_megatron_in_hosts,
        "plugin/a.py",
        "from megatron.core import parallel_state",
        "imports megatron.core.parallel_state",
    ),
    (
        keeps_megatron_in_hosts,
        "optimizer/a.py",
        "import importlib\nimportlib.import_module('megatron')",
        "imports megatron",
    ),
    (
        keeps_device_names_in_accelerator,
        "comm/a.py",
        "torch.cuda.synchronize()",
        "line 1: torch.cuda",
    ),
    (
        keeps_device_names_in_accelerator,
        "optimizer/step.py",
        "x.to(f'cuda:{rank}')",
        "line 1: 'cuda:'",
    ),
    (prints_only_in_cli, "plugin/install.py", "def f():\n    print('done')", "line 2: print"),
    (asserts_with_a_message, "comm/a.py", "assert size > 1", "line 1: assert"),
    (names_what_it_catches, "comm/a.py", "try:\n    f()\nexcept:\n    g()", "line 3: bare except"),
    (leaves_nothing_to_do, "comm/a.py", "x = 1  # TODO: more", "TODO: more"),
    (
        has_properties_that_answer_at_once,
        "session/a.py",
        f"from {NAME}.comm import all_gather_objects\nclass A:\n    @property\n    def b(self):\n"
        "        return all_gather_objects(1)",
        "line 4: property b communicates",
    ),
    (
        leaves_internal_names_internal,
        "comm/a.py",
        "__all__ = ['f']\ndef f(): ...",
        "has an __all__",
    ),
]

GOOD: list[tuple[str, str]] = [
    ("__init__.py", f"__all__ = ['VERSION']\nfrom {NAME}.version import VERSION"),
    ("hosts/new/a.py", f"from {NAME}.layout import Span\nimport megatron.core"),
    ("comm/a.py", "import torch.distributed as dist\nassert dist, 'why'"),
    (ACCELERATOR, "import torch\nCUDA = 'cuda'\ntorch.cuda.is_available()"),
    ("cli/main.py", "def main():\n    print('CUDA is not spelled out here')"),
    ("layout/a.py", f"import math\nfrom {NAME}.errors import LayoutError"),
]


def write(folder: Path, path: str, text: str) -> Path:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(("rule", "path", "text", "found"), BAD)
def test_checker_when_a_file_breaks_a_rule_then_it_says_where(
    rule: Rule, path: str, text: str, found: str, tmp_path: Path
) -> None:
    assert f"{path}: {found}" in violations(write(tmp_path, path, text), rule)


@pytest.mark.parametrize(("path", "text"), GOOD)
def test_checker_when_a_file_keeps_all_rules_then_it_is_silent(
    path: str, text: str, tmp_path: Path
) -> None:
    write(tmp_path, path, text)
    assert [what for rule in RULES for what in violations(tmp_path, rule)] == []


def test_checker_when_a_rule_is_listed_then_a_bad_file_shows_that_it_can_fail() -> None:
    assert {rule for rule, *_ in BAD} == set(RULES)


#: What makes an object that changes, at the level of a module.
_CHANGING = {
    *("WeakKeyDictionary", "WeakIdKeyDictionary", "WeakSet", "WeakValueDictionary"),
    *("Event", "Lock", "RLock", "list", "dict", "set", "_DataWatch"),
}


def _changing_variables(source: Source) -> Iterator[str]:
    """Names of variables of a module that hold something that changes."""
    module = source.nodes[0]
    assert isinstance(module, ast.Module)
    for node in module.body:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            names, value = [node.target], node.value
        elif isinstance(node, ast.Assign):
            names, value = node.targets, node.value
        else:
            continue
        is_empty = isinstance(value, (ast.List, ast.Dict)) and not ast.dump(value).count("Constant")
        made_by = value.func if isinstance(value, ast.Call) else None
        is_made = isinstance(made_by, ast.Name) and made_by.id in _CHANGING
        if is_empty or is_made:
            yield from (each.id for each in names if isinstance(each, ast.Name))


def test_variables_of_modules_when_they_change_then_the_page_on_architecture_lists_them() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = {
        f"{source.path}: {name}"
        for source in sources(PACKAGE)
        for name in _changing_variables(source)
        if name != "__all__"
    }
    assert len(found) >= 15, found  # the search finds some
    assert not {each for each in found if f"`{each.partition(': ')[2]}`" not in page}
