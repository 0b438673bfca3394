"""Chainer's CUDA kernels that today's headers refuse: generated and compiled without a GPU.

The functions of Chainer run with a stand-in for ``chainer.backends.cuda`` that keeps the kernels
they ask for. CuPy generates the CUDA source, and NVRTC, which needs no device, compiles it. Where
the CUDA libraries are not installed only the text of the kernels is looked at.
"""

from __future__ import annotations

import re
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.compat.test_shims import load

HALF = {"T": "float16", "S": "int64"}
POINTERS = {"T": "uint64", "X": "int8", "Y": "int32"}
MATRICES = {"binary_hierarchical_softmax_bwd": ("x", "w", "gx", "gw")}  # all others are flat


class Recorder:
    """Stands in for ``chainer.backends.cuda``: NumPy arrays, and kernels that are only kept."""

    cupy = np

    def __init__(self) -> None:
        self.kernels: dict[str, dict[str, Any]] = {}

    def elementwise(self, inputs: str, outputs: str, code: str, name: str, **options: str) -> Any:
        self.kernels[name] = {"inputs": inputs, "outputs": outputs, "code": code, **options}
        return lambda *args, **kwargs: args[0]


def resize(module: ModuleType) -> None:
    a = np.zeros((1, 1, 2, 2), "float16")
    module.interpolate_grad_bilinear_gpu(a, a, a, a, a, 2, 2)


def hierarchical(module: ModuleType) -> None:
    a = np.zeros((1, 1), "float16")
    state = SimpleNamespace(wxy=a, paths=a, codes=a, begins=a, max_length=1)
    module.BinaryHierarchicalSoftmaxFunction.backward_gpu(state, (a, a, a), (a,))


def sampling(module: ModuleType) -> None:
    a = np.zeros((1, 1), "float16")
    state = SimpleNamespace(
        retain_inputs=lambda indexes: None,
        reduce="sum",
        samples=a,
        sample_size=1,
        wx=a,
        ignore_mask=a,
    )
    module.NegativeSamplingFunctionGrad.forward_gpu(state, (a, a, a))


def gather(module: ModuleType) -> None:
    module._memcpy_gather()
    module._memcpy_scatter()


CASES = {
    "resize-float16": ("chainer.functions.array.resize_images", resize, HALF),
    "hierarchical-float16": ("chainer.links.loss.hierarchical_softmax", hierarchical, HALF),
    "sampling-float16": ("chainer.functions.loss.negative_sampling", sampling, HALF),
    "gather-scatter": ("chainer.training.updaters.multiprocess_parallel_updater", gather, POINTERS),
}


def kernels(name: str, without: str | None = None) -> dict[str, dict[str, Any]]:
    path, run, _ = CASES[name]
    module = load(path, without)
    module.cuda = recorder = Recorder()  # type: ignore[attr-defined]
    run(module)
    return recorder.kernels


def cuda_source(name: str, kernel: dict[str, Any], types: dict[str, str]) -> str:
    """Return the source that CuPy would compile for contiguous arguments."""
    import cupy
    from cupy._core import _carray, _kernel

    inputs = _kernel._get_param_info(kernel["inputs"], True)
    params = inputs + _kernel._get_param_info(kernel["outputs"], False)
    ndarray, indexer = 1, 2

    def info(p: Any) -> Any:
        dtype = p.dtype or np.dtype(types[p.ctype])
        dimensions = 2 if p.name in MATRICES.get(name, ()) else 1
        return _kernel._ArgInfo(ndarray, cupy.ndarray, dtype, dimensions, True, True)

    infos = [info(p) for p in params]
    infos.append(_kernel._ArgInfo(indexer, _carray.Indexer, None, 1, True, True))
    used = [(key, np.dtype(types[key])) for key in sorted({p.ctype for p in params} & set(types))]
    source = _kernel._get_elementwise_kernel_code(
        tuple(infos),
        _kernel._TypeMap(tuple(used)),
        params + _kernel._get_param_info("CIndexer _ind", False),
        kernel["code"],
        name,
        kernel.get("preamble", ""),
        kernel.get("loop_prep", ""),
    )
    headers = ("complex.cuh", "carray.cuh", "atomics.cuh", "math_constants.h")
    return "".join(f"#include <cupy/{header}>\n" for header in headers) + source


def compile_log(source: str) -> str:
    """Compile for an A100 and return NVRTC's messages, "" where there is nothing to say."""
    from cupy._core import core
    from cupy_backends.cuda.libs import nvrtc

    options = core.assemble_cupy_compiler_options(("--std=c++17", "-arch=compute_80", "-w"))
    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        return str(nvrtc.getProgramLog(program)) or "failed"
    return ""


@pytest.fixture(scope="module")
def nvrtc() -> None:
    pytest.importorskip("cupy", exc_type=(ImportError, UserWarning))
    try:
        assert compile_log('extern "C" __global__ void nothing() {}') == ""
    except Exception as error:
        pytest.skip(f"NVRTC and the CUDA headers are not installed: {error}")


@pytest.mark.filterwarnings("ignore:.*nccl library could not be loaded:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_with_the_mend_and_not_without(name, nvrtc):
    types = CASES[name][2]
    broken = {k: compile_log(cuda_source(k, v, types)) for k, v in kernels(name, name).items()}
    assert any(re.search("atomicAdd|float16", log) for log in broken.values()), broken
    mended = {k: compile_log(cuda_source(k, v, types)) for k, v in kernels(name).items()}
    assert mended == dict.fromkeys(broken, "")


@pytest.mark.parametrize("name", [name for name in CASES if name != "gather-scatter"])
def test_resize_float16_and_hierarchical_float16_and_sampling_float16_cast_what_they_add(name):
    def uncast(without: str | None = None) -> list[str]:
        code = " ".join(kernel["code"] for kernel in kernels(name, without).values())
        return re.findall(r"atomicAdd\([^;]*\], (?!\(T\))[^;]*;", code)

    assert uncast(without=name)
    assert not uncast()


def test_gather_scatter_include_the_type_that_they_name():
    assert not any("preamble" in k for k in kernels("gather-scatter", "gather-scatter").values())
    mended = kernels("gather-scatter")
    assert set(mended) == {"_memcpy_gather", "_memcpy_scatter"}
    assert all("cupy/float16.cuh" in kernel["preamble"] for kernel in mended.values())
