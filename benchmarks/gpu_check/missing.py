"""What scripts/gpu_check.sh installs next to the user's packages; it checks options and device
first.

    python -m gpu_check.missing [options of the command]

Prints lines of "with" or "without" (dependencies) and requirements.
Nothing that depends on torch is installed with its dependencies, so that no other torch comes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from gpu_check.__main__ import look, parse_args
from megatron_distopt.version import MEGATRON_CORE

_DEEPSPEED_NEEDS = (
    "einops",
    "hjson",
    "msgpack",
    "ninja",
    "packaging",
    "psutil",
    "py-cpuinfo",
    "pydantic>=2",
    "tqdm",
)
_CORE_NEEDS = ("einops", "numpy", "packaging")


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is not
        return False


def missing(is_there: Callable[[str], bool] = _is_there) -> Iterator[tuple[str, tuple[str, ...]]]:
    """What to install, in this order.

    Args:
        is_there: whether a module can be imported.

    Yields:
        "with" or "without" dependencies, and requirements.
    """
    if not is_there("megatron.core"):
        yield "with", _CORE_NEEDS
        yield "without", (MEGATRON_CORE,)
    if not is_there("deepspeed"):
        yield "with", _DEEPSPEED_NEEDS
        yield "without", ("deepspeed",)


def main() -> None:
    look(parse_args(sys.argv[1:]).device)
    for kind, requirements in missing():
        print(kind, *requirements)


if __name__ == "__main__":
    main()
