"""What is held, at most and in between, and whose tracemalloc it stays."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from umem.trace.recording.meter import HeldBytes, HostMeter

MIB = 1 << 20
SLACK = 4096
"""Bytes of Python's own objects."""


@pytest.fixture
def followed() -> Iterator[None]:
    tracemalloc.start(1)
    yield
    tracemalloc.stop()


def test_workspace_is_what_is_held_only_in_between() -> None:
    assert HeldBytes(3, 10).workspace == 7
    assert HeldBytes(10, 3).workspace == 0


def test_a_block_is_measured_and_nothing_after_it() -> None:
    with HostMeter() as meter:
        before = meter.held().live
        kept = np.empty(MIB, np.uint8)
        np.empty(2 * MIB, np.uint8)
        held = meter.held()
        assert meter.is_ours and kept.nbytes == MIB
    assert MIB <= held.live - before <= MIB + SLACK
    assert 2 * MIB - SLACK <= held.workspace <= 2 * MIB + SLACK
    assert not tracemalloc.is_tracing() and meter.held() == (0, 0)


def test_the_peak_begins_anew() -> None:
    with HostMeter() as meter:
        np.empty(2 * MIB, np.uint8)
        meter.reset()
        assert meter.held().workspace <= SLACK


@pytest.mark.usefixtures("followed")
def test_what_another_follows_stays_on_with_its_peak() -> None:
    np.empty(3 * MIB, np.uint8)
    before = tracemalloc.get_traced_memory()[1]
    with HostMeter() as meter:
        np.empty(MIB, np.uint8)
        assert meter.held().workspace <= MIB + SLACK and not meter.is_ours
    assert before <= tracemalloc.get_traced_memory()[1] <= before + SLACK
    with HostMeter() as meter:
        np.empty(5 * MIB, np.uint8)
    assert tracemalloc.get_traced_memory()[1] >= 5 * MIB
    meter.stop()
    assert tracemalloc.is_tracing()


def test_an_error_ends_the_block() -> None:
    with pytest.raises(ValueError), HostMeter():
        raise ValueError
    assert not tracemalloc.is_tracing()
