"""Links whose weights stay in 8 or 4 bits, and whose products are of integers.

`QuantizedLinear` and `QuantizedConvolution2D` compute, by Jacob et al. (2018, equation 4),
``y = (scale of x * scale of the row) * sum((code of x - zero) * code of w) + b``: the sum is int32,
the rest float32, and y has the type of x. They have no parameters and no gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import chainer
import chainer.links as L
import numpy as np
from chainer import function_node
from chainer.backend import get_array_module
from chainer.utils import type_check
from chainer.utils.conv import get_conv_outsize

from umem.chainer.quantization.integer_products import integer_product
from umem.chainer.quantization.quantized_weight import QuantizedWeight
from umem.chainer.quantization.scheme import encode_input
from umem.errors import QuantizationError, UnsupportedError

__all__ = ["QuantizedConvolution2D", "QuantizedEmbedID", "QuantizedLinear"]

_COLUMNS = 4 << 20
"""A convolution has at most this many bytes of float32 columns at once, or one sample's.
A guess, not measured."""


class WeightReadError(QuantizationError, AttributeError):
    """Code read the W of a quantised link, which has no float weight.

    Attributes:
        link: the link; None in another process.
    """

    link: Any = None


class _Initialized:
    """Stands for W when code only asks whether it is initialised; arithmetic with it raises."""

    array = ()


_INITIALIZED = _Initialized()


class QuantizedLayer(chainer.Chain):
    """Base of quantised links.

    Attributes:
        weight: codes and scales.
        bias: float32 (n,), or None.
        step: float32 (2,), the scale and the zero point of its input; None for an `EmbedID`.
        scheme: the numbers of bits.
        specs: the arguments of the float link; each is also an attribute.
        is_asked_whether: whether its owner reads W only to check that it is initialised.
    """

    stands_for: ClassVar[Any]
    bias: Any
    step: Any
    has_input = True
    reports_initialized = False

    def __init__(
        self, weight: QuantizedWeight, specs: dict[str, Any], has_bias: bool = False
    ) -> None:
        super().__init__()
        self.scheme, self.specs = weight.scheme, specs
        for name, value in specs.items():
            setattr(self, name, tuple(value) if isinstance(value, list) else value)
        with self.init_scope():
            self.weight = weight
        device = weight.device
        if has_bias:
            self.add_persistent("bias", device.send(np.zeros(weight.shape[0], np.float32)))
        else:
            self.bias = None
        if self.has_input:
            self.add_persistent("step", device.send(np.array([1, 0], np.float32)))
        self.to_device(device)

    @classmethod
    def of(cls, link: Any, weight: QuantizedWeight, step: Any = None, specs: Any = None) -> Any:
        """Make a quantised link from a float one.

        Args:
            link: the float link.
            weight: its weight, quantised; a layer that shares it may have it, too.
            step: scale and zero point of its input, float32 (2,).
            specs: its arguments; None: the link's own.
        """
        bias = getattr(link, "b", None)
        made = cls(weight, specs or specs_of(link), bias is not None)
        made.name = link.name
        if bias is not None:
            made.bias[...] = bias.array
        if step is not None:
            made.step[...] = weight.device.send(step)
        return made

    @property
    def W(self) -> Any:
        """Return a placeholder that says that it is initialised; Chainer's LSTM asks only that.

        Raises:
            WeightReadError: other code reads it; also an AttributeError.
        """
        if self.reports_initialized:
            return _INITIALIZED
        error = WeightReadError(
            f"{self.name or 'the link'!r} is a {type(self).__name__}, without W: its weight has "
            f"{self.scheme.bits} bits. Name it in keep to leave it in float32"
        )
        error.link = self
        raise error

    @property
    def nbytes(self) -> int:
        """Return the bytes of its arrays, including the weight's."""
        # Chainer has no public list of persistents.
        own = sum(getattr(self, name).nbytes for name in sorted(self._persistent))
        return int(own + self.weight.nbytes)

    @property
    def printable_specs(self) -> Any:
        yield from self.specs.items()
        yield "bits", self.scheme.bits

    def _apply(self, x: Any, compute: Callable[[Any], Any], check: Callable[[Any], None]) -> Any:
        """Call a function on x; from its graph a backward learns that there is no gradient."""
        x = chainer.as_variable(x)
        if chainer.config.enable_backprop and not x.requires_grad:
            x = chainer.Variable(x.array, requires_grad=True)
        return QuantizedCall(self, compute, check).apply((x,))[0]

    def _multiply(self, codes: Any, rows: slice) -> Any:
        """Multiply codes by the weight, scale, and add the bias: float32 (m, rows)."""
        y = integer_product(codes, self.weight, rows).astype(np.float32)
        y *= self.step[0] * self.weight.scales[rows]
        if self.bias is not None:
            y += self.bias[rows]
        return y

    def _codes(self, x: Any) -> Any:
        codes = encode_input(x, self.step, self.scheme)
        if bool(get_array_module(codes).isnan(codes).any()):
            raise QuantizationError(
                f"the input of {self.name or type(self).__name__!r} has NaN, which has no code; "
                "nothing was computed"
            )
        return codes


class QuantizedCall(function_node.FunctionNode):
    """Function of a quantised link; it has no gradient."""

    def __init__(
        self, layer: Any, compute: Callable[[Any], Any], check: Callable[[Any], None]
    ) -> None:
        self._layer, self._compute, self._check = layer, compute, check

    @property
    def label(self) -> str:
        return type(self._layer).__name__

    def check_type_forward(self, in_types: Any) -> None:
        self._check(in_types[0])

    def forward(self, inputs: Any) -> Any:
        with np.errstate(over="ignore"):  # a half becomes infinite, as in a model of halves
            return (self._compute(inputs[0]),)

    def backward(self, indexes: Any, gradients: Any) -> Any:
        name, kind = self._layer.name, type(self._layer).__name__
        raise UnsupportedError(
            f"{name or kind!r} is quantised ({kind}) and has no gradient: train it in floats, "
            "or under umem.chainer.quantization_aware, and then quantise it"
        )


class QuantizedLinear(QuantizedLayer):
    """A quantised `chainer.links.Linear`, called like it."""

    stands_for = L.Linear

    def forward(self, x: Any, n_batch_axes: int = 1) -> Any:
        """Compute ``x W^T + b`` by integer products.

        Args:
            x: floats whose axes after the first ``n_batch_axes`` have k numbers together.

        Raises:
            QuantizationError: x has NaN.
        """
        rows, columns = self.weight.shape

        def check(x_type: Any) -> None:
            type_check.expect(x_type.dtype.kind == "f", x_type.ndim > n_batch_axes)
            type_check.expect(type_check.prod(x_type.shape[n_batch_axes:]) == columns)

        def compute(x: Any) -> Any:
            batch = x.shape[:n_batch_axes]
            y = self._multiply(self._codes(x).reshape(-1, columns), slice(0, rows))
            return y.reshape(*batch, rows).astype(x.dtype, copy=False)

        return self._apply(x, compute, check)


class QuantizedConvolution2D(QuantizedLayer):
    """A quantised `chainer.links.Convolution2D`, called like it, with groups, strides and
    dilation.
    """

    stands_for = L.Convolution2D

    def forward(self, x: Any) -> Any:
        """Convolve by integer products, with columns of at most 4 MiB at once, or one sample's.

        Args:
            x: floats of shape (n, channels, height, width).

        Raises:
            QuantizationError: x has NaN.
        """
        channels, kernel, dilate = (self.specs[name] for name in ("in_channels", "ksize", "dilate"))

        def check(x_type: Any) -> None:
            type_check.expect(x_type.dtype.kind == "f", x_type.ndim == 4)
            type_check.expect(x_type.shape[1] == channels)
            for axis in (0, 1):
                padded = x_type.shape[2 + axis] + 2 * self.specs["pad"][axis]
                type_check.expect(padded > (kernel[axis] - 1) * dilate[axis])

        return self._apply(x, self._convolve, check)

    def _convolve(self, x: Any) -> Any:
        """Compute the convolution of float x, a few samples at a time."""
        xp, rows, groups = get_array_module(x), self.weight.shape[0], self.specs["groups"]
        codes = self._codes(x)
        out = tuple(self._out_size(x.shape[2 + axis], axis) for axis in (0, 1))
        y = xp.empty((len(x), rows, *out), x.dtype)
        per_sample = 4 * self.weight.shape[1] * groups * out[0] * out[1]
        step = max(1, _COLUMNS // max(1, per_sample))
        for start in range(0, len(x), step):
            columns = self._columns(codes[start : start + step], out)
            for group in range(groups):
                share = slice(group * rows // groups, (group + 1) * rows // groups)
                found = self._multiply(columns[group].T, share)
                found = found.reshape(-1, *out, share.stop - share.start)
                y[start : start + step, share] = found.transpose(0, 3, 1, 2)
        return y

    def _out_size(self, size: int, axis: int) -> int:
        kernel, stride, pad, dilate = (
            self.specs[name][axis] for name in ("ksize", "stride", "pad", "dilate")
        )
        return int(get_conv_outsize(size, kernel, stride, pad, d=dilate))

    def _columns(self, codes: Any, out: tuple[int, ...]) -> Any:
        """Return the columns (groups, k, samples * outputs) of codes (im2col); padding is zero's
        code.
        """
        (kh, kw), (sy, sx), (ph, pw), (dy, dx) = (
            self.specs[name] for name in ("ksize", "stride", "pad", "dilate")
        )
        samples, channels, height, width = codes.shape
        xp = get_array_module(codes)
        padded = xp.zeros((channels, samples, height + 2 * ph, width + 2 * pw), np.float32)
        padded[:, :, ph : ph + height, pw : pw + width] = codes.transpose(1, 0, 2, 3)
        columns = xp.empty((channels, kh, kw, samples, *out), np.float32)
        for i in range(kh):
            rows = slice(i * dy, i * dy + sy * (out[0] - 1) + 1, sy)
            for j in range(kw):
                across = slice(j * dx, j * dx + sx * (out[1] - 1) + 1, sx)
                columns[:, i, j] = padded[:, :, rows, across]
        return columns.reshape(self.specs["groups"], self.weight.shape[1], -1)


class QuantizedEmbedID(QuantizedLayer):
    """A quantised `chainer.links.EmbedID`, called like it; only requested rows become floats."""

    stands_for = L.EmbedID
    has_input = False

    def forward(self, x: Any) -> Any:
        """Return the rows of the given identifiers.

        Args:
            x: integers of any shape.
        """

        def check(x_type: Any) -> None:
            type_check.expect(x_type.dtype.kind == "i", x_type.ndim >= 1)

        def compute(x: Any) -> Any:
            ignored = self.specs["ignore_label"]
            if ignored is None:
                y = self.weight.rows_at(x)
            else:
                is_ignored = x == ignored
                y = self.weight.rows_at(get_array_module(x).where(is_ignored, 0, x))
                y[is_ignored] = 0
            return y.astype(self.specs["dtype"], copy=False)

        return self._apply(x, compute, check)


def specs_of(link: Any) -> dict[str, Any]:
    """Return the constructor arguments of a float link that a quantised one keeps, as JSON values.

    A size that is not known yet is None.
    """
    shape = link.W.shape if link.W.is_initialized else None
    if isinstance(link, L.Linear):
        in_size = link.in_size if shape is None else int(shape[1])
        return {"in_size": _known(in_size), "out_size": _known(link.out_size)}
    if isinstance(link, L.EmbedID):
        ignored = None if link.ignore_label is None else int(link.ignore_label)
        rows, columns = link.W.shape
        return {"in_size": rows, "out_size": columns, "ignore_label": ignored,
                "dtype": str(link.W.dtype)}  # fmt: skip
    pairs = {name: _pair(getattr(link, name)) for name in ("ksize", "stride", "pad", "dilate")}
    channels = link.in_channels if shape is None else shape[1] * link.groups
    sizes = {"in_channels": channels, "out_channels": link.out_channels, "groups": link.groups}
    return {**{name: _known(size) for name, size in sizes.items()}, **pairs}


def weight_shape(kind: Any, specs: dict[str, Any]) -> tuple[int, int]:
    """Return rows and columns of the weight of a quantised link with these arguments."""
    if kind is QuantizedLinear:
        return specs["out_size"], specs["in_size"]
    if kind is QuantizedEmbedID:
        return specs["in_size"], specs["out_size"]
    height, width = specs["ksize"]
    return specs["out_channels"], specs["in_channels"] // specs["groups"] * height * width


def _known(size: Any) -> int | None:
    """Convert a size to JSON's int, because users may give NumPy's integers."""
    return None if size is None else int(size)


def _pair(value: Any) -> list[int]:
    return [int(each) for each in value] if hasattr(value, "__getitem__") else [int(value)] * 2


KINDS = {kind.stands_for: kind for kind in QuantizedLayer.__subclasses__()}
"""For each float link class, the quantised class that replaces it."""
