"""Mends for CuPy without a device, without cuDNN, and with current CUDA headers."""

from umem.compat.shim import Replacement, Shim

_UPGRADE = "https://docs.cupy.dev/en/latest/upgrade.html"
_FLOAT16_HEADER = ", preamble='#include <cupy/float16.cuh>',\n"
_OF_CUPYX, _ADD_AT = "cuda.cupyx.scatter_add", "cuda.cupy.add.at"
_SCATTER_ADD = (
    (
        "get-item", "functions.array.get_item", "get_item backward",
        "gx.scatter_add(slices, inputs[0])", "xp.add.at(gx, slices, inputs[0])",
    ),
    (
        "transformer", "functions.array.spatial_transformer_sampler",
        "transformer backward", _OF_CUPYX, _ADD_AT,
    ),
    (
        "function", "functions.array.scatter_add", "scatter_add",
        f"{_OF_CUPYX}(", f"{_ADD_AT}(",
    ),
    (
        "as-strided", "functions.array.as_strided", "as_strided backward",
        f"{_OF_CUPYX}(", f"{_ADD_AT}(",
    ),
    ("sparse", "utils.sparse", "sparse_matmul", _OF_CUPYX, _ADD_AT),
)  # fmt: skip

SHIMS = (
    Shim(
        name="cuda-available",
        module="chainer.backends.cuda",
        symptom="cuda.available is True without a GPU; to_gpu then fails",
        link="https://docs.cupy.dev/en/stable/install.html",
        replacements=(
            Replacement(
                "    import cupy\n    from cupy import cuda  # NOQA\n",
                "    import cupy; from umem.compat import support as _umem\n"
                "    from cupy import cuda  # NOQA\n",
            ),
            Replacement(
                "    available = True\nexcept Exception as e:\n",
                "    available = _umem.require_device(cupy)\nexcept Exception as e:\n",
            ),
        ),
    ),
    Shim(
        name="cudnn-warning",
        module="chainer.backends.cuda",
        versions="cupy>=14.0",
        symptom="advice to reinstall CuPy for cuDNN, which cannot help",
        link=_UPGRADE,
        replacements=(
            Replacement(
                "    if (not cudnn_enabled and\n            not _cudnn_disabled_by_user and\n",
                "    if (_cupy_major < 14 and not cudnn_enabled and\n"
                "            not _cudnn_disabled_by_user and\n",
            ),
        ),
    ),
    Shim(
        name="nccl-warning",
        module="chainer.training.updaters.multiprocess_parallel_updater",
        symptom="importing Chainer warns of NCCL, which one updater needs",
        link="https://docs.cupy.dev/en/stable/install.html",
        replacements=(
            Replacement(
                "    from cupy.cuda import nccl\n",
                "    from umem.compat import support as _umem; nccl = _umem.quiet_nccl()\n",
            ),
        ),
    ),
    Shim(
        name="gather-scatter",
        module="chainer.training.updaters.multiprocess_parallel_updater",
        symptom="parallel updater on GPUs: 'float16' is undefined",
        link=_UPGRADE,
        replacements=(
            Replacement(
                "        '_memcpy_gather',\n", "        '_memcpy_gather'" + _FLOAT16_HEADER
            ),
            Replacement(
                "        '_memcpy_scatter',\n", "        '_memcpy_scatter'" + _FLOAT16_HEADER
            ),
        ),
    ),
    Shim(
        name="resize-float16",
        module="chainer.functions.array.resize_images",
        symptom="resize_images backward does not compile in float16",
        link=_UPGRADE,
        replacements=tuple(
            Replacement(f"u{u}], w{k} * gy);", f"u{u}], (T)(w{k} * gy));")
            for k, u in enumerate((0, 1, 0, 1))
        ),
    ),
    Shim(
        name="hierarchical-float16",
        module="chainer.links.loss.hierarchical_softmax",
        symptom="hierarchical softmax backward does not compile in float16",
        link=_UPGRADE,
        replacements=(
            Replacement(
                "atomicAdd(&gx[x_ind], g * w[w_ind]);", "atomicAdd(&gx[x_ind], (T)(g * w[w_ind]));"
            ),
            Replacement(
                "atomicAdd(&gw[w_ind], g * x[x_ind]);", "atomicAdd(&gw[w_ind], (T)(g * x[x_ind]));"
            ),
        ),
    ),
    Shim(
        name="sampling-float16",
        module="chainer.functions.loss.negative_sampling",
        symptom="negative_sampling backward does not compile in float16",
        link=_UPGRADE,
        replacements=(
            Replacement(
                "atomicAdd(&gW[k * c + j], gi * x[(i / m) * c + j]);",
                "atomicAdd(&gW[k * c + j], (T)(gi * x[(i / m) * c + j]));",
            ),
        ),
    ),
    Shim(
        name="nvtx-enabled",
        module="chainer.function_hooks.cuda_profile",
        versions="cupy>=14.0",
        symptom="CUDAProfileHook: DeprecationWarning of nvtx_enabled",
        link=_UPGRADE,
        replacements=(Replacement("cuda.cupy.cuda.nvtx_enabled", "cuda.cupy.cuda.nvtx.available"),),
    ),
    *(
        Shim(
            name=f"scatter-add-{name}",
            module=f"chainer.{module}",
            versions="cupy>=14.0",
            symptom=f"{what} on a GPU: DeprecationWarning of scatter_add",
            link=_UPGRADE,
            replacements=(Replacement(old, new),),
        )
        for name, module, what, old, new in _SCATTER_ADD
    ),
)
