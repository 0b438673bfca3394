"""Makes software.png: a program that imports CuPy, on a software T4 with less VRAM than it needs.

The largest singular value of a matrix of 96 MiB, with 64 MiB of VRAM: plainly, until CuPy's
OutOfMemoryError, and in managed memory. Needs CuPy for CUDA 12, a C++ compiler and matplotlib.
Run it from the repository's root: python docs/images/software.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import umem

gpu = umem.software_gpu("t4", "64MiB")

import cupy  # noqa: E402

from umem.reports import finish, new_figure  # noqa: E402
from umem.units import MIB, format_seconds  # noqa: E402

HERE = Path(__file__).resolve().parent
SIZE, PARTS, STEPS = 2048, 6, 4
BLUE, INK, GREY = "#2166ac", "#1b2130", "#c9d0d9"


def largest_singular_value() -> float:
    """Of a matrix of ones that lies in blocks of rows, 16 MiB each."""
    parts = [cupy.ones((SIZE, SIZE), "f4") for _ in range(PARTS)]
    vector = cupy.ones(SIZE, "f4")
    size = cupy.float32(0)
    for _ in range(STEPS):
        product = sum(part.T @ (part @ vector) for part in parts)
        size = cupy.linalg.norm(product)
        vector = product / size
    return float(size) ** 0.5


def run(mode: Any) -> tuple[list[tuple[float, float, float]], str]:
    """The timeline in seconds and MiB, and how it ended."""
    gpu.restart()
    try:
        with mode:
            end = f"its result, after {{}}: {largest_singular_value():,.1f}"
    except MemoryError:
        end = "cupy.cuda.memory.OutOfMemoryError"
    found = [(t, held / MIB, resident / MIB) for t, held, resident in gpu.timeline]
    cupy.get_default_memory_pool().free_all_blocks()
    return found, end.format(format_seconds(gpu.figures.seconds))


def main() -> None:
    """Run both ways and draw them."""
    figure = new_figure(9.0, 3.4)
    panels = figure.subplots(1, 2, sharey=True)
    modes = {"as it is": umem.unmanaged(), "with umem.managed():": umem.managed()}
    for panel, (name, mode) in zip(panels, modes.items(), strict=True):
        line, end = run(mode)
        seconds = [1000 * point[0] for point in line]
        panel.fill_between(seconds, [point[1] for point in line], color=GREY, label="allocated")
        panel.fill_between(seconds, [point[2] for point in line], color=BLUE, label="in VRAM")
        panel.axhline(64, color=INK, linewidth=1, linestyle="--", label="VRAM")
        panel.set_title(f"{name}\n{end}", fontsize=9, loc="left")
        panel.set_xlabel("simulated ms")
    panels[0].set_ylabel("MiB")
    panels[1].legend(fontsize=8, loc="lower right")
    title = "a CuPy program on a software T4 with 64 MiB of VRAM (simulated)"
    finish(figure, title, HERE / "software.png")


if __name__ == "__main__":
    main()
