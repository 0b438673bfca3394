"""A program that ends with everything still on ends in silence, and with its own exit code."""

from __future__ import annotations

import subprocess
import textwrap

import pytest
from processes import python

pytestmark = pytest.mark.thorough

CUDA = """
from cuda_host_driver import HostDriver
import cupy
from umem.devices.cuda import CudaDevice, gpus, driver as cuda_driver
gpus.opened[0] = CudaDevice(HostDriver())
cuda_driver.current_ordinal = lambda: 0
xp = cupy
"""
VIRTUAL = """
gpu = umem.virtual_gpu("v100-16gb", vram="64MiB")
xp = gpu.__enter__().xp
"""
LEFT_ON = {
    "a mode for the process": """
        import json, threading
        handle = umem.enable()
        kept = [xp.empty(1 << 20)]
        kept.append(kept)
        json.kept = xp.empty(1 << 20)
        thread = threading.Thread(target=lambda: kept.append(xp.empty(1 << 20)))
        thread.start(); thread.join()
    """,
    "a limit, a prefetch and a thread inside a block": """
        import threading, time
        umem.enable(limit="32MiB", prefetch=True)
        a = xp.empty(1 << 20)
        started = threading.Event()
        def work():
            with umem.virtual_gpu("t4"), umem.managed() as memory:
                a = memory.xp.ones(8)
                started.set()
                time.sleep(60)
        threading.Thread(target=work, daemon=True).start()
        started.wait()
    """,
    "blocks, a generator inside one, and what dies last": """
        import atexit
        blocks = [umem.managed(), umem.hybrid(limit="1MiB"), umem.unmanaged("8MiB"),
                  umem.managed(preset="random")]
        arrays = [(block.__enter__(), xp.empty(1 << 17))[1] for block in blocks]
        def steps():
            with umem.managed():
                yield xp.empty(1 << 20)
        running = steps()
        next(running)
        atexit.register(arrays.clear)
    """,
    "watches and a view of the host": """
        watches = umem.record(), umem.statistics(), umem.track(stacks=True)
        for watch in watches: watch.__enter__()
        with umem.managed():
            a = xp.empty(1 << 20)
        view = umem.as_numpy(a)
        del a
    """,
}
IS_MANAGED = "HostDriver.is_managed = lambda self, address: True\n"
IS_MANAGED += "HostDriver.synchronize = lambda self: None\n"


def run(device: str, code: str) -> subprocess.CompletedProcess[str]:
    if device == "cuda":
        pytest.importorskip("cupy")
    setup = CUDA + IS_MANAGED if device == "cuda" else VIRTUAL
    return python("-W", "error", "-c", "import umem\n" + setup + textwrap.dedent(code))


@pytest.mark.parametrize("device", ["virtual", "cuda"])
@pytest.mark.parametrize("what", LEFT_ON)
def test_what_is_left_on_at_the_end_makes_no_noise(device: str, what: str) -> None:
    done = run(device, LEFT_ON[what])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("device", ["virtual", "cuda"])
def test_an_error_inside_a_block_is_the_only_thing_that_is_said(device: str) -> None:
    done = run(device, "with umem.managed():\n    a = xp.empty(8)\n    raise KeyError('mine')")
    assert done.returncode == 1 and done.stderr.endswith("KeyError: 'mine'\n")
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize("device", ["virtual", "cuda"])
def test_the_exit_code_is_the_programs_own(device: str) -> None:
    done = run(device, "umem.enable(); a = xp.empty(8); import sys; sys.exit(3)")
    assert (done.returncode, done.stderr) == (3, "")
