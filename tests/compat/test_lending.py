"""An old package sees the names that NumPy has removed, and nobody else does."""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from project import ROOT

from tests.compat.test_shims import numpy_2
from umem.compat import lend_removed_names
from umem.compat.lending import LentNames
from umem.compat.numpy_stand_in import STAND_IN
from umem.compat.removed_names import NAMES
from umem.errors import CompatError, MissingDependencyError, StateError

Write = Callable[..., Path]
MANUAL = (ROOT / "docs" / "reference" / "chainer.md").read_text(encoding="utf-8")


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write modules into a folder on the path: a name and its text each."""
    before, finders = set(sys.modules), list(sys.meta_path)
    monkeypatch.syspath_prepend(tmp_path)

    def write(**modules: str) -> Path:
        for name, text in modules.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        return tmp_path

    yield write
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__spec__", None) and name.startswith(("old", "young")):
            del sys.modules[name]
    assert sys.meta_path == finders


def package(write: Write, text: str, **others: str) -> Path:
    """Write the package ``old`` with the module ``old.code``."""
    folder = write(old__code=text, **others)
    (folder / "old" / "__init__.py").write_text("")
    return folder


def lent(text: str, write: Write) -> ModuleType:
    package(write, text)
    with lend_removed_names("old"):
        return importlib.import_module("old.code")


# -- what the package sees ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "import numpy as np; found = np.float",
        "import numpy; found = numpy.float",
        "import numpy.linalg; found = numpy.float",
        "from numpy import float as found",
        "import numpy as np\nclass A:\n    found = np.float\nfound = A.found",
        "import numpy as np\ndef f(x=np.float): return x\nfound = f()",
        "def f():\n    import numpy as np\n    return np.float\nfound = f()",
        "found = eval('__import__(\"numpy\").float')",
        "names = {}\nexec('import numpy; found = numpy.float', names)\nfound = names['found']",
        "import numpy as np; found = getattr(np, 'float')",
    ],
)
def test_a_removed_name_is_there_however_it_is_reached(write: Write, text: str) -> None:
    assert lent(text, write).found is float
    assert not hasattr(np, "float")


def test_a_star_brings_them_but_not_those_that_would_hide_pythons_own(write: Write) -> None:
    names = vars(lent("from numpy import *", write))
    assert names["infty"] == np.inf and names["array"] is np.array
    assert "float" not in names and "object" not in names


def test_everything_else_is_numpys_own(write: Write) -> None:
    code = "import numpy as np, numpy.linalg as la\nfrom numpy import random"
    found = lent(code, write)
    assert found.la is np.linalg and found.random is np.random
    assert isinstance(found.np, ModuleType) and vars(found.np) is vars(np)
    assert dir(found.np) == dir(np) and repr(found.np) == repr(np)
    for name in set(np.__all__) - set(NAMES):
        assert getattr(found.np, name) is getattr(np, name)
    found.np.set_by_the_package = 1
    assert np.set_by_the_package == 1  # type: ignore[attr-defined]
    del found.np.set_by_the_package
    assert not hasattr(np, "set_by_the_package")


@numpy_2
def test_a_name_that_numpy_has_again_is_numpys() -> None:
    assert STAND_IN.bool is np.bool is not bool
    assert STAND_IN.long is np.long is not int


@numpy_2
@pytest.mark.parametrize("name", ["deprecate", "lookfor", "no_such_name"])
def test_a_name_without_successor_is_an_error_in_numpys_words(name: str) -> None:
    with pytest.raises(AttributeError) as plain:
        getattr(np, name)
    with pytest.raises(AttributeError) as found:
        getattr(STAND_IN, name)
    assert str(found.value) == str(plain.value)


def test_the_package_takes_the_stand_in_for_numpy(write: Write) -> None:
    found = lent(
        """\
        import numpy as np
        def ways(xp):
            return (xp is np, not (xp is not np), xp == np, np == xp, not xp != np,
                    xp in (np, None), {np: True}.get(xp, False))
        def chain(a, b, c): return a is b is c, a is None
        """,
        write,
    )
    assert set(found.ways(np)) == set(found.ways(found.np)) == {True}
    assert set(found.ways(importlib)) == {False}
    assert set(found.ways(2.5)) == {False}
    x = np.ones(2)
    assert found.chain(x, x, x) == (True, False) and found.chain(x, x, 1) == (False, False)


def test_tracebacks_have_the_lines_of_the_file(write: Write) -> None:
    found = lent("import numpy as np\ndef f(xp):\n\n    return 1 / (xp is not np)\n", write)
    with pytest.raises(ZeroDivisionError) as caught:
        found.f(np)
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (frame.filename, frame.lineno) == (found.__file__, 4)
    assert frame.line == "return 1 / (xp is not np)"


def test_an_error_of_syntax_is_pythons(write: Write) -> None:
    with pytest.raises(SyntaxError, match=r"\(code\.py, line 2\)"):
        lent("a = 1\nb = = 2", write)


def test_packages_in_an_archive_and_in_folders_without_init(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(old__part__code="import numpy as np; found = np.float")
    archive = tmp_path / "more.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("old_zipped/__init__.py", "import numpy as np; found = np.int")
        file.writestr("young_zipped.py", "import numpy as np; found = hasattr(np, 'int')")
    monkeypatch.syspath_prepend(archive)
    with lend_removed_names("old"), lend_removed_names("old_zipped"):
        assert importlib.import_module("old.part.code").found is float
        assert importlib.import_module("old_zipped").found is int
        assert not importlib.import_module("young_zipped").found


# -- who sees them, and until when ----------------------------------------------------------------


def test_nobody_else_sees_them(write: Write) -> None:
    package(
        write,
        "import young, older, numpy as np; found = np.float",
        young="import numpy; found = numpy",
        older="import numpy; found = numpy",
    )
    with lend_removed_names("old"):
        found = importlib.import_module("old.code")
    assert found.young.found is found.older.found is np is sys.modules["numpy"]


def test_a_part_of_a_package_can_be_lent_alone(write: Write) -> None:
    has = "import numpy as np; found = hasattr(np, 'float')"
    package(write, has, old__part=has)
    assert not importlib.import_module("old.code").found
    with lend_removed_names("old.part"):
        assert importlib.import_module("old.part").found


def test_imports_find_numpy_as_it_is_after_undo(write: Write) -> None:
    package(
        write,
        """\
        import numpy as np
        def late():
            import numpy
            return numpy
        """,
        old__later="import numpy; found = numpy",
    )
    first, second = lend_removed_names("old"), lend_removed_names("old")
    found = importlib.import_module("old.code")
    first.undo()
    first.undo()
    assert found.late() is found.np is STAND_IN
    second.undo()
    assert found.late() is importlib.import_module("old.later").found is np
    assert found.np.float is float  # what was bound stays
    assert importlib.reload(found).np is np
    with lend_removed_names("old.code"):
        assert importlib.reload(found).np is STAND_IN


def test_a_package_that_was_imported_before_is_refused(write: Write) -> None:
    package(write, "")
    importlib.import_module("old.code")
    with pytest.raises(StateError, match=r"^old was imported before"):
        lend_removed_names("old")
    with pytest.raises(StateError, match=r"^old\.code was imported before"):
        lend_removed_names("old.code")


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("olt", MissingDependencyError, "no package 'olt' to lend names to; near: old"),
        ("old.cod", MissingDependencyError, "no package 'old.cod' to lend names to; near: code"),
        ("old/code", MissingDependencyError, "no package 'old/code'"),
        ("", MissingDependencyError, "no package ''"),
        ("numpy", CompatError, "numpy is lent no names"),
        ("umem.data", CompatError, "umem is lent no names"),
        ("chainer.links", CompatError, "chainer is mended by umem.compat.install"),
        ("__main__", CompatError, "umem run --old-numpy __main__ SCRIPT"),
    ],
)
def test_what_cannot_be_lent_is_refused(
    write: Write, name: str, error: type[Exception], says: str
) -> None:
    package(write, "")
    with pytest.raises(error, match=re.escape(says)):
        lend_removed_names(name)
    assert "old" not in sys.modules


# -- the names ------------------------------------------------------------------------------------


@numpy_2
@pytest.mark.filterwarnings("ignore:The chararray class:DeprecationWarning")  # from NumPy 2.5 on
@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_table_is_there(name: str) -> None:
    assert getattr(STAND_IN, name) is not None
    assert f"`{name}`" in MANUAL


def test_numbers_are_what_they_were() -> None:
    assert STAND_IN.Inf == STAND_IN.infty == STAND_IN.PINF == -STAND_IN.NINF == float("inf")
    assert np.isnan([STAND_IN.NaN, STAND_IN.NAN]).all()
    assert str(STAND_IN.NZERO) == "-0.0" and str(STAND_IN.PZERO) == "0.0"


OF_TWO_ROWS: dict[str, Any] = {
    "alen": 2,
    "alltrue": False,
    "asfarray": [[3.0, 0.0], [2.0, 5.0]],
    "cumproduct": [3, 0, 0, 0],
    "fastCopyAndTranspose": [[3, 2], [0, 5]],
    "mat": [[3, 0], [2, 5]],
    "msort": [[2, 0], [3, 5]],
    "product": 0,
    "rank": 2,
    "round_": [[3, 0], [2, 5]],
    "sometrue": True,
    "trapz": [1.5, 3.5],
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # some are still in an older NumPy
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("name", OF_TWO_ROWS)
def test_functions_give_what_they_gave(name: str) -> None:
    found = getattr(STAND_IN, name)([[3, 0], [2, 5]])
    assert np.asarray(found).tolist() == OF_TWO_ROWS[name]
    assert np.asarray(found).dtype.kind == np.asarray(OF_TWO_ROWS[name]).dtype.kind


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_functions_of_two_arguments_give_what_they_gave() -> None:
    assert STAND_IN.in1d([[1, 2], [3, 1]], [1]).tolist() == [True, False, False, True]
    assert STAND_IN.in1d([1, 2], [1], invert=True).tolist() == [False, True]
    assert STAND_IN.row_stack([[1, 2], [3, 4]]).tolist() == [[1, 2], [3, 4]]
    assert STAND_IN.asscalar(np.array([2.5])) == 2.5
    assert STAND_IN.asfarray([1], "int32").dtype == "float64"
    assert STAND_IN.asfarray([1], "float32").dtype == "float32"
    assert STAND_IN.safe_eval("[1, {2: 3}]") == [1, {2: 3}]
    first, behind = STAND_IN.byte_bounds(np.zeros(3)[::-1])
    assert behind - first == 24


# Found with NumPy 1.23.5.
COMMON = {
    ("f f", ""): "f", ("f i", ""): "d", ("b B", ""): "h", ("l L", ""): "d", ("", "f F"): "F",
    ("f", "d"): "f", ("f", "l"): "f", ("l", "f"): "d", ("f", "D"): "D", ("e h", "?"): "f",
    ("?", "l"): "l", ("O", "d"): "O",
}  # fmt: skip


@pytest.mark.parametrize(("arrays", "scalars"), COMMON)
def test_the_common_type_is_what_it_was(arrays: str, scalars: str) -> None:
    found = STAND_IN.find_common_type(arrays.split(), scalars.split())
    assert found == np.dtype(COMMON[arrays, scalars])


def test_types_of_what_is_given_are_what_they_were() -> None:
    for given in (np.float32, "f4", np.zeros(1, "f4"), np.dtype("f4")):
        assert STAND_IN.obj2sctype(given) is np.float32
        assert STAND_IN.sctype2char(given) == "f"
        assert STAND_IN.nbytes[given] == 4
    assert STAND_IN.cast["f4"]([1, 2]).dtype == "f4"
    assert STAND_IN.obj2sctype("no type", 9) == 9
    assert STAND_IN.issubsctype("f4", float) is False and STAND_IN.issubsctype("f8", float)
    assert STAND_IN.issubclass_(3, int) is False and STAND_IN.issubclass_(bool, int)
    assert [STAND_IN.issctype(one) for one in ("f4", 3, float, list)] == [False, False, True, False]
    with pytest.raises(KeyError):
        STAND_IN.nbytes["no type"]
    with pytest.raises(ValueError, match="unrecognized type"):
        STAND_IN.sctype2char("no type")


# -- pkg_resources --------------------------------------------------------------------------------

VERSION = "import pkg_resources; found = pkg_resources.get_distribution('numpy').version"


def test_pkg_resources_is_lent_where_nothing_provides_it(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pkg_resources", None)
    found = lent(VERSION, write)
    assert found.found == np.__version__
    with pytest.raises(found.pkg_resources.DistributionNotFound, match="no-such-thing"):
        found.pkg_resources.get_distribution("no-such-thing")
    with pytest.raises(AttributeError, match=r"use importlib\.metadata or importlib\.resources"):
        _ = found.pkg_resources.working_set
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("pkg_resources")


def test_one_that_is_there_is_used(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ModuleType("pkg_resources")
    monkeypatch.setitem(sys.modules, "pkg_resources", own)
    assert lent("import pkg_resources as found", write).found is own


def test_another_missing_module_is_missing(write: Write) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        lent("import no_such_module", write)


# -- the rest -------------------------------------------------------------------------------------


@numpy_2
def test_scalars_keep_their_type_as_the_manual_says() -> None:
    with pytest.warns(RuntimeWarning, match="overflow"):
        assert np.uint8(200) + 100 == 44
    with pytest.raises(OverflowError):
        np.uint8(1) + 300


def test_a_handle_says_whether_it_is_on(write: Write) -> None:
    package(write, "")
    with lend_removed_names("old") as handle:
        assert isinstance(handle, LentNames) and handle.is_on
    assert not handle.is_on
