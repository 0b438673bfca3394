"""Every call that bench/gpu_run.py makes on a card, as a test for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_scripts import module

calls = module("gpu_run_parts.calls")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # as on a card: what warns there has not failed
]


@pytest.fixture(scope="module")
def gpu() -> Any:
    """CuPy and the device, under the guard."""
    return calls.opened("first_light")


@pytest.fixture(autouse=True)
def tidy(gpu: Any) -> Iterator[None]:
    """What a call leaves on is put off, and the GPU still answers."""
    yield
    assert calls.tidy(gpu[0]), "the GPU does not answer any more"


def passes(call: Any, gpu: Any, folder: Path) -> None:
    line = calls.tried(call, calls.Given(*gpu, folder, True))
    if line["state"] == "missing":
        pytest.skip(line["error"])
    assert line["state"] == "passed", line["error"] + "\n" + line["where"]


@pytest.mark.parametrize("call", calls.calls_of("first_light"), ids=lambda call: call.name)
def test_first_light(call: Any, gpu: Any, tmp_path: Path) -> None:
    passes(call, gpu, tmp_path)


@pytest.mark.parametrize("call", calls.calls_of("pressure"), ids=lambda call: call.name)
def test_pressure(call: Any, gpu: Any, tmp_path: Path) -> None:
    passes(call, gpu, tmp_path)
