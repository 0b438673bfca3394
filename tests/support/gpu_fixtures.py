"""What tests on a real GPU share: the device under its guard, and what is put back afterwards."""

from __future__ import annotations

import gc
import importlib
import sys

import pytest
from processes import python

from tests.devices.cuda.test_gpu_guard import load_guard
from umem.devices import Policy
from umem.devices.cuda import open_cuda

MIB = 1 << 20
gpu_guard = load_guard()


LAUNCHED = pytest.mark.parametrize(
    "launched",
    [False, pytest.param(True, marks=pytest.mark.hardware("the software GPU launches no graphs"))],
)
"""For tests of a capture: whether its graph is run as well."""


def needs_module(name):
    """Import a module, or skip; with pytest before 8.2 too, whose importorskip does otherwise."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported: {error}", allow_module_level=True)


class OnGpu:
    """Fixtures for tests on the current GPU; all its managed memory is under the guard."""

    @pytest.fixture
    def device(self):
        device = open_cuda()
        if device.why_not("managed"):
            pytest.skip(device.why_not("managed"))
        forget_failure(device)
        gpu_guard.guard(device)
        yield device
        forget_failure(device)

    @pytest.fixture
    def cupy(self, device):
        return device.xp

    @pytest.fixture
    def use(self, device):
        """Install a policy until the test ends."""
        restores = []

        def install(mode, **options):
            restores.append(device.install(Policy(mode, **options), everywhere=False))

        yield install
        for restore in reversed(restores):
            restore()

    @pytest.fixture
    def hints(self, device):
        needs_module("cuda.core")
        return device


def forget_failure(device):
    """Give back what arrays held; also those that the last failure's traceback keeps alive."""
    device.synchronize()
    if hasattr(sys, "last_value"):
        for name in ("last_exc", "last_type", "last_value", "last_traceback"):
            vars(sys).pop(name, None)
        gc.collect()
    device.pools.give_back("managed", "spill", "pinned", "unmanaged")


def run(code, **environment):
    """A program in a process of its own; give it no more than a few MiB, nothing guards it."""
    return python("-c", code, timeout=120, **environment)
