"""The layout that docs/architecture.md promises: links, no shadowing packages, imports that only point down."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "trimegatron"
LINKED = ("kernels", "preprocess", "convert", "bench")

LEVELS: list[set[str]] = [
    {
        "kernels",
        "config",
        "errors",
        "files",
        "background",
        "lazy",
        "safetensors_file",
        "checkpoint.directory",
        "data.index_format",
        "data.legacy_format",
        "data.metadata",
    },
    {
        "store",
        "mesh",
        "collectives",
        "activity",
        "tokenizer",
        "byte_level",
        "long_text",
        "data.indexed_dataset",
        "data.indexed_writer",
        "data.indices",
        "data.splits",
        "data.sampler",
        "data.index_cache",
    },
    {
        "preprocess",
        "data",
        "tensor_parallel",
        "data_parallel",
        "pipeline_parallel",
        "optim",
        "together",
        "watch",
        "kernel_table",
    },
    {"model"},
    {
        "metrics",
        "checkpoint",
        "divergence",
        "garbage",
        "determinism",
        "communication",
        "meta_device",
        "stopping",
        "feed",
    },
    {"trainer", "preflight", "description", "generate"},
    {
        "train",
        "dry_run",
        "launch",
        "checkpoint.cli",
        "checkpoint.resume_check",
        "convert",
        "bench",
        "demo",
        "cli",
        "__main__",
    },
]
"""From the bottom up: a module may import from its own level and below."""


def modules() -> Iterator[tuple[str, Path]]:
    """Dotted name below the package, and file, of every module of ours; the linked folders under their names in the
    package.
    """
    for path in sorted(PACKAGE.rglob("*.py")):
        if not any(part in LINKED for part in path.relative_to(PACKAGE).parts[:1]):
            yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts), path
    for folder in LINKED:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts), path


def imports(path: Path) -> Iterator[str]:
    """Every dotted name that the file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def level(name: str) -> int:
    """The level of a module: that of its longest known prefix."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        for i, names in enumerate(LEVELS):
            if ".".join(parts[:length]) in names:
                return i
    raise AssertionError(f"{name} has no place in LEVELS")


@pytest.mark.parametrize("folder", LINKED)
def test_linked_folders(folder: str):
    link = PACKAGE / folder
    assert link.is_symlink() and str(link.readlink()) == f"../{folder}"
    assert not (ROOT / folder / "__init__.py").exists()
    assert list((ROOT / folder).glob("*.py"))


def test_nobody_imports_a_linked_folder_bare():
    for name, path in modules():
        for imported in imports(path):
            assert imported.split(".")[0] not in LINKED, f"{name} imports {imported}"


def test_imports_point_down():
    for name, path in modules():
        if name == "__init__":
            continue
        mine = level(name.removesuffix(".__init__"))
        for imported in imports(path):
            if imported.startswith("trimegatron."):
                target = imported.removeprefix("trimegatron.")
                assert level(target) <= mine, f"{name} (level {mine}) imports {imported} (level {level(target)})"


def test_kernels_import_nothing_of_ours():
    for name, path in modules():
        if name.startswith("kernels."):
            for imported in imports(path):
                if imported.startswith("trimegatron"):
                    assert imported.startswith("trimegatron.kernels"), f"{name} imports {imported}"


def test_only_convert_and_bench_import_transformers():
    for name, path in modules():
        if not name.startswith(("convert.", "bench.")):
            assert not any(imported.split(".")[0] == "transformers" for imported in imports(path)), name


@pytest.mark.parametrize(
    ("module", "unloaded"),
    [
        ("trimegatron", ["torch", "triton", "transformers", "numpy"]),
        ("trimegatron.cli", ["torch", "triton", "transformers"]),
        ("trimegatron.preprocess.cli", ["torch", "triton", "transformers"]),
        ("trimegatron.convert.cli", ["torch", "triton", "transformers"]),
        ("trimegatron.train", ["triton", "transformers"]),
        ("trimegatron.kernels.functional", ["triton", "transformers"]),
    ],
)
def test_importing_loads_no_more_than_it_must(module: str, unloaded: list[str]):
    code = f"import sys, {module}; print([name for name in {unloaded!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert result.stdout.strip() == "[]"
