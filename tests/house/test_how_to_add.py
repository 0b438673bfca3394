"""A step of CONTRIBUTING's *How to add* that is forgotten: a page, a test, or a name of its own."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
from project import ROOT

import umem.data
from umem._common import specs
from umem.choosing import TECHNIQUES
from umem.choosing.technique_rows import together
from umem.devices.base import ADVICE, Advice
from umem.devices.presets import PRESETS, Preset
from umem.devices.virtual.advice import advice_flag
from umem.reports.outputs import OUTPUTS
from umem.units import KIB

PAGES = {
    name: (ROOT / "docs" / "reference" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("dry-runs", "traces", "hints")
}
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
LIBRARIES = sorted(ROOT.glob("umem/**/libraries/*.py"))
"""The libraries of CUDA on the software GPU."""


def test_every_file_that_contributing_names_is_there() -> None:
    paths = set(
        re.findall(r"`((?:umem|tests|bench|docs|scripts)/[\w./]+\.(?:py|md|h|txt))`", CONTRIBUTING)
    )
    assert len(paths) > 20
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]


# -- a technique -----------------------------------------------------------------------------------


def test_every_technique_has_a_name_of_its_own() -> None:
    names = [row.name for row in TECHNIQUES]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("row", TECHNIQUES, ids=lambda row: row.name)
def test_every_technique_is_on_its_page_and_runs_in_another_process(
    row: umem.choosing.Technique,
) -> None:
    assert pickle.loads(pickle.dumps(row)).name == row.name
    is_pair = isinstance(row.turn_on, partial) and row.turn_on.func is together
    cells = re.findall(r"^\| ([^|]+) \|", PAGES["dry-runs"], re.M)
    assert is_pair or row.name in [name.strip() for cell in cells for name in cell.split(";")]


# -- a GPU -----------------------------------------------------------------------------------------


def test_every_gpu_has_a_name_of_its_own() -> None:
    assert len(specs.GPUS) == len(specs._ROWS)


# -- a report --------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda output: output.name)
def test_every_report_has_a_name_of_its_own_and_is_on_its_page(output: umem.reports.Output) -> None:
    assert [one.name for one in OUTPUTS].count(output.name) == 1
    option = " ".join(map(str, output.option(Path("FILE"))))
    assert f"`umem report TRACE {option}`" in PAGES["traces"]


# -- a function of a CUDA library on the software GPU ----------------------------------------------


@pytest.mark.parametrize("path", LIBRARIES, ids=lambda path: path.stem)
def test_every_c_function_of_a_library_has_a_method(path: Path) -> None:
    """One that has none would be found by the first program that opens a software GPU."""
    text = path.read_text(encoding="utf-8")
    tables = [
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "C_FUNCTIONS"
    ]
    names = [ast.literal_eval(key) for table in tables for key in getattr(table, "keys", ()) if key]
    assert len(names) == len(set(names))
    # in cuSOLVER's the method has the name that CuPy's module has
    places = {
        name: re.findall(rf"\b(?:{name}|{name.removeprefix('cusolverDn').lower()})\b", text)
        for name in names
    }
    assert not [name for name, found in places.items() if len(found) < 2]


# -- a hint ----------------------------------------------------------------------------------------


def test_every_preset_is_typed_and_on_its_page() -> None:
    assert set(get_args(Preset)) == set(PRESETS)
    named = re.findall(r"^\| `(\w+)` \|", PAGES["hints"], re.M)
    assert sorted(named) == sorted(PRESETS)
    assert {advice for pairs in PRESETS.values() for advice, _ in pairs} <= set(ADVICE)


def test_every_advice_is_typed_and_known_to_the_model_and_to_cuda() -> None:
    assert set(get_args(Advice)) == set(ADVICE)
    driver = (ROOT / "umem" / "devices" / "cuda" / "driver.py").read_text(encoding="utf-8")
    numbers = ast.literal_eval(re.findall(r"^_SET\b.* = (.*)$", driver, re.M)[0])
    assert set(numbers) == set(ADVICE)
    assert len({advice_flag(advice, "cpu") for advice in ADVICE}) == len(ADVICE)


# -- a codec ---------------------------------------------------------------------------------------

CODECS = [
    value
    for value in vars(umem.data).values()
    if inspect.isclass(value) and hasattr(value, "decompress") and value is not umem.data.Codec
]


@pytest.mark.parametrize("kind", CODECS, ids=lambda kind: kind.__name__)
def test_every_codec_gives_bytes_back_and_is_sent_to_processes(kind: type[umem.data.Codec]) -> None:
    codec = pickle.loads(pickle.dumps(kind()))
    assert [one.name for one in CODECS].count(
        codec.name
    ) == 1 and kind.__name__ in umem.data.__all__
    for nbytes in (1, 127, 8 * KIB):
        for text, dtype in ((b"\0", "|u1"), (b"\1\2\3\4", "<f4")):
            buffer = memoryview((text * nbytes)[:nbytes])
            small = codec.compress(buffer, dtype)
            assert small is None or bytes(codec.decompress(memoryview(small), nbytes)) == buffer
    with pytest.raises(ValueError):
        codec.decompress(memoryview(b"no such bytes"), 8 * KIB)


def test_every_codec_of_the_library_is_public() -> None:
    found = {
        node.name
        for path in (ROOT / "umem" / "data").glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
        and {"compress", "decompress"} <= {getattr(part, "name", "") for part in node.body}
    }
    assert found - {"Codec"} == {kind.__name__ for kind in CODECS}
