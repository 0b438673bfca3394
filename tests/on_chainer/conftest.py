"""What is on Chainer: skipped where it is not installed, and Chainer is left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from umem.compat import find_package


class WithoutChainer(pytest.Module):
    """A file that is not imported."""

    def collect(self) -> Any:
        pytest.skip("no Chainer")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Any:
    """Skip whole files where there is no Chainer, which they import."""
    if find_package() is None:
        return WithoutChainer.from_parent(parent, path=module_path)
    return None


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """After every test Chainer's functions are the very objects that they were."""
    from umem.chainer.tap import POINTS

    before = [vars(point.owner)[point.name] for point in POINTS]
    yield
    after = [vars(point.owner)[point.name] for point in POINTS]
    assert all(now is then for now, then in zip(after, before, strict=True))
