"""The tree of errors is the one that is drawn, and each error is what people already catch."""

from __future__ import annotations

import builtins
import inspect
import pickle
import re

import pytest

from umem import errors
from umem.errors import UmemError

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


def test_an_error_has_a_sentence_of_its_own() -> None:
    for name in sorted(CLASSES):
        doc = CLASSES[name].__doc__
        assert doc
        assert doc.endswith(".")


def test_an_unfollowed_name_is_also_an_attribute_error_so_that_hasattr_works() -> None:
    from umem.devices.virtual import arrays

    assert not hasattr(arrays, "linalg")
    with pytest.raises(errors.UnsupportedError, match="linalg"):
        _ = arrays.linalg
