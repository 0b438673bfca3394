"""The rate of each kind of arithmetic, worked out by hand from the datasheets' figures."""

from __future__ import annotations

import numpy as np
import pytest

import umem
from umem._common.arithmetic import ARITHMETIC, of_dtype, of_product
from umem._common.specs import COSTS, GPUS, extremes, flop_rate, gpu_spec
from umem.devices.virtual.clock import Clock

TERA = 1e12


def seconds(name: str, arithmetic: str, flops: int) -> float:
    """Return the time of an operation that moves nothing."""
    clock = Clock(gpu_spec(name), COSTS)
    clock.compute(flops, 0, 0, arithmetic)
    return clock.device_seconds


@pytest.mark.parametrize(
    ("name", "arithmetic", "tera"),
    [
        ("v100-16gb", "float32", 0.6 * 15.7),
        ("v100-16gb", "float16 product", 83),  # as published: 0.664 of 125
        ("v100-16gb", "bfloat16 product", 0.6 * 15.7),  # from Ampere on
        ("v100-16gb", "tf32 product", 0.6 * 15.7),
        ("v100-16gb", "float64", 0.6 * 7.8),
        ("v100-16gb", "float64 product", 0.6 * 7.8),
        ("p100-16gb", "float16 product", 0.6 * 9.3),  # it has no tensor cores
        ("p100-16gb", "float64 product", 0.6 * 4.7),
        ("t4", "float16 product", 0.66 * 65),
        ("t4", "float64", 0.6 * 8.1 / 32),
        ("rtx-3090", "tf32 product", 0.66 * 35.6),
        ("rtx-4090", "float64", 0.6 * 82.6 / 64),
        ("a100-80gb", "float16 product", 0.66 * 312),
        ("a100-80gb", "bfloat16 product", 0.66 * 312),
        ("a100-80gb", "tf32 product", 0.66 * 156),
        ("a100-80gb", "float64", 0.6 * 9.7),
        ("a100-80gb", "float64 product", 0.66 * 19.5),
        ("h100-sxm", "float16 product", 0.66 * 989),
        ("h100-sxm", "float64 product", 0.66 * 67),
        ("l4", "tf32 product", 0.66 * 60),
    ],
)
def test_an_operation_takes_its_flops_over_the_rate_of_its_arithmetic(
    name: str, arithmetic: str, tera: float
) -> None:
    found = seconds(name, arithmetic, 10**12)
    assert found == pytest.approx(1e12 / (tera * TERA), rel=0.01)


@pytest.mark.parametrize("name", sorted(GPUS))
def test_rates_of_a_gpu_are_in_the_order_of_their_types(name: str) -> None:
    spec = gpu_spec(name)
    rate = {kind: flop_rate(spec, COSTS, kind) for kind in ARITHMETIC}
    assert rate["float64"] <= rate["float64 product"]
    assert rate["float64"] < rate["float32"] <= rate["tf32 product"] <= rate["float16 product"]
    assert rate["float32"] <= rate["bfloat16 product"] <= rate["float16 product"]
    has_tensor_cores = spec.fp16_rate is not None
    assert (rate["float16 product"] > 1.5 * rate["float32"]) == has_tensor_cores
    assert spec.chip is not None
    assert (spec.tf32_rate is not None) == (spec.chip >= (8, 0) and has_tensor_cores)


def test_the_share_of_tensor_cores_has_a_range() -> None:
    spec = gpu_spec("a100-80gb")
    quick, slow = (flop_rate(spec, costs, "float16 product") for costs in extremes(COSTS))
    assert quick == pytest.approx(0.86 * 312e12) and slow == pytest.approx(0.4 * 312e12)


def test_a_dtype_says_its_arithmetic() -> None:
    kinds = {name: of_product(np.dtype(name)) for name in ("f2", "f4", "f8", "c8", "c16", "i4")}
    assert kinds == {
        "f2": "float16 product", "f4": "float32", "f8": "float64 product", "c8": "float32",
        "c16": "float64 product", "i4": "float32",
    }  # fmt: skip
    assert [of_dtype(np.dtype(name)) for name in ("f2", "f4", "f8", "c16")] == [
        "float32", "float32", "float64", "float64",
    ]  # fmt: skip


def step_seconds(gpu: str, dtype: str, product: bool) -> float:
    """Return the GPU's time of one operation on the virtual GPU."""
    with umem.virtual_gpu(gpu) as device, umem.managed() as memory:
        x = memory.xp.asarray(np.ones((512, 512), dtype))
        y = x @ x if product else x + x
        before = device.figures.compute_seconds
        _ = x @ x if product else x + x
        found: float = device.figures.compute_seconds - before
        del x, y
    return found


@pytest.mark.thorough
def test_the_virtual_gpu_s_products_go_by_their_dtype() -> None:
    work = 2 * 512**3
    assert step_seconds("t4", "f4", True) == pytest.approx(work / (0.6 * 8.1 * TERA))
    assert step_seconds("t4", "f8", True) == pytest.approx(work / (0.6 * 8.1 / 32 * TERA))
    assert step_seconds("t4", "f2", True) == pytest.approx(work / (0.66 * 65 * TERA))
    assert step_seconds("p100-16gb", "f2", True) == step_seconds("p100-16gb", "f4", True)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_additions_stay_bound_by_their_bytes(dtype: str) -> None:
    moved = 3 * 512 * 512 * np.dtype(dtype).itemsize
    assert step_seconds("t4", dtype, False) == pytest.approx(moved / (0.8 * 320e9))
