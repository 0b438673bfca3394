"""Arrays counted by NumPy's own allocator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from bench_scripts import module

ArrayBytes = module("recompute_parts.array_bytes").ArrayBytes
BENCH = Path(__file__).parents[2] / "bench"


def test_arrays_are_counted_from_their_making_to_their_end() -> None:
    early = np.ones(1000)
    with ArrayBytes() as meter:
        kept = np.ones(10_000)
        one, other = kept * 2, kept * 3
        assert meter.live == 240_000 <= meter.peak < 240_100  # the scalars are small arrays
        del one, early
        assert meter.live == 160_000 < 240_000 <= meter.peak
        meter.reset()
        zeros = np.zeros(10**6)  # whose memory is asked for without the interpreter's lock
        assert meter.peak == 8_160_000
        zeros.resize(2 * 10**6, refcheck=False)
        assert meter.live == 16_160_000
        objects = [object() for _ in range(1000)]
        assert meter.live == 16_160_000 and objects
        with meter.paused():
            other = np.ones(5)
        assert meter.live == 16_080_000
        del zeros, kept, other
    assert meter.live == 0


def test_arrays_may_outlive_the_meter_and_the_interpreter() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(BENCH)!r}); import numpy as np\n"
        "from recompute_parts.array_bytes import ArrayBytes\n"
        "with ArrayBytes() as meter: sys.kept = [np.ones(size) for size in range(2000)]\n"
        "with ArrayBytes() as meter: del sys.kept[::2]\n"
        "print(meter.live)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
