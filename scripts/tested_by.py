"""Prints the test files of a module: `python scripts/tested_by.py hosts/torch/grads.py`.

They have its name, as tests/comm/test_agree.py has that of comm/agree.py, import it or a name that
its package passes on, or name its path in their docstring: "Exercises hosts/torch/grads.py."
"""

import ast
import re
import sys
from functools import cache
from operator import methodcaller
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "megatron_distopt"


@cache
def names_in(file: Path) -> set[str]:
    """What a file imports, and modules that its path or docstring names; each ends in a dot."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {f"{node.module}.{alias.name}." for node in imports for alias in node.names}
    paths = re.findall(r"[\w/]+(?=\.py\b)", ast.get_docstring(tree) or "")
    paths.append(str(file.with_suffix("")).rpartition("/tests/")[2].replace("test_", ""))
    return names | {f"{PACKAGE.name}.{path.replace('/', '.')}." for path in paths}


def tests_of(module: str) -> list[str]:
    """Test files of a module, which is named by its path from the package's folder."""
    dotted = f"{PACKAGE.name}.{module.removesuffix('.py').replace('/', '.')}."
    package, init = dotted[:-1].rpartition(".")[0], (PACKAGE / module).parent / "__init__.py"
    passed_on = {name.replace(dotted, f"{package}.") for name in names_in(init) if dotted in name}
    own = (dotted, *passed_on)
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [test for test in tests if any(map(methodcaller("startswith", own), names_in(test)))]
    return [str(test.relative_to(ROOT)) for test in found]


if __name__ == "__main__":
    sys.stdout.write("\n".join(tests_of(sys.argv[1])) + "\n")
