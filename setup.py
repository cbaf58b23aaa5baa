"""Packaging. Installing into an existing fork must not move its deepspeed or megatron, so these are
extras. torch does not bring numpy, without which its gloo cannot exchange objects; rich is pure
Python."""

import re
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION: dict[str, Any] = {}
exec((ROOT / "megatron_distopt" / "version.py").read_text(encoding="utf-8"), VERSION)

#: From 0.17 on it asks for Python 3.12, and from 0.18 on it imports triton on every machine.
MEGATRON_CORE = [VERSION["MEGATRON_CORE"], "einops", "triton; python_version >= '3.12'"]
DEEPSPEED = ["deepspeed"]
#: What examples/recipes train with.
RECIPES = ["accelerate", "lightning", "transformers"]
QUICKSTART = [*MEGATRON_CORE, *DEEPSPEED, "matplotlib"]
#: What scripts/docs.sh builds the site with; ruff lays out the signatures.
DOCS = [
    "mkdocs==1.6.1",
    "mkdocs-material==9.8.1",
    "mkdocstrings==1.0.8",
    "mkdocstrings-python==2.0.11",
    "ruff",
]


def index_page(readme: str) -> str:
    """The README as a package index shows it: without what only a checkout of the repository has.

    What is left out: sections between the marker comments "repository", pictures, and the targets
    of links into the repository, whose text stays.
    """
    text = re.sub(
        r"<!-- repository: begin -->.*?<!-- repository: end -->\n", "", readme, flags=re.DOTALL
    )
    text = re.sub(r"^!\[[^\]]*\]\([^)]*\)\n+", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", text)


setup(
    name="megatron-distopt",
    version=VERSION["VERSION"],
    description="A distributed optimizer (ZeRO stage 1) for Megatron forks, megatron-core and any "
    "torch module",
    long_description=index_page((ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
    author="The megatron-distopt developers",
    license="Apache-2.0",
    keywords=[
        "distributed optimizer",
        "ZeRO",
        "Megatron",
        "PyTorch",
        "data parallelism",
        "large language models",
    ],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["megatron_distopt", "megatron_distopt.*"]),
    package_data={"megatron_distopt": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["numpy", "rich>=13", "torch>={}.{}".format(*VERSION["OLDEST_TORCH"])],
    entry_points={
        "console_scripts": ["megatron-distopt = megatron_distopt.cli.main:main"],
        "megatron.optimizer_factories": ["distopt = megatron_distopt.plugin.entry_point:distopt"],
    },
    extras_require={
        "deepspeed": DEEPSPEED,
        "megatron-core": MEGATRON_CORE,
        "quickstart": QUICKSTART,
        "recipes": RECIPES,
        "docs": DOCS,
        "dev": [
            *QUICKSTART,
            *RECIPES,
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "pytorch-optimizer",
            "ruff",
            "mypy",
            "triton",  # megatron-core 0.19 imports it on every Python
        ],
    },
)
