"""GPUs and cost constants, each with its source.

VRAM, bandwidth and peak rates are datasheet figures; rates of tensor cores are for dense matrices.
The host link is a *planning value*: the rate of large pinned copies over that bus, not the bus's
raw rate.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from typing import Any

from umem._common.arithmetic import (
    BFLOAT16_PRODUCT,
    FLOAT16_PRODUCT,
    FLOAT64,
    FLOAT64_PRODUCT,
    TF32_PRODUCT,
)
from umem.errors import SizeError, UnknownGpuError
from umem.units import BLOCK_BYTES, GIB, MIB, format_bytes

GB = 10**9
PCIE3 = "planning value for PCIe 3.0 x16"
PCIE4 = "planning value for PCIe 4.0 x16"
PCIE5 = "planning value for PCIe 5.0 x16"


REPORTED, REPORTED_WITH_ECC = 0.985, 0.92
"""Share of a GPU's memory that the driver reports, for GPUs without a published figure.

An A100 of 80 GB has 79.25 GiB, an H100 79.11 and an RTX 3090 23.69 of 24 (0.987 to 0.991). On GDDR6
error correction takes a part: a T4 has 14.56 GiB of 16, an L40 44.40 of 48 (0.91 and 0.925). All
figures are from PyTorch's errors in public reports."""
CONTEXT_BYTES = 3 * MIB
"""Size of a context in VRAM for each multiprocessor, before any kernel is loaded.

Measured: 256 MiB on an RTX 3090 (82 of them; InvokeAI issue 9413), 426 on an RTX 6000 Ada (142;
unsloth-zoo 1053), 107 on an RTX 4060 Ti (34) and 555 on an RTX PRO 6000 (188; llama.cpp 23604):
2.95 to 3.15 MiB each."""


@dataclass(frozen=True)
class GpuSpec:
    """The figures of a GPU that the model uses.

    ``vram_bytes`` is the advertised memory, ``total_bytes`` the memory that the driver reports
    (None: the same as usable), and ``usable_bytes`` the rest of that beside a context. Bandwidths
    are in bytes a second, rates in operations a second. ``host_in`` is host to GPU; None if GPU
    and host share their memory. ``nvlink_bandwidth`` is for one direction, half of NVIDIA's figure
    for both; None without NVLink. ``chip`` is the compute capability, major and minor, and the
    number of multiprocessors; None if unknown, and then `umem.software_gpu` refuses the GPU.

    ``fp64_rate`` is for ordinary float64 arithmetic; None if unknown, and then `fp32_rate` is used.
    ``fp16_rate``, ``tf32_rate`` and ``fp64_product_rate`` are for matrix products on tensor cores:
    16-bit numbers with sums in float32, float32 rounded to TF32, and float64. None if the GPU has
    no such cores or the datasheet gives no figure; then other units compute these products.
    """

    name: str
    title: str
    vram_bytes: int
    usable_bytes: int
    memory_bandwidth: float
    fp32_rate: float
    fp16_rate: float | None
    host_in_bandwidth: float | None
    host_out_bandwidth: float | None
    source: str
    link_source: str
    chip: tuple[int, int, int] | None = None
    nvlink_bandwidth: float | None = None
    fp64_rate: float | None = None
    tf32_rate: float | None = None
    fp64_product_rate: float | None = None
    total_bytes: int | None = None

    def tensor_rate(self, arithmetic: str) -> float | None:
        """Return the peak rate of a kind of arithmetic on tensor cores; None without such cores.

        From compute capability 8.0 on, bfloat16 products have the rate of float16.
        """
        if arithmetic == BFLOAT16_PRODUCT:
            return self.fp16_rate if self.chip is not None and self.chip[0] >= 8 else None
        rates = {
            FLOAT16_PRODUCT: self.fp16_rate,
            TF32_PRODUCT: self.tf32_rate,
            FLOAT64_PRODUCT: self.fp64_product_rate,
        }
        return rates.get(arithmetic)

    def with_vram(self, vram_bytes: int) -> GpuSpec:
        """Return the GPU with exactly ``vram_bytes`` usable."""
        return replace(self, vram_bytes=vram_bytes, usable_bytes=vram_bytes, total_bytes=None)


def check_vram(spec: GpuSpec) -> None:
    """Check that a GPU's VRAM holds at least one block.

    Raises:
        SizeError: VRAM is smaller than a block.
    """
    if spec.usable_bytes < BLOCK_BYTES:
        raise SizeError(
            f"vram must be at least one block of {format_bytes(BLOCK_BYTES)}; "
            f"got {format_bytes(spec.usable_bytes)}"
        )


@dataclass(frozen=True)
class Costs:
    """Costs of the driver's work, in seconds for each block of 2 MiB. Host work is the same for
    every GPU.

    Sources: NVIDIA's driver serves faults on one host thread (uvm_gpu_replayable_faults.c); Allen
    and Ge, SC 2021, measured batches on a Titan V; public measurements on P100 and RTX 5090
    (docs/reference/virtual-gpu.md lists them, bench/validate_um.py compares the model with them).
    """

    fault_stream: float = 200e-6
    fault_strided: float = 20e-6
    fault_random: float = 300e-6
    prefetch: float = 10e-6
    populate_fault: float = 137e-6
    populate_prefetch: float = 15e-6
    allocation: float = 3e-6
    """``cudaMalloc`` and ``cudaFree`` together, for each block: the median over four sizes of a
    program with and without a caching pool on an RTX 5090 (2.6 to 4.3 us); charged on free."""
    launch: float = 10e-6
    python_forward: float = 17e-6
    """Time of Chainer's Python code for an operation, without its launch, in forward; the next two
    are for backward and for an update. The median over 17 functions of Chainer 7.8 on arrays of one
    element, without array code, on an AMD EPYC with Python 3.11 (bench/host_cost.py;
    bench/README.md has the table)."""
    python_backward: float = 21e-6
    python_update: float = 9e-6
    compute_efficiency: float = 0.6
    tensor_efficiency: float = 0.66
    """Share of the tensor cores' peak that matrix products reach: cuBLAS reaches 83 of 125 TFLOP/s
    on a V100 (Markidis et al., IPDPSW 2018)."""
    memory_efficiency: float = 0.8
    remote_efficiency: float = 0.9
    remote_scattered: float = 60e6 * 128 / 55e9
    """Ratio of the scattered to the coalesced rate of reads over the bus: about 60 M accesses/s on
    PCIe 5, each of 128 bytes."""


COSTS = Costs()
RANGES: dict[str, tuple[float, float]] = {
    "fault_stream": (137e-6, 300e-6),  # no less than to populate; no more than under pressure
    "fault_random": (200e-6, 300e-6),  # from that of an ordinary kernel on
    "prefetch": (8e-6, 15e-6),  # as published
    "populate_fault": (100e-6, 200e-6),  # a batch of faults on a Titan V; a fault that migrates
    "populate_prefetch": (8e-6, 15e-6),  # as a prefetch that migrates
    "allocation": (2.6e-6, 4.3e-6),  # the four sizes measured
    "launch": (5e-6, 10e-6),  # as published
    "python_forward": (13e-6, 32e-6),  # the quickest and slowest functions of bench/host_cost.py
    "python_backward": (16e-6, 40e-6),
    "python_update": (7e-6, 11e-6),
    "compute_efficiency": (0.8, 0.4),  # planning values, as the efficiencies themselves
    # the best shape on an A100 (docs/reference/virtual-gpu.md); planned
    "tensor_efficiency": (0.86, 0.4),
    "memory_efficiency": (0.9, 0.6),
}
"""The fast and slow ends of costs that are known as a range or are planning values."""


def flop_rate(spec: GpuSpec, costs: Costs, arithmetic: str) -> float:
    """Return the operations a second that the model assumes for a GPU and a kind of arithmetic."""
    on_tensor_cores = spec.tensor_rate(arithmetic)
    if on_tensor_cores is not None:
        return costs.tensor_efficiency * on_tensor_cores
    is_double = arithmetic in (FLOAT64, FLOAT64_PRODUCT)
    peak = (spec.fp64_rate if is_double else None) or spec.fp32_rate
    return costs.compute_efficiency * peak


def extremes(costs: Costs) -> tuple[Costs, Costs]:
    """Return all costs at the fast ends of their ranges, and at the slow ends.

    A cost outside its range becomes an end of it, so ``costs`` is always between the two.
    """
    quick: dict[str, Any] = {}
    slow: dict[str, Any] = {}
    for name, (quick_end, slow_end) in RANGES.items():
        own: float = getattr(costs, name)
        low, high = (min, max) if quick_end < slow_end else (max, min)
        quick[name], slow[name] = low(own, quick_end), high(own, slow_end)
    return replace(costs, **quick), replace(costs, **slow)


def _gpu(
    name: str,
    title: str,
    chip: tuple[int, int, int],
    vram_gib: float,
    memory_gb: float,
    fp32_tera: float,
    fp16_tera: float | None,
    link_gb: float | tuple[float, float] | None,
    source: str,
    link_source: str,
    nvlink_gb: float | None = None,
    *,
    total_gib: float | None = None,
    has_ecc: bool = False,
    fp64_tera: float,
    tf32_tera: float | None = None,
    fp64_product_tera: float | None = None,
) -> GpuSpec:
    """Make a row of the table from figures in datasheet units.

    Args:
        total_gib: the memory that the driver reports, if published.
        has_ecc: whether its memory is GDDR6 with error correction.
    """
    into, out = link_gb if isinstance(link_gb, tuple) else (link_gb, link_gb)
    share = REPORTED_WITH_ECC if has_ecc else REPORTED
    total_bytes = round((total_gib or share * vram_gib) * GIB) // BLOCK_BYTES * BLOCK_BYTES
    return GpuSpec(
        name=name,
        title=title,
        vram_bytes=round(vram_gib * GIB),
        total_bytes=total_bytes,
        usable_bytes=total_bytes - CONTEXT_BYTES * chip[2],
        memory_bandwidth=memory_gb * GB,
        fp32_rate=fp32_tera * 1e12,
        fp16_rate=None if fp16_tera is None else fp16_tera * 1e12,
        host_in_bandwidth=None if into is None else into * GB,
        host_out_bandwidth=None if out is None else out * GB,
        source=source,
        link_source=link_source,
        chip=chip,
        nvlink_bandwidth=None if nvlink_gb is None else nvlink_gb * GB,
        fp64_rate=fp64_tera * 1e12,
        tf32_rate=None if tf32_tera is None else tf32_tera * 1e12,
        fp64_product_rate=None if fp64_product_tera is None else fp64_product_tera * 1e12,
    )


# Chips with few float64 units: a 32nd of float32's rate (compute capability 7.5), or a 64th (8.6 to
# 8.9 and 12.0), by the table of arithmetic instructions in NVIDIA's CUDA C++ Programming Guide.
_ROWS = (
    _gpu("p100-16gb", "Tesla P100 16 GB", (6, 0, 56), 16, 732, 9.3, None, 11.4,
         "NVIDIA Tesla P100 PCIe datasheet",
         "measured pinned copy, P100 on PCIe 3.0 (11.4 GB/s)", fp64_tera=4.7),
    _gpu("v100-16gb", "Tesla V100 16 GB", (7, 0, 80), 16, 900, 15.7, 125, 12,
         "NVIDIA V100 datasheet (SXM2)", PCIE3, nvlink_gb=150, fp64_tera=7.8),
    _gpu("v100-32gb", "Tesla V100 32 GB", (7, 0, 80), 32, 900, 15.7, 125, 12,
         "NVIDIA V100 datasheet (SXM2)", PCIE3, nvlink_gb=150, fp64_tera=7.8),
    _gpu("t4", "T4", (7, 5, 40), 16, 320, 8.1, 65, 12, "NVIDIA T4 datasheet", PCIE3,
         total_gib=14.56, fp64_tera=8.1 / 32),
    _gpu("rtx-2080-ti", "GeForce RTX 2080 Ti", (7, 5, 68), 11, 616, 13.4, 54, 12,
         "NVIDIA Turing architecture whitepaper", PCIE3, nvlink_gb=50, fp64_tera=13.4 / 32),
    _gpu("rtx-3090", "GeForce RTX 3090", (8, 6, 82), 24, 936, 35.6, 71, 25,
         "NVIDIA Ampere GA102 architecture whitepaper", PCIE4, nvlink_gb=56.25,
         total_gib=23.69, fp64_tera=35.6 / 64, tf32_tera=35.6),
    _gpu("rtx-4090", "GeForce RTX 4090", (8, 9, 128), 24, 1008, 82.6, 165, 25,
         "NVIDIA Ada architecture whitepaper", PCIE4,
         total_gib=23.52, fp64_tera=82.6 / 64, tf32_tera=82.6),
    _gpu("rtx-5090", "GeForce RTX 5090", (12, 0, 170), 32, 1792, 105, 210, 55,
         "NVIDIA RTX Blackwell architecture whitepaper", PCIE5,
         total_gib=31.36, fp64_tera=105 / 64, tf32_tera=105),
    _gpu("a10", "A10", (8, 6, 72), 24, 600, 31.2, 125, 25, "NVIDIA A10 datasheet", PCIE4,
         has_ecc=True, fp64_tera=31.2 / 64, tf32_tera=62.5),
    _gpu("a10g", "A10G", (8, 6, 80), 24, 600, 35, 70, 25, "AWS's figures for G5 instances", PCIE4,
         has_ecc=True, fp64_tera=35 / 64, tf32_tera=35),
    _gpu("rtx-a6000", "RTX A6000", (8, 6, 84), 48, 768, 38.7, 154.8, 25,
         "NVIDIA RTX A6000 datasheet", PCIE4, nvlink_gb=56.25,
         fp64_tera=38.7 / 64, tf32_tera=77.4),
    _gpu("l4", "L4", (8, 9, 58), 24, 300, 30.3, 121, 25, "NVIDIA L4 datasheet", PCIE4,
         has_ecc=True, fp64_tera=30.3 / 64, tf32_tera=60),
    _gpu("l40", "L40", (8, 9, 142), 48, 864, 90.5, 181, 25, "NVIDIA L40 datasheet", PCIE4,
         total_gib=44.40, fp64_tera=90.5 / 64, tf32_tera=90.5),
    _gpu("l40s", "L40S", (8, 9, 142), 48, 864, 91.6, 362, 25, "NVIDIA L40S datasheet", PCIE4,
         total_gib=44.42, fp64_tera=91.6 / 64, tf32_tera=183),
    _gpu("a100-40gb", "A100 40 GB", (8, 0, 108), 40, 1555, 19.5, 312, 25,
         "NVIDIA A100 datasheet", PCIE4, nvlink_gb=300, total_gib=39.49,
         fp64_tera=9.7, tf32_tera=156, fp64_product_tera=19.5),
    _gpu("a100-80gb", "A100 80 GB", (8, 0, 108), 80, 2039, 19.5, 312, 25,
         "NVIDIA A100 datasheet", PCIE4, nvlink_gb=300, total_gib=79.25,
         fp64_tera=9.7, tf32_tera=156, fp64_product_tera=19.5),
    _gpu("h100-pcie", "H100 PCIe", (9, 0, 114), 80, 2039, 51, 756, 55,
         "NVIDIA H100 datasheet (2022)", PCIE5, nvlink_gb=300, total_gib=79.11,
         fp64_tera=26, tf32_tera=378, fp64_product_tera=51),
    _gpu("h100-sxm", "H100 SXM", (9, 0, 132), 80, 3352, 67, 989, 55,
         "NVIDIA H100 datasheet", PCIE5, nvlink_gb=450, total_gib=79.11,
         fp64_tera=34, tf32_tera=494, fp64_product_tera=67),
    _gpu("h200", "H200 SXM", (9, 0, 132), 141, 4800, 67, 989, 55,
         "NVIDIA H200 datasheet", PCIE5, nvlink_gb=450,
         fp64_tera=34, tf32_tera=494, fp64_product_tera=67),
    _gpu("gh200-96gb", "GH200 96 GB", (9, 0, 132), 96, 4000, 67, 989, (375, 297),
         "NVIDIA GH200 datasheet", "measured copies over NVLink-C2C (375 in, 297 out)",
         nvlink_gb=450, fp64_tera=34, tf32_tera=494, fp64_product_tera=67),
    _gpu("gh200-144gb", "GH200 144 GB", (9, 0, 132), 144, 4900, 67, 989, (375, 297),
         "NVIDIA GH200 datasheet", "measured copies over NVLink-C2C (375 in, 297 out)",
         nvlink_gb=450, fp64_tera=34, tf32_tera=494, fp64_product_tera=67),
    _gpu("b200", "B200", (10, 0, 148), 180, 8000, 75, 2250, 55,
         "NVIDIA HGX B200 datasheet", PCIE5, nvlink_gb=900,
         fp64_tera=37, tf32_tera=1125, fp64_product_tera=37),
    _gpu("jetson-orin-64gb", "Jetson AGX Orin 64 GB", (8, 7, 16), 64, 205, 5.3, None, None,
         "NVIDIA Jetson AGX Orin series datasheet", "none: GPU and CPU share the memory",
         total_gib=60.8,  # a guess: 95%, as the system has its own
         fp64_tera=5.3 / 64),
)  # fmt: skip

GPUS: dict[str, GpuSpec] = {spec.name: spec for spec in _ROWS}
DRIVER_NAMES = {
    "v100s-pcie-32gb": "v100-32gb",
    "a100 80gb pcie": "a100-80gb",
    "h100 80gb hbm3": "h100-sxm",
    "gh200 480gb": "gh200-96gb",
    "gh200 144g hbm3e": "gh200-144gb",
}
"""The driver's names, without "NVIDIA", that match neither a title of the table nor one of its
names once the board's connector (`_CONNECTOR`) is removed.

As for the link to the host, a row stands for every board with its chip. Clocks, VRAM and memory
bandwidth may differ, as for V100 and A100 on PCIe. The 480 GB of a GH200 are host memory."""

_CONNECTOR = re.compile("-(pcie|sxm[0-9])")


def spec_of_driver(name: str) -> GpuSpec | None:
    """Return the table's GPU with the same chip, and so the same link, as the driver's ``name``.

    None if the table has none.
    """
    words = name.replace("NVIDIA ", "").replace("Tesla ", "").casefold()
    known = DRIVER_NAMES.get(words, _CONNECTOR.sub("", words))
    if known in GPUS:
        return GPUS[known]
    return next((gpu for gpu in GPUS.values() if _bare(gpu.title) == words), None)


def _bare(title: str) -> str:
    return title.replace("Tesla ", "").casefold()


def gpu_spec(name: str | GpuSpec) -> GpuSpec:
    """Return a GPU by name; case, spaces and underscores do not matter.

    Raises:
        UnknownGpuError: no such GPU; the message offers the nearest names.
    """
    if isinstance(name, GpuSpec):
        return name
    if not isinstance(name, str):
        raise UnknownGpuError(f"a GPU is named by text such as 'v100-16gb'; got {name!r}")
    key = "-".join(name.lower().replace("_", " ").replace("-", " ").split())
    if key in GPUS:
        return GPUS[key]
    if key.startswith("virtual:"):  # what devices are called
        bare = key.removeprefix("virtual:").strip("- ")
        raise UnknownGpuError(
            f"no GPU named {name!r}; here a GPU has its name alone"
            + (f": {bare}" if bare in GPUS else f", such as {next(iter(GPUS))}")
        )
    begins = [known for known in GPUS if key and known.startswith(key)]
    if len(begins) == 1:
        return GPUS[begins[0]]
    near = begins or difflib.get_close_matches(key, GPUS, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(GPUS)}"
    raise UnknownGpuError(f"no GPU named {name!r}; {hint}")
