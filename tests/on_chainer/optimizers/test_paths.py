"""NumPy, Numba and CuPy update states of 8 bits to the same bits."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from software_programs import needs_compiler, needs_cupy, run

import umem.chainer  # noqa: F401  isort: skip  (before chainer)
import chainer

from umem.chainer.optimizers import Adam8bit, AdamW8bit, MomentumSGD8bit, paths
from umem.chainer.optimizers.dynamic_map import dynamic_map
from umem.chainer.optimizers.paths.on_cuda import SOURCE, TYPES, compiler_options
from umem.chainer.optimizers.quantized_state import QuantizedState, zeros
from umem.chainer.optimizers.steps import SIGNS, AdamStep, MomentumStep, Step

needs_numba = pytest.mark.skipif(find_spec("numba") is None, reason="no Numba (extra fast)")
STEPS = [
    AdamStep(0.1, 0.001, 0.001, 1e-8, -1.0, 1.0),
    AdamStep(0.1, 0.001, 0.02, 1e-8, -0.5, 0.99),
    MomentumStep(0.9, 0.01),
]
Array = np.ndarray[Any, Any]


def gradients(size: int, count: int) -> list[Array]:
    """Of all sizes that a float32 has normally, with zeros and whole blocks of zeros."""
    generator = np.random.default_rng(size)
    found = []
    for _ in range(count):
        grad = generator.standard_normal(size) * 10.0 ** generator.integers(-12, 4, size)
        grad[generator.random(size) < 0.2] = 0
        grad[256 : min(size, 512)] = 0
        found.append(grad.astype(np.float32))
    return found


def updated(step: Step, x: Array, count: int) -> list[Array]:
    """The parameter, and its codes and scales, after some updates."""
    x = x.copy()
    states = [
        QuantizedState(*zeros(np, x.shape, signed), dynamic_map(signed))
        for signed in SIGNS[type(step)].values()
    ]
    for grad in gradients(x.size, count):
        paths.update(step, x, grad.astype(x.dtype), states)
    return [x, *(part for state in states for part in (state.codes, state.scales))]


@pytest.mark.thorough
@needs_numba
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("size", [1, 255, 256, 257, 140_001])
@pytest.mark.parametrize("step", STEPS, ids=["adam", "decay", "momentum"])
def test_numba_gives_the_bits_of_numpy(
    monkeypatch: pytest.MonkeyPatch, step: Step, size: int, dtype: str
) -> None:
    x = np.random.default_rng(0).standard_normal(size).astype(dtype)
    with np.errstate(over="ignore"):
        compiled = updated(step, x, 5)
        monkeypatch.setattr(paths, "compiled", lambda name: None)
        plain = updated(step, x, 5)
    for one, other in zip(compiled, plain, strict=True):
        assert one.tobytes() == other.tobytes()


@needs_numba
@pytest.mark.parametrize("kind", [Adam8bit, AdamW8bit, MomentumSGD8bit])
def test_hyperparameters_of_64_bits_give_the_same_bits_too(
    monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    def parameter() -> bytes:
        model = chainer.Chain()
        with model.init_scope():
            model.w = chainer.Parameter(np.full(4096, 1e-3, np.float32))
        optimizer = kind().setup(model)
        hyperparameters = optimizer.hyperparam.get_dict()
        for name in hyperparameters.keys() - {"amsgrad", "adabound"}:
            setattr(optimizer.hyperparam, name, np.float64(0.997 * hyperparameters[name]))
        for grad in gradients(4096, 5):
            model.w.grad = grad
            optimizer.update()
        return bytes(model.w.array.tobytes())

    compiled = parameter()
    monkeypatch.setattr(paths, "compiled", lambda name: None)
    assert parameter() == compiled


def test_without_numba_numpy_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "numba", None)
    assert paths.compiled.__wrapped__("AdamStep") is None


PROGRAM = """
import umem.chainer
import chainer
import chainer.links as L
from umem.chainer.optimizers import Adam8bit, AdamW8bit, MomentumSGD8bit
from umem.errors import GradientError

def model_of(dtype):
    model = chainer.Chain()
    generator = np.random.default_rng(0)
    with model.init_scope():
        model.large = chainer.Parameter(generator.standard_normal((101, 97)).astype(dtype))
        model.small = chainer.Parameter(generator.standard_normal(9).astype(dtype))
    return model

def set_gradients(model, seed):
    generator = np.random.default_rng(seed)
    for param in (model.large, model.small):
        sizes = 10.0 ** generator.integers(-4, 2, param.shape)
        grad = sizes * generator.standard_normal(param.shape)
        grad[generator.random(grad.shape) < 0.2] = 0
        param.grad = param.device.xp.asarray(grad.astype(param.dtype))

def contents(model):
    found = {}
    for name, param in model.namedparams():
        found[name] = cp.asnumpy(param.array)
        state = param.update_rule.state or {}
        found |= {name + key: cp.asnumpy(value) for key, value in state.items()}
    return found

def same(one, other):
    assert one.keys() == other.keys()
    return all(one[k].tobytes() == other[k].tobytes() for k in one if "large" in k)
"""


@needs_cupy
@needs_compiler
def test_cupy_gives_the_bits_of_numpy(kernel_cache: Path) -> None:
    program = f"""{PROGRAM}
makers = [
    Adam8bit,
    lambda: AdamW8bit(alpha=0.01, weight_decay_rate=0.01, eta=0.5),
    lambda: MomentumSGD8bit(lr=0.1),
]
for dtype in ("f2", "f4", "f8"):
    for make in makers:
        host, device = model_of(dtype), model_of(dtype)
        device.to_device("@cupy:0")
        for model in (host, device):
            optimizer = make().setup(model)
            for seed in range(5):
                set_gradients(model, seed)
                optimizer.update()
        codes = [v for k, v in device.large.update_rule.state.items() if k.endswith("codes")]
        assert all(type(value) is cp.ndarray for value in codes)
        print(same(contents(host), contents(device)), end=" ")
"""
    assert run(program, kernel_cache).split() == ["True"] * 9


@needs_cupy
@needs_compiler
def test_states_move_between_devices_and_files(kernel_cache: Path, tmp_path: Path) -> None:
    program = f"""{PROGRAM}
from chainer import serializers
from umem.chainer.optimizers import dequantize_states, quantize_states

one, two = model_of("f4"), model_of("f4")
first, second = Adam8bit().setup(one), Adam8bit().setup(two)

def step(seed):
    for optimizer in (first, second):
        set_gradients(optimizer.target, seed)
        optimizer.update()

step(0)
two.to_device("@cupy:0")
step(1)
print(type(two.large.update_rule.state["m_codes"]).__name__, same(contents(one), contents(two)))
two.to_cpu()
step(2)
print(type(two.large.update_rule.state["m_codes"]).__name__, same(contents(one), contents(two)))
two.to_device("@cupy:0")
step(3)
serializers.save_npz({str(tmp_path / "o.npz")!r}, second)
third = Adam8bit().setup(two)
serializers.load_npz({str(tmp_path / "o.npz")!r}, third)
second = third
step(4)
print(same(contents(one), contents(two)))
print(dequantize_states(first) == dequantize_states(second) > 0)
print(type(two.large.update_rule.state["m"]).__name__, same(contents(one), contents(two)))
print(quantize_states(first) == quantize_states(second) > 0)
print(type(two.large.update_rule.state["m_codes"]).__name__, same(contents(one), contents(two)))
two.large.array = cp.asfortranarray(two.large.array)
step(5)
print(same(contents(one), contents(two)))
"""
    printed = run(program, kernel_cache).splitlines()
    assert printed == [
        "ndarray True", "ndarray True", "True", "True", "ndarray True", "True", "ndarray True",
        "True",
    ]  # fmt: skip


@needs_cupy
@needs_compiler
def test_cupys_gradients_are_looked_at(kernel_cache: Path) -> None:
    program = f"""{PROGRAM}
for dtype in ("f2", "f4"):
    for value in (float("nan"), float("inf"), 6e4 if dtype == "f2" else 1e30):
        model = model_of(dtype)
        model.to_device("@cupy:0")
        optimizer = Adam8bit().setup(model)
        model.small.update_rule.enabled = False
        set_gradients(model, 0)
        optimizer.update()
        before = contents(model)
        set_gradients(model, 1)
        model.large.grad[5, 6] = value
        try:
            optimizer.update()
        except GradientError as error:
            print("(5, 6)" in str(error), same(before, contents(model)), optimizer.t)
        else:
            print(dtype, value, optimizer.t)
"""
    refused = ["True True 1"] * 2
    assert run(program, kernel_cache).splitlines() == [
        *refused,
        "f2 60000.0 2",
        *refused,
        "True True 1",
    ]


@needs_cupy
@needs_compiler
def test_paged_states_are_managed_and_prefetched(kernel_cache: Path) -> None:
    program = f"""{PROGRAM}
from chainer import serializers
found = []
for paged in (False, True):
    model = model_of("f4")
    model.to_device("@cupy:0")
    optimizer = Adam8bit(paged=paged).setup(model)
    for seed in range(3):
        set_gradients(model, seed)
        optimizer.update()
    state = model.large.update_rule.state
    last = [umem.location(value).last_prefetch for value in state.values()]
    managed = [umem.prefetch(value) > 0 for value in state.values()]
    print(all(managed), any(managed), umem.prefetch(model.large.array) > 0, *last)
    found.append(contents(model))
print(same(*found))
"""
    assert run(program, kernel_cache).splitlines() == [
        "False False False None None None None",
        "True True False 0 0 0 0",
        "True",
    ]


def test_paged_does_nothing_on_numpy() -> None:
    from tests.on_chainer.optimizers.test_eight_bit import assert_same, state_of, train, words

    one, two = words(), words()
    train(one, Adam8bit().setup(one), 2)
    train(two, Adam8bit(paged=True).setup(two), 2)
    assert_same(state_of(one), state_of(two))


ARCHITECTURES = (60, 70, 75, 80, 86, 89, 90)


@pytest.fixture(scope="module")
def nvrtc() -> Any:
    pytest.importorskip("cupy", exc_type=(ImportError, UserWarning))
    from cupy_backends.cuda.libs import nvrtc

    try:
        compile_for(nvrtc, "float16", max(nvrtc.getSupportedArchs()))
    except (RuntimeError, OSError, ImportError) as error:
        if "compile" in str(error).lower():
            raise
        pytest.skip(f"NVRTC is not installed: {error}")
    return nvrtc


def compile_for(nvrtc: Any, dtype: str, architecture: int) -> bytes:
    """Compile as CuPy does, which adds an option of its own at the end."""
    from cupy._core import core

    options = core.assemble_cupy_compiler_options(compiler_options(dtype))
    program = nvrtc.createProgram(SOURCE, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*options, f"-arch=sm_{architecture}", "-ftz=true"))
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"does not compile: {nvrtc.getProgramLog(program)}") from error
    return bytes(nvrtc.getCUBIN(program))


@pytest.mark.filterwarnings("ignore:.*nccl library could not be loaded:UserWarning")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", TYPES)
def test_nvidias_compiler_takes_the_kernels(nvrtc: Any, dtype: str, architecture: int) -> None:
    if architecture not in nvrtc.getSupportedArchs():
        pytest.skip(f"NVRTC {nvrtc.getVersion()} knows no sm_{architecture}")
    binary = compile_for(nvrtc, dtype, architecture)
    assert binary[:4] == b"\x7fELF" and b"adam_8bit" in binary and b"momentum_8bit" in binary
