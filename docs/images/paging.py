"""Makes paging.png: the pages that move in a loop over more managed memory than VRAM.

On the software GPU, simulated; needs CuPy and matplotlib. Run it from the repository's root:
python docs/images/paging.py
"""

from __future__ import annotations

from pathlib import Path

import umem

umem.software_gpu("t4", vram="32MiB", force=True)

import cupy as cp  # noqa: E402  (behind the software GPU)


def main() -> None:
    """Draw a loop that streams over three arrays of 16 MiB, and prefetches one of them."""
    umem.enable()
    with umem.paging() as p:
        field = cp.ones((4, 1 << 20), "f4")
        weights = cp.ones((4, 1 << 20), "f4")
        for _ in range(3):
            sums = field + weights
            umem.prefetch(field)
            field *= 0.5
        del sums
    p.print_report()
    p.draw(Path(__file__).parent / "paging.png")


if __name__ == "__main__":
    main()
