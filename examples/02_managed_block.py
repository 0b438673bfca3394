"""A block: managed memory where it is needed, plain memory for what is always hot, and hints.

python examples/02_managed_block.py [virtual:v100-16gb | cuda]

Three arrays of 96 MiB are read again and again. On a virtual GPU, which is what this runs on where
there is no CUDA device, VRAM is 128 MiB, and what moved is known.
"""

import sys
from contextlib import ExitStack

import umem
from umem.units import format_bytes, format_seconds


def sums(xp, hint):
    """Row sums of three large arrays, three times over."""
    arrays = [xp.full((24, 1 << 20), value, dtype="float32") for value in (1, 2, 3)]
    if hint:
        umem.preset(arrays, "streaming")  # read once in order: leave them on the host, and map them
    with umem.unmanaged():
        total = xp.zeros(24, dtype="float32")  # small and hot: it never leaves VRAM
    for _ in range(3):
        for array in arrays:
            total += array.sum(axis=1)
    return float(total.sum())


def run(device, hint):
    """The sums in a managed block on the device; says what moved where that is known."""
    with ExitStack() as stack:
        gpu = None
        if device != "cuda":
            gpu = stack.enter_context(umem.virtual_gpu(device, vram="128MiB"))
        with umem.managed(limit="2GiB") as memory:
            total = sums(memory.xp, hint)
    print(f"{'with' if hint else 'without'} a hint: the sum is {total:.0f}")
    if gpu is not None:
        figures = gpu.figures
        moved = figures.migrated_in_bytes + figures.migrated_out_bytes
        print(
            f"  {format_bytes(moved)} moved, {format_bytes(figures.remote_bytes)} used in place, "
            f"{format_seconds(figures.seconds)} (simulated)"
        )


if __name__ == "__main__":
    name = "".join(sys.argv[1:2]) or ("cuda" if umem.status().device else "virtual:v100-16gb")
    if name != "cuda" and not name.startswith("virtual:"):
        raise SystemExit(f"a device is virtual:NAME or cuda; got {name}")
    if name != "cuda":
        print(f"The GPU is simulated ({name}, 128 MiB of VRAM); the arithmetic is real.")
    for hint in (False, True):
        run(name.removeprefix("virtual:"), hint)
