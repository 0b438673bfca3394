"""Mends for NEP 50: since NumPy 2 an array's dtype takes precedence over a Python number's.

Where NumPy 1 silently widened, NumPy 2 stays narrow, or refuses integers that do not fit.
"""

from umem.compat.shim import Replacement, Shim

_NEP_50 = "https://numpy.org/neps/nep-0050-scalar-promotion.html"
_SIX = Replacement("import six\n", "import six; from umem.compat import support as _umem\n")

SHIMS = (
    Shim(
        name="summary-float64",
        module="chainer.reporter",
        symptom="reports sum losses in float16/32: wrong means, nan",
        link=_NEP_50,
        replacements=(
            _SIX,
            Replacement(
                "            self._x += weight * value\n"
                "            self._x2 += weight * value * value\n",
                "            value, weight = _umem.as_float64(value), _umem.as_float64(weight);"
                " self._x += weight * value\n"
                "            self._x2 += weight * value * value\n",
            ),
            Replacement(
                "            var = self._x2 / n - mean * mean\n            std = xp.sqrt(var)\n",
                "            var = self._x2 / n - mean * mean\n"
                "            std = xp.sqrt(xp.maximum(var, 0))\n",
            ),
        ),
    ),
    Shim(
        name="clip-gpu",
        module="chainer.functions.math.clip",
        versions="cupy>=14.0",
        symptom="clip of float16 on a GPU by NumPy's scalars gives float32",
        link=_NEP_50,
        replacements=(
            Replacement(
                "cuda.cupy.clip(x[0], self.x_min, self.x_max),",
                "cuda.cupy.clip(x[0], self.x_min, self.x_max).astype(x[0].dtype, copy=False),",
            ),
        ),
    ),
    Shim(
        name="pad-sequence",
        module="chainer.functions.array.pad_sequence",
        versions="numpy>=2.0",
        symptom="OverflowError: pad_sequence(padding=-1) in uint8",
        link=_NEP_50,
        replacements=(
            _SIX,
            Replacement(
                "y[i, l:] = self.padding", "y[i, l:] = _umem.as_dtype(self.padding, y.dtype)"
            ),
            Replacement(
                "(ptrs, lengths, self.padding, base,",
                "(ptrs, lengths, _umem.as_dtype(self.padding, y.dtype), base,",
            ),
        ),
    ),
    Shim(
        name="concat-padding",
        module="chainer.dataset.convert",
        versions="numpy>=2.0",
        symptom="OverflowError: concat_examples(padding=-1)",
        link=_NEP_50,
        replacements=(
            _SIX,
            Replacement(
                "device.xp.full(shape, padding, dtype=arrays[0].dtype)",
                "device.xp.full(shape, _umem.as_dtype(padding, arrays[0].dtype),"
                " dtype=arrays[0].dtype)",
            ),
        ),
    ),
    Shim(
        name="integer-constants",
        module="chainer.functions.math.basic_math",
        versions="numpy>=2.0",
        symptom="OverflowError: x - 1 where x is unsigned",
        link=_NEP_50,
        replacements=(
            _SIX,
            Replacement(
                "    return x.dtype.type(value)\n",
                "    return x.dtype.type(_umem.as_dtype(value, x.dtype))\n",
            ),
        ),
    ),
    Shim(
        name="divide-by-scalar",
        module="chainer.functions.math.basic_math",
        versions="numpy>=2.0",
        symptom="x / np.float16(3) is rounded to float16",
        link=_NEP_50,
        replacements=(
            Replacement("MulConstant(1. / rhs)", "MulConstant(1. / _umem.as_float64(rhs))"),
        ),
    ),
    Shim(
        name="force-type",
        module="chainer.utils",
        versions="numpy>=2.0",
        symptom="OverflowError: force_type, as in x ** n",
        link=_NEP_50,
        replacements=(
            _SIX,
            Replacement(
                "        return dtype.type(value)\n",
                "        return dtype.type(_umem.as_dtype(value, dtype))\n",
            ),
        ),
    ),
)
