"""What holds for every mend of Chainer, and the loader that the tests of single mends use.

``load(module, without=...)`` makes a private copy of one module of Chainer with one mend left out.
Test names carry the names of the mends; the last test holds that none was forgotten.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from umem.compat import installation
from umem.compat.catalogue import SHIMS
from umem.compat.finder import ShimLoader
from umem.compat.requirement import holds
from umem.errors import MissingDependencyError

# Chainer must come through the layer, so this is the first import of it.
pytest.importorskip("umem.chainer", exc_type=MissingDependencyError)
chainer = sys.modules["chainer"]

numpy_2 = pytest.mark.skipif(not holds("numpy>=2.0"), reason="NumPy 1 does not break this")


def load(module: str, without: str | None = None) -> ModuleType:
    """Return a fresh copy of a module with its mends, one left out; ``sys.modules`` stays."""
    path = str(installation.module_file(module))
    shims = [shim for shim in SHIMS if shim.module == module and shim.name != without]
    loader = ShimLoader(module, path, shims)
    package = [str(Path(path).parent)] if path.endswith("__init__.py") else None
    spec = importlib.util.spec_from_file_location(
        module, path, loader=loader, submodule_search_locations=package
    )
    assert spec is not None
    copy = importlib.util.module_from_spec(spec)
    loader.exec_module(copy)
    return copy


def test_every_mend_has_a_test_that_carries_its_name():
    here = Path(__file__).parent
    tests = " ".join(
        node.name
        for file in here.glob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef)
    )
    assert [shim.name for shim in SHIMS if shim.name.replace("-", "_") not in tests] == []


@pytest.mark.parametrize("shim", SHIMS, ids=lambda shim: shim.name)
def test_every_mend_fits_the_installed_module_and_keeps_its_lines(shim):
    path = installation.module_file(shim.module)
    source = path.read_text("utf-8")
    for other in SHIMS:
        if other.module == shim.module:
            source = other.apply(source, "7.8.1")
    assert source.count("\n") == path.read_text("utf-8").count("\n")
    compile(source, str(path), "exec")
    assert shim.link.startswith("https://") and shim.until and len(shim.symptom) < 70
