"""The layer itself: what it refuses, what it leaves alone, and the start-up file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from project import ROOT

from tests.compat.test_shims import chainer
from umem.cli import main
from umem.compat import cuda_devices, finder, installation, pth, support
from umem.compat.catalogue import SHIMS
from umem.compat.requirement import holds
from umem.compat.shim import Replacement, Shim
from umem.compat.shim_report import check
from umem.errors import CompatError, MissingDependencyError


def python(code: str, *path: Path, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh Python that finds umem, with more folders in front of its path."""
    places = os.pathsep.join(str(p) for p in (*path, ROOT))
    environment = {**os.environ, "PYTHONPATH": places, "PYTHONWARNINGS": "default"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=folder, capture_output=True, text=True
    )


def succeed(code: str, *path: Path, folder: Path | None = None) -> str:
    done = python(code, *path, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fail(code: str, *path: Path, folder: Path | None = None) -> str:
    done = python(code, *path, folder=folder)
    assert done.returncode != 0, done.stdout
    return done.stderr.strip().splitlines()[-1]


def fake_chainer(folder: Path, version: str, reporter: str = "") -> Path:
    package = folder / "chainer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from chainer import reporter\n")
    (package / "_version.py").write_text(f"__version__ = {version!r}\n")
    (package / "reporter.py").write_text(reporter)
    return folder


# --- importing ----------------------------------------------------------------------------------


def test_installing_does_not_import_chainer():
    code = (
        "import sys\nfrom umem.compat import install, is_installed\n"
        "assert not is_installed()\ninstall(); install()\nassert is_installed()\n"
        "assert sum(type(f).__name__ == 'ShimFinder' for f in sys.meta_path) == 1\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('chainer', 'cupy')])"
    )
    assert succeed(code) == "[]\n"


@pytest.mark.thorough
def test_numpy_and_scipy_stay_as_they_are():
    code = (
        "import types, numpy, scipy\n"
        "def names(m):\n"
        "    return {k: id(v) for k, v in vars(m).items()}\n"
        "before = [names(numpy), names(scipy)]\n"
        "import umem.chainer, chainer\n"
        "for module, old in zip((numpy, scipy), before):\n"
        "    new = names(module)\n"
        "    assert {k: new.get(k) for k in old} == old, module\n"
        "    added = [k for k in new if k not in old]\n"
        "    assert all(isinstance(getattr(module, k), types.ModuleType) for k in added), added\n"
    )
    succeed(code)


def test_a_mended_module_keeps_its_file_and_its_lines():
    add = chainer.reporter.Summary.add
    file, line = add.__code__.co_filename, add.__code__.co_firstlineno
    assert file == chainer.reporter.__file__ == str(installation.module_file("chainer.reporter"))
    assert "def add(self, value, weight=1)" in Path(file).read_text().splitlines()[line - 1]


def test_mended_modules_write_no_byte_code(tmp_path):
    source = installation.module_file("chainer.reporter").read_text()
    fake_chainer(tmp_path, "7.8.1", source)
    (tmp_path / "chainer" / "__init__.py").write_text("")
    loader = finder.ShimLoader(
        "chainer.reporter", str(tmp_path / "chainer" / "reporter.py"), SHIMS_OF_REPORTER
    )
    assert loader.get_code("chainer.reporter") is not None
    assert not list(tmp_path.rglob("*.pyc"))


SHIMS_OF_REPORTER = [shim for shim in SHIMS if shim.module == "chainer.reporter"]


# --- refusing -----------------------------------------------------------------------------------


@pytest.mark.skipif(not holds("numpy>=2.0"), reason="Chainer imports by itself on NumPy 1")
def test_chainer_imported_first_is_refused():
    code = (
        "try:\n    import chainer\nexcept Exception: pass\n"
        "import sys\nassert 'chainer.backends.cuda' in sys.modules\n"
        "import umem.compat as c\n"
        "try:\n    import umem.chainer\n"
        "except c.finder.CompatError as error:\n    print(error)\n"
        "print(c.is_installed())"
    )
    out = succeed(code)
    assert "was imported before umem's compatibility layer" in out
    assert "`import umem.chainer`" in out and out.endswith("False\n")


def test_another_chainer_is_refused_with_its_version_and_place(tmp_path):
    fake_chainer(tmp_path, "6.7.0")
    message = fail("import umem.chainer", tmp_path)
    assert "umem.errors.CompatError: Chainer 6.7.0 at" in message
    assert str(tmp_path) in message and "source of Chainer 7.8" in message


def test_of_two_chainers_on_the_path_the_hidden_one_is_named(tmp_path):
    fake_chainer(tmp_path / "old", "5.0.0")
    fake_chainer(tmp_path / "new", "7.8.1")
    message = fail("import umem.chainer", tmp_path / "old", tmp_path / "new")
    assert "Chainer 5.0.0" in message
    assert f"hides Chainer 7.8.1 at {tmp_path / 'new' / 'chainer'}" in message


def test_a_chainer_changed_by_hand_is_refused_with_module_and_version(tmp_path):
    fake_chainer(tmp_path, "7.8.1", "class Summary: pass\n")
    message = fail("import umem.chainer", tmp_path)
    assert "CompatError" in message and "chainer.reporter of Chainer 7.8.1" in message
    assert "found 0 times instead of 1" in message


def test_a_missing_chainer_names_the_extra(monkeypatch):
    monkeypatch.setattr(installation, "find_package", lambda name="chainer": None)
    monkeypatch.setattr(finder, "active", lambda: None)
    with pytest.raises(MissingDependencyError, match=r"umem compat --get-chainer .*chainer\)$"):
        finder.install()
    with pytest.raises(MissingDependencyError, match=r"umem compat --get-chainer .*chainer\)$"):
        check()


def test_a_text_found_twice_is_refused():
    shim = Shim("s", "chainer.m", "", "", (Replacement("a\n", "b\n"),))
    with pytest.raises(CompatError, match="found 2 times instead of 1"):
        shim.apply("a\na\n", "7.8.1")
    assert shim.apply("a\n", "7.8.1") == "b\n"


def test_a_replacement_that_moves_lines_cannot_be_written():
    with pytest.raises(ValueError, match="number of lines"):
        Replacement("a\n", "b\n\n")


# --- requirements -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "requirement, expected",
    [
        ("any", True),
        ("python>=3.10", True),
        ("python<3", False),
        ("numpy", True),
        ("numpy>=1.0,<99", True),
        ("numpy==0.1", False),
        ("no-such-package", False),
        ("no-such-package>=1", False),
        ("numpy!=1.11.*", True),
        ("numpy!=0.1.*,>=1", True),
        ("numpy==1.11.*", False),
        ("numpy~=1.0.0", False),
        ("numpy[extra] >= 1.0", True),
        ("no-such-package; python_version < '3'", True),
        ("no-such-package; python_version >= '3'", False),
    ],
)
def test_requirements(requirement, expected):
    assert holds(requirement) is expected


@pytest.mark.parametrize(
    "version, requirement, expected",
    [
        ("2.5.0rc1", "numpy>=2.5", True),
        ("2.5.0.dev0+git1", "numpy<2.5", False),
        ("unknown", "numpy>=1", False),
        ("unknown", "numpy", True),
    ],
)
def test_a_version_that_is_no_release(monkeypatch, version, requirement, expected):
    monkeypatch.setattr(np, "__version__", version)
    assert holds(requirement) is expected


def test_without_packaging_the_extra_is_named_and_nothing_put_in_place(importable):
    code = (
        "import sys; sys.modules['packaging'] = None; before = list(sys.meta_path)\n"
        "from umem.compat import install\n"
        "try: install()\n"
        "except ImportError as error: print(error, sys.meta_path == before)"
    )
    said = succeed(code)
    assert "packaging" in said and "umem's extra: chainer" in said and said.endswith("True\n")


@pytest.mark.parametrize("text", ["numpy=>2", "numpy>=", "=2"])
def test_a_bad_requirement_is_refused(text):
    with pytest.raises(CompatError, match="not a requirement"):
        holds(text)


# --- devices ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "visible, hidden",
    [
        (None, False),
        ("", True),
        ("-1", True),
        ("0", False),
        ("0,1", False),
        ("-1,0", True),
        ("GPU-8932f937", False),
        ("1,7", False),
        ("2", True),
        ("2,0", True),
    ],
)
def test_devices_hidden_by_the_environment(visible, hidden):
    assert cuda_devices.hidden(visible, installed=2) is hidden


def test_devices_are_counted_without_initialising_cuda_where_nvml_can_tell(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(cuda_devices, "nvml_count", lambda: 2)
    assert cuda_devices.count(None) == 2  # a CuPy that is None could not be asked
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cuda_devices.count(None) == 0
    with pytest.raises(RuntimeError, match="no CUDA device"):
        support.require_device(None)


class Nvml:
    """Stands in for NVML: two calls that succeed or not, and how often it was shut down."""

    def __init__(self, start: int = 0, ask: int = 0) -> None:
        self.start, self.ask, self.stopped = start, ask, 0

    def nvmlInit_v2(self) -> int:
        return self.start

    def nvmlDeviceGetCount_v2(self, number) -> int:
        number._obj.value = 3
        return self.ask

    def nvmlShutdown(self) -> None:
        self.stopped += 1


@pytest.mark.parametrize(
    "nvml, expected, stopped",
    [(Nvml(), 3, 1), (Nvml(start=9), None, 0), (Nvml(ask=1), None, 1), (object(), None, 0)],
)
def test_nvml_is_asked_and_shut_down(monkeypatch, nvml, expected, stopped):
    monkeypatch.setattr(cuda_devices.ctypes, "CDLL", lambda name: nvml)
    assert cuda_devices.nvml_count() == expected
    assert getattr(nvml, "stopped", 0) == stopped


# --- the start-up file --------------------------------------------------------------------------


@pytest.fixture
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.thorough
def test_the_start_up_file_mends_scripts_that_never_heard_of_umem(tmp_path, importable):
    path = pth.install_pth(tmp_path)
    assert path == tmp_path / "umem_chainer.pth" and path.read_text().count("\n") == 1
    code = (
        f"import site, sys; site.addsitedir({str(tmp_path)!r})\n"
        "print('umem' in sys.modules, 'numpy' in sys.modules)\n"
        "import chainer; from umem.compat import is_installed\n"
        "print(chainer.__version__, is_installed())"
    )
    early, late = succeed(code, folder=tmp_path).splitlines()
    assert early == "False False"
    assert late.startswith("7.8.") and late.endswith("True")


@pytest.mark.thorough
def test_the_start_up_file_and_the_import_go_together(tmp_path, importable):
    pth.install_pth(tmp_path)
    site = f"import site; site.addsitedir({str(tmp_path)!r}); "
    assert succeed(site + "import umem.chainer, chainer; print(chainer.__version__)")


def test_the_start_up_file_imports_nothing(tmp_path, importable):
    line = pth.install_pth(tmp_path).read_text()
    code = f"import sys; before = set(sys.modules); exec({line!r}); "
    code += "print(set(sys.modules) - before, type(sys.meta_path[0]).__name__)"
    assert succeed(code) == "set() UmemChainerHook\n"


def test_a_start_up_file_that_outlives_umem_says_what_to_delete(tmp_path, importable):
    path = pth.install_pth(tmp_path)
    code = f"import sys, site; sys.path.remove({str(ROOT)!r}); site.addsitedir({str(tmp_path)!r})"
    message = fail(code + "\nsys.modules['umem'] = None\nimport chainer", folder=tmp_path)
    assert f"umem cannot be imported: install it, or delete {path}" in message


def test_the_start_up_file_is_removed_again(tmp_path, importable):
    path = pth.install_pth(tmp_path)
    assert pth.install_pth(tmp_path) == path
    assert pth.installed_pth(tmp_path) == path
    assert pth.remove_pth(tmp_path) == path
    assert list(tmp_path.iterdir()) == []
    assert pth.remove_pth(tmp_path) is None


def test_a_site_packages_that_cannot_be_written_is_left_as_it_was(tmp_path, importable):
    (tmp_path / "file").write_text("")
    with pytest.raises(CompatError, match=r"cannot write .* Nothing was written"):
        pth.install_pth(tmp_path / "file")
    (tmp_path / "folder" / pth.FILE_NAME).mkdir(parents=True)
    with pytest.raises(CompatError, match="cannot write"):
        pth.install_pth(tmp_path / "folder")
    assert [p.name for p in (tmp_path / "folder").iterdir()] == [pth.FILE_NAME]
    with pytest.raises(CompatError, match="still there"):
        pth.remove_pth(tmp_path / "folder")


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root writes everywhere"
)
def test_a_read_only_site_packages_is_refused(tmp_path, importable):
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(CompatError, match="Permission denied"):
            pth.install_pth(tmp_path)
    finally:
        tmp_path.chmod(0o755)
    assert list(tmp_path.iterdir()) == []


def test_no_start_up_file_where_others_cannot_import_umem(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(
        subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, returncode=1)
    )
    with pytest.raises(CompatError, match="cannot import umem"):
        pth.install_pth(tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- the table ----------------------------------------------------------------------------------


def test_check_has_a_row_for_each_mend_and_all_fit():
    rows = check()
    assert [row.name for row in rows] == [shim.name for shim in SHIMS]
    assert len({row.name for row in rows}) == len(rows)
    assert [row.error for row in rows if row.error] == []
    assert {row.state for row in rows} <= {"applied", "on import", "not needed"}


def test_check_tells_a_mend_that_no_longer_fits(monkeypatch, tmp_path):
    other = tmp_path / "reporter.py"
    other.write_text("")
    original = installation.module_file
    monkeypatch.setattr(
        installation, "module_file", lambda m: other if m == "chainer.reporter" else original(m)
    )
    bad = [row for row in check() if row.state == "does not fit"]
    assert [row.name for row in bad] == ["summary-float64"]
    assert "chainer.reporter of Chainer 7.8.1" in str(bad[0].error)
    result = CliRunner().invoke(main, ["compat", "--check"])
    assert result.exit_code == 1
    assert "does not fit" in result.output and "the mend 'summary-float64'" in result.output


@pytest.fixture(scope="module")
def shown():
    """The table and the JSON of one process, in which every mended module is imported."""
    code = (
        "from umem.cli import main\n"
        "main(['compat'], standalone_mode=False)\nprint('----')\n"
        "main(['compat', '--check', '--json'], standalone_mode=False)"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        return succeed(code).split("----\n")


@pytest.mark.thorough
def test_the_table_fits_80_columns_and_shows_every_mend(shown):
    table = [line for line in shown[0].splitlines() if not line.startswith("Start-up")]
    assert max(len(line) for line in table) <= 80
    assert all(shim.name in shown[0] for shim in SHIMS)
    assert "…" not in shown[0]


@pytest.mark.thorough
def test_the_table_as_json_says_what_was_applied(shown):
    report = json.loads(shown[1])
    assert report["versions"]["chainer"].startswith("7.8.")
    states = {mend["name"]: mend["state"] for mend in report["mends"]}
    assert set(states) == {shim.name for shim in SHIMS}
    assert states["summary-float64"] == "applied"
    assert report["failed_imports"] == {}


def test_the_command_says_what_it_wrote_and_removed(tmp_path, monkeypatch, importable):
    monkeypatch.setattr(pth, "site_packages", lambda: tmp_path)
    runner = CliRunner()
    written = runner.invoke(main, ["compat", "--install"])
    assert written.exit_code == 0 and f"Wrote {tmp_path / pth.FILE_NAME}" in written.output
    removed = runner.invoke(main, ["compat", "--remove"])
    assert f"Removed {tmp_path / pth.FILE_NAME}" in removed.output
    assert (
        "There is no start-up file to remove" in runner.invoke(main, ["compat", "--remove"]).output
    )


def test_the_command_shows_an_error_without_a_traceback(tmp_path, monkeypatch, importable):
    monkeypatch.setattr(pth, "site_packages", lambda: tmp_path / "nowhere")
    result = CliRunner().invoke(main, ["compat", "--install"])
    assert result.exit_code == 1
    assert result.output.startswith("Error: cannot write")
