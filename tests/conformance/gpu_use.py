"""Writes down which cases of another project's tests did something on the software GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chosen_cases import name_of


def _gpu_seconds() -> float:
    """Return the simulated time of the GPU so far; 0 where nothing has opened one."""
    cost: Any = sys.modules.get("umem.devices.cost")
    model = cost and cost.cuda_model()
    return (model.figures.seconds or 0) if model else 0


class GpuUse:
    """A plugin of pytest's that adds names of cases to a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> Iterator[Any]:
        before = _gpu_seconds()
        result = yield
        if _gpu_seconds() != before:
            with self._file.open("a", encoding="utf-8") as names:
                names.write(f"{name_of(item.nodeid)}\n")
        return result


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(GpuUse(Path(os.environ["GPU_USE_FILE"])))
