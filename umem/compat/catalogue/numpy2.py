"""Mends for names and signatures that NumPy removed, changed or will remove."""

from umem.compat.shim import Replacement, Shim

_NUMPY_2 = "https://numpy.org/doc/stable/numpy_2_0_migration_guide.html"
_NUMPY_1_24 = "https://numpy.org/doc/stable/release/1.24.0-notes.html"
_NUMPY_2_0_NOTES = "https://numpy.org/doc/stable/release/2.0.0-notes.html"
_NUMPY_2_4_NOTES = "https://numpy.org/doc/stable/release/2.4.0-notes.html"
_NUMPY_2_5_NOTES = "https://numpy.org/doc/stable/release/2.5.0-notes.html"

SHIMS = (
    Shim(
        name="np-float",
        module="chainer.functions.array.resize_images",
        versions="numpy>=1.24",
        symptom="resize_images: np.float is gone",
        link=_NUMPY_1_24,
        replacements=(Replacement("dtype=numpy.float)", "dtype=numpy.float64)", count=6),),
    ),
    Shim(
        name="meshgrid-tuple",
        module="chainer.distributions.categorical",
        versions="numpy>=2.0",
        symptom="Categorical.log_prob: TypeError",
        link=_NUMPY_2_0_NOTES,
        replacements=(
            Replacement(
                "self.log_p[mg + [x.data.astype(numpy.int32)]]",
                "self.log_p[tuple(mg) + (x.data.astype(numpy.int32),)]",
            ),
            Replacement(
                "self.log_p[mg + [x.astype(numpy.int32)]]",
                "self.log_p[tuple(mg) + (x.astype(numpy.int32),)]",
            ),
        ),
    ),
    Shim(
        name="ndarray-device",
        module="chainer.variable",
        versions="numpy>=2.0",
        symptom="PrintHook shows 'cpu' for 'CPU'",
        link=_NUMPY_2_0_NOTES,
        replacements=(
            Replacement(
                "device = getattr(array, 'device', 'CPU')",
                "device = ('CPU' if isinstance(array, numpy.ndarray)"
                " else getattr(array, 'device', 'CPU'))",
            ),
        ),
    ),
    Shim(
        name="maximum-out",
        module="chainer.dataset.convert",
        symptom="warns from NumPy 2.4: out= by position",
        link=_NUMPY_2_4_NOTES,
        replacements=(
            Replacement(
                "numpy.maximum(shape, array.shape, shape)",
                "numpy.maximum(shape, array.shape, out=shape)",
            ),
        ),
    ),
    Shim(
        name="fix-is-trunc",
        module="chainer.functions.math.fix",
        symptom="warns from NumPy 2.5: np.fix",
        link=_NUMPY_2_5_NOTES,
        replacements=(Replacement("xp.fix(x)", "xp.trunc(x)"),),
    ),
    Shim(
        name="set-shape",
        module="chainer.links.activation.maxout",
        symptom="warns from NumPy 2.5: setting .shape",
        link=_NUMPY_2_5_NOTES,
        replacements=(
            Replacement(
                "                array.shape = (out_size, pool_size, in_size)\n"
                "                initialW_orig(array)\n"
                "                array.shape = (linear_out_size, in_size)\n",
                "                initialW_orig(array.reshape(\n"
                "                    out_size, pool_size, in_size))\n"
                "\n",
            ),
            Replacement(
                "                array.shape = (out_size, pool_size)\n"
                "                initial_bias_orig(array)\n"
                "                array.shape = linear_out_size,\n",
                "                initial_bias_orig(array.reshape(out_size, pool_size))\n\n\n",
            ),
        ),
    ),
)
