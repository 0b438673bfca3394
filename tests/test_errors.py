"""The tree of errors is the one that is drawn, and each error is what people already catch."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import inspect
import pickle
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

import umem
from umem import errors
from umem.errors import UmemError

INSIDE = {
    "DistributionNotFound", "KernelFault", "LeftOut", "LibraryFailure", "MissingValue",
    "RemoteError", "_Failed", "_NoMatch", "_NoPrefetchError",
}  # fmt: skip
"""Classes that umem raises and catches itself, and that of pkg_resources."""

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, UmemError)
}


def drawn() -> dict[str, tuple[str | None, set[str]]]:
    """Each drawn class with its parent and the built-ins that it also is."""
    found: dict[str, tuple[str | None, set[str]]] = {}
    parents: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ((?:[| ]   )*)(?:\+-- )?(\w+Error)\b(.*)", line)
        if match is None:
            continue
        depth = len(match[1]) // 4 + ("+--" in line)
        parents[depth:] = [match[2]]
        also = set(re.findall(r"\b[A-Z]\w*Error\b", match[3].split(":")[0].split(";")[0]))
        found[match[2]] = (parents[depth - 1] if depth else None, also)
    return found


def test_every_error_is_drawn_and_every_drawn_one_exists() -> None:
    assert set(drawn()) == set(CLASSES)


def test_an_error_inherits_as_it_is_drawn() -> None:
    for name in sorted(CLASSES):
        parent, also = drawn()[name]
        bases = {base.__name__ for base in CLASSES[name].__bases__}
        assert bases == ({parent} if parent else {"Exception"}) | also
        assert all(hasattr(builtins, base) for base in also)


def test_an_error_shows_its_message_and_travels_between_processes() -> None:
    for name in sorted(CLASSES):
        error = CLASSES[name]("needs 'a', not \"b\"")
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is CLASSES[name]
        assert str(error) == str(copy) == "needs 'a', not \"b\""


def test_the_bytes_that_an_allocation_needed_travel_too() -> None:
    kinds = [errors.OutOfMemoryError, errors.LimitError]
    if importlib.util.find_spec("cupy") is not None:
        kinds.append(importlib.import_module("umem.devices.cuda").CudaLimitError)
    for kind in kinds:
        assert pickle.loads(pickle.dumps(kind("no room", needed_bytes=7))).needed_bytes == 7
        assert kind("no room").needed_bytes is None


def test_an_error_has_a_sentence_of_its_own() -> None:
    for name in sorted(CLASSES):
        doc = CLASSES[name].__doc__
        assert doc
        assert doc.endswith(".")


def test_an_unfollowed_name_is_also_an_attribute_error_so_that_hasattr_works() -> None:
    from umem.devices.virtual import VirtualGPU

    arrays = VirtualGPU("t4").xp
    assert not hasattr(arrays, "linalg")
    with pytest.raises(errors.UnsupportedError, match="linalg"):
        _ = arrays.linalg


def elsewhere() -> Iterator[tuple[str, str]]:
    """Module and name of each class of an error that is not in umem.errors."""
    package = Path(umem.__file__).parent
    known = {*CLASSES, *(n for n, kind in vars(builtins).items() if inspect.isclass(kind))}
    for path in sorted(package.rglob("*.py")):
        module = ".".join((package.name, *path.relative_to(package).with_suffix("").parts))
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and module != errors.__name__:
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)} & known
                if any(name.endswith(("Error", "Exception")) for name in bases):
                    yield module, node.name


def test_an_error_of_another_module_goes_by_a_name_that_can_be_imported() -> None:
    found = [one for one in elsewhere() if one[1] not in INSIDE]
    assert len(found) >= 7
    for module, name in found:
        if name.startswith("Cuda") and importlib.util.find_spec("cupy") is None:
            continue
        if module.startswith("umem.chainer") and importlib.util.find_spec("chainer") is None:
            continue
        kind = getattr(importlib.import_module(module), name)
        before = (700,) if name == "CudaFault" else ()
        try:
            raise kind(*before, "the reason")
        except UmemError as error:
            *_, last = traceback.format_exception(error)
            copy = pickle.loads(pickle.dumps(error))
            assert type(copy) is kind and str(copy) == str(error)
        public, _, told = last.partition(": ")
        assert told == "the reason\n" or (before and told.endswith(": the reason\n"))
        assert public in {f"umem.errors.{one}" for one in CLASSES}, (module, name)
        assert issubclass(kind, CLASSES[public.rpartition(".")[2]])
        assert kind.__name__ == kind.__qualname__ == public.rpartition(".")[2]


def test_a_limit_on_cuda_is_named_as_one() -> None:
    pytest.importorskip("cupy")
    from umem.devices.cuda import CudaLimitError, CudaOutOfMemoryError

    assert repr(CudaLimitError) == "<class 'umem.errors.LimitError'>"
    assert repr(CudaOutOfMemoryError) == "<class 'umem.errors.OutOfMemoryError'>"


def test_an_error_of_a_program_keeps_its_own_name() -> None:
    class MineError(UmemError):
        pass

    assert MineError.__module__ == __name__ and MineError.__name__ == "MineError"
