"""Imports flow down the levels of docs/design.md, imports inside functions included."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import umem

ROOT = Path(umem.__file__).parent
LEVELS = {
    "errors": 0, "units": 0, "stacks": 0, "forking": 0, "shown": 0, "extras": 0, "files": 0,
    "inflating": 0, "scopes": 0,
    "events": 1, "trace": 1, "trace_file": 1, "recorder": 1, "recording": 1,
    "graphs": 1, "compat": 1,
    "aligning": 1, "scaling": 1, "cutting": 1, "explaining": 1, "backends": 1,
    "devices": 2, "planner": 2, "order": 2,
    "limits": 3, "environment": 3, "blocks": 3, "memory": 3, "inspecting": 3, "hints": 3,
    "counters": 3, "tracking": 3, "views": 3, "lookahead_moves": 3,
    "analysis": 4, "replaying": 4, "comparing": 4, "stepping": 4, "techniques": 4, "choosing": 4,
    "": 4,
    "chainer": 5, "reports": 5,
    "cli": 6, "__main__": 7,
}  # fmt: skip
"""The empty name is the package itself: its public names, the highest of which is `replay`."""
CUDA = ("cupy", "cupyx", "cupy_backends", "cuda")
FILES = sorted(ROOT.rglob("*.py"))


def part(name: str) -> str:
    """The part of umem that a module's full name belongs to."""
    return name.split(".")[1] if "." in name else ""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Everything that a file imports anywhere in it, but for annotations only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if is_module(name) else str(node.module) for name in names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            argument = node.args[0]
            if isinstance(argument, ast.Constant):
                yield argument.value


def is_module(name: str) -> bool:
    path = ROOT.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def refused(importer: str, imported: str) -> str | None:
    """Why one module may not import another."""
    here, there = part(importer), part(imported)
    if LEVELS[there] > LEVELS[here]:
        return f"level {LEVELS[here]} imports level {LEVELS[there]}"
    if there == "cli" and here not in ("cli", "__main__"):
        return "nothing imports cli"
    allocator = there in ("memory", "blocks") or imported.startswith(
        ("umem.devices.virtual", "umem.devices.cuda")
    )
    if here == "reports" and allocator:
        return "a report sees no allocator"
    if here == "planner" and there == "devices":
        return "a planner sees no device"
    return None


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_flow_down(path: Path) -> None:
    importer = name_of(path)
    found = {name for name in imports(path) if name.partition(".")[0] == "umem"}
    wrong = {name: why for name in found if (why := refused(importer, name))}
    assert not wrong


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_the_cuda_device_imports_cupy(path: Path) -> None:
    found = {name for name in imports(path) if name.partition(".")[0] in CUDA}
    name = name_of(path)
    if name == "umem.chainer.gcn":  # cuSPARSE's matrices: arithmetic, not allocation
        found -= {"cupyx.scipy.sparse"}
    mends = name.startswith("umem.compat.")  # of CuPy itself, once it is being imported
    assert not found or mends or name.startswith("umem.devices.cuda")


def test_no_public_function_is_called_as_a_module_beside_it() -> None:
    packages = [umem, *(importlib.import_module(f"umem.{name}") for name in ("chainer", "graphs"))]
    for package in packages:
        beside = {module.name for module in pkgutil.iter_modules(package.__path__)}
        public = {name for name, value in vars(package).items() if not inspect.ismodule(value)}
        assert not beside & (public | set(package.__all__) - {"__version__"}), package.__name__


@pytest.mark.parametrize("name", umem._LATER)
def test_what_is_loaded_later_flows_down_too(name: str) -> None:
    assert refused("umem", umem._LATER[name]) is None


def test_every_public_name_exists_and_is_said_once() -> None:
    assert len(set(umem.__all__)) == len(umem.__all__)
    assert all(hasattr(umem, name) for name in umem.__all__)


def test_importing_umem_loads_numpy_and_nothing_else_that_is_heavy() -> None:
    heavy = ("cupy", "chainer", "scipy", "matplotlib", "rich", "click")
    code = f"import sys, umem; print([n for n in {heavy} if n in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent
    )
    assert result.stdout.strip() == "[]"
