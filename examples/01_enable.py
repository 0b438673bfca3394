"""One line: arrays that together are larger than the GPU's memory, in a program as it was.

python examples/01_enable.py [virtual:v100-16gb | cuda]

Only the line with umem.enable() is new in the program. The three arrays hold 96 MiB each. On a
virtual GPU, which is what this runs on where there is no CUDA device, VRAM is 128 MiB.
"""

import sys
from contextlib import ExitStack

import umem
from umem.units import format_bytes


def program(xp):
    """y += a * x, ten times over, on the array module xp."""
    shape = (24, 1 << 20)  # float32: 96 MiB
    x, y, a = (xp.full(shape, value, dtype="float32") for value in (1, 2, 0.5))
    for _ in range(10):
        y += a * x
    return float(y.mean())


def open_device(stack, name):
    """A virtual GPU until `stack` is closed, unless a real one is asked for, or is there."""
    if not name:
        name = "cuda" if umem.status().device else "virtual:v100-16gb"
    if name.startswith("virtual:"):
        print(f"The GPU is simulated ({name}, 128 MiB of VRAM); the arithmetic is real.")
        stack.enter_context(umem.virtual_gpu(name.removeprefix("virtual:"), vram="128MiB"))
    elif name != "cuda":
        raise SystemExit(f"a device is virtual:NAME or cuda; got {name}")


if __name__ == "__main__":
    with ExitStack() as stack:
        open_device(stack, "".join(sys.argv[1:2]))

        memory = umem.enable()  # the one line; memory.xp is CuPy, or the virtual GPU's arrays

        print(f"mean: {program(memory.xp):.1f}")
        status = umem.status()
        print(status)
        umem.disable()
        held = format_bytes(status.peak_bytes)
    print(f"{held} were reserved on a GPU with {format_bytes(status.vram_bytes)}.")
