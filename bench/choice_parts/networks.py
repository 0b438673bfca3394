"""The networks that bench/choice_live.py and bench/batch_live.py train, small enough to compute."""

from __future__ import annotations

from pathlib import Path
from threading import Event

from umem.choosing import TECHNIQUES, DryProgram, DryResult, run_dry
from umem.units import MIB

GPU = "t4"
BATCH = "3"
"""The argument of the script that is the batch."""
SCRIPT = Path(__file__).with_name("train.py")
GRANULE = 2 * MIB
"""A block of the GPU's driver: VRAM is told in whole ones."""
PLENTY = 4 << 30
NETWORKS = {
    "GCN": ("GCN", "3 layers, 16 classes", 5000), "perceptron": ("MLP", "256 wide", 4096),
    "transformer": ("transformer", "4 layers", 4), "U-Net": ("U-Net", "4 levels", 1),
    "DenseNet": ("DenseNet", "18 layers", 4), "residual": ("residual", "6 narrow blocks", 32),
    "LSTM": ("LSTM", "40 words", 64), "ResNet50": ("ResNet50", "64 px", 2),
    "VGG16": ("VGG16", "32 px", 4),
}  # fmt: skip


def program(network: str, vram: int) -> DryProgram:
    """The script that trains a network, on a GPU with so much VRAM."""
    family, size, batch = NETWORKS[network]
    return DryProgram(str(SCRIPT), (family, size, str(batch)), GPU, str(vram))


def least_bytes(network: str) -> int:
    """The least VRAM in which a plain step trains, in whole blocks, by bisection of dry runs."""

    def tried(blocks: int) -> DryResult:
        return run_dry(program(network, blocks * GRANULE), TECHNIQUES[0], Event())

    wide = tried(PLENTY // GRANULE)
    low, high = wide.peak_bytes // GRANULE, -(-wide.reserved_peak_bytes // GRANULE)
    while tried(high).why_not is not None:
        low, high = high, high + max(1, high // 8)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if tried(middle).why_not is None else (middle, high)
    return high * GRANULE
