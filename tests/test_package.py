"""What pyproject.toml says of the package is so."""

from __future__ import annotations

import ast

from project import PYPROJECT, ROOT

import umem

PACKAGE = ROOT / "umem"


def test_every_file_of_the_package_is_installed() -> None:
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["umem"]
    installed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    files = {path for path in PACKAGE.rglob("*") if path.is_file()}
    assert {path for path in files if path.suffix not in (".py", ".pyc")} == installed
    assert {path.suffix for path in installed} >= {".typed", ".csv", ".html", ".css", ".js"}


def test_every_module_is_in_a_package() -> None:
    """Folders without __init__.py are not looked for."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_version_is_read_as_text() -> None:
    """Building umem does not import it: NumPy need not be there."""
    dynamic = PYPROJECT["tool"]["setuptools"]["dynamic"]["version"]
    assert dynamic == {"attr": "umem.__version__"}
    source = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (version,) = (
        node.value
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    )
    assert ast.literal_eval(version) == umem.__version__


def test_the_citation_says_what_pyproject_says() -> None:
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    said = dict(line.split(": ", 1) for line in lines if ": " in line)
    project = PYPROJECT["project"]
    assert said["title"] == project["name"] and said["abstract"] == project["description"]
    assert said["version"] == umem.__version__ and said["license"] == project["license"]
    assert [said["  - name"]] == [author["name"] for author in project["authors"]]
    assert not any("://" in line for line in lines), "there is no address yet"
