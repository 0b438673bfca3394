"""The code of docs/how-to/recipes.md has NumPy's and SciPy's results, on data larger than VRAM."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from bench_scripts import RESULTS, module
from project import ROOT
from software_programs import lines, needs_compiler, needs_cupy

PAGE = ROOT / "docs" / "how-to" / "recipes.md"
MOST_LINES = 12
START = """
import numpy as np
import umem
gpu = umem.software_gpu("t4", "24MiB", force=True)
import cupy as cp
"""
CHECKS = {
    "A matrix larger than the card": "product, old['rows'] @ right",
    "A sort": "ordered, np.sort(old['keys'])",
    "Fourier transforms of rows": "signals, np.fft.fft(old['signals'], axis=1)",
    "A sparse system": "cp.asnumpy(x), scipy_cg(matrix)",
    "k-means": "cp.asnumpy(centres), np.stack([points[i::8].mean(0, 'f8') for i in range(8)])",
    "An image": "edges, filtered(image)",
    "Monte Carlo": "prices, drawn(len(prices))",
}
DASK = {"dask.array": "result, (table - table.mean(0, 'f8')) / table.std(0, dtype='f8')"}
ORACLES = """
def scipy_cg(matrix):
    from scipy.sparse.linalg import cg
    return cg(matrix.astype("f8"), np.ones(matrix.shape[0]), maxiter=10)[0]

def filtered(image):
    from scipy import ndimage
    smooth = ndimage.gaussian_filter(image, 2)
    return np.hypot(ndimage.sobel(smooth, 0), ndimage.sobel(smooth, 1))

def drawn(count):
    h = np.arange(8 * count, dtype="u4").reshape(count, 8)
    h = (h ^ h >> 16) * np.uint32(0x85EBCA6B)
    h = (h ^ h >> 13) * np.uint32(0xC2B2AE35)
    return 100 * np.exp(0.2 * (((h ^ h >> 16) >> 8).sum(axis=1, dtype="f8") / 2**24 - 4))

def run(data, program, check):
    held = {"cp": cp, "np": np, "umem": umem}
    exec(data, held)
    old = {name: one.copy() for name, one in held.items() if isinstance(one, np.ndarray)}
    exec(program, held)
    found, wanted = eval(check, {**globals(), **held, "old": old})
    print(found.shape == wanted.shape and np.allclose(found, wanted, 1e-3, 1e-3))
"""


def recipes() -> dict[str, str]:
    """Return the code of each section that has some, by heading."""
    found = re.findall(r"\n## ([^\n]+)\n(.*?)(?=\n## |\Z)", PAGE.read_text("utf-8"), re.DOTALL)
    return {
        heading: text.partition("```py\n")[2].partition("```")[0]
        for heading, text in found
        if "```py\n" in text
    }


def found(checks: dict[str, str], cache: Path) -> list[str]:
    """Run recipes and their checks in one process."""
    codes = recipes()
    program = ORACLES
    for heading, check in checks.items():
        data, _, rest = codes[heading].partition("\n\n")
        program += f"run({data!r}, {rest!r}, {check!r})\n"
    return lines(program, cache, start=START)


def test_every_recipe_is_checked_and_has_at_most_twelve_lines() -> None:
    codes = recipes()
    assert list(codes) == [*CHECKS, *DASK]
    for heading, code in codes.items():
        assert len([line for line in code.splitlines() if line.strip()]) <= MOST_LINES, heading


def test_the_figures_of_the_page_are_those_of_the_kept_result() -> None:
    result = json.loads((RESULTS / "recipes.json").read_text(encoding="utf-8"))
    lines = {line.strip() for line in PAGE.read_text(encoding="utf-8").splitlines()}
    assert [line for line in module("recipes").page_lines(result) if line not in lines] == []


def test_every_recipe_has_a_picture() -> None:
    page = PAGE.read_text(encoding="utf-8")
    pictures = re.findall(r"\((\.\./images/recipe-[\w-]+\.png)\)", page)
    assert len(pictures) == len(recipes())
    assert all((PAGE.parent / picture).exists() for picture in pictures)


@needs_cupy
@needs_compiler
def test_the_code_of_the_page_has_numpys_results(kernel_cache: Path) -> None:
    assert found(CHECKS, kernel_cache) == ["True"] * len(CHECKS)


@needs_cupy
@needs_compiler
@pytest.mark.skipif(find_spec("dask") is None, reason="dask is not installed")
def test_the_code_for_dask_has_numpys_results(kernel_cache: Path) -> None:
    assert found(DASK, kernel_cache) == ["True"]
