"""Optimizers with 8-bit states on CuPy, held against NumPy: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.compat.test_shims import chainer
from umem.chainer.optimizers import Adam8bit, AdamW8bit, MomentumSGD8bit
from umem.errors import GradientError

pytestmark = pytest.mark.gpu
MAKERS = {
    "Adam8bit": Adam8bit,
    "AdamW8bit": lambda: AdamW8bit(alpha=0.01, weight_decay_rate=0.01, eta=0.5),
    "MomentumSGD8bit": lambda: MomentumSGD8bit(lr=0.1),
}


def parameter(make: Callable[[], Any], dtype: str, device: str) -> Any:
    model = chainer.Chain()
    with model.init_scope():
        value = np.random.default_rng(0).standard_normal((101, 97)).astype(dtype)
        model.W = chainer.Parameter(value)
    model.to_device(device)
    return make().setup(model)


def update(optimizer: Any, seed: int) -> None:
    """With gradients of many sizes, none so small that a GPU would flush what comes of it."""
    generator = np.random.default_rng(seed)
    W = optimizer.target.W
    grad = generator.standard_normal(W.shape) * 10.0 ** generator.integers(-4, 2, W.shape)
    grad[generator.random(grad.shape) < 0.2] = 0
    W.grad = W.device.send(grad.astype(W.dtype))
    optimizer.update()


def contents(optimizer: Any) -> dict[str, bytes]:
    W = optimizer.target.W
    arrays = {"W": W.array, **W.update_rule.state}
    return {name: chainer.backends.cuda.to_cpu(value).tobytes() for name, value in arrays.items()}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", MAKERS)
def test_cupy_gives_the_bits_of_numpy(name: str, dtype: str) -> None:
    host, device = (parameter(MAKERS[name], dtype, where) for where in ("@numpy", "@cupy:0"))
    for seed in range(5):
        update(host, seed)
        update(device, seed)
    assert contents(host) == contents(device)


def test_a_gradient_with_nan_changes_nothing() -> None:
    optimizer = parameter(Adam8bit, "float32", "@cupy:0")
    update(optimizer, 0)
    before = contents(optimizer)
    optimizer.target.W.grad[3, 4] = np.nan
    with pytest.raises(GradientError, match=r"/W .*\(3, 4\)"):
        optimizer.update()
    assert contents(optimizer) == before


def test_paged_states_leave_cupys_pool_alone() -> None:
    optimizer = parameter(lambda: Adam8bit(paged=True), "float32", "@cupy:0")
    cupy = chainer.backends.cuda.cupy
    pool = cupy.get_default_memory_pool()
    update(optimizer, 0)
    cupy.empty(1 << 20, "u1")
    cached = pool.free_bytes(), pool.total_bytes()
    update(optimizer, 1)
    assert (pool.free_bytes(), pool.total_bytes()) == cached and cached[0] >= 1 << 20


def test_paged_states_give_the_same_bits() -> None:
    plain, paged = (
        parameter(make, "float32", "@cupy:0") for make in (Adam8bit, lambda: Adam8bit(paged=True))
    )
    for seed in range(3):
        update(plain, seed)
        update(paged, seed)
    assert contents(plain) == contents(paged)
