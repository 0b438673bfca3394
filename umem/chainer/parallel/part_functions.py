"""Functions part by part, because bits may depend on the number of rows: products, loss.

They are a rank's own share of the work; nothing is exchanged. If a function returns an array for
each part, `umem.chainer.parallel.part_sums` adds up the arrays of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np
from chainer.backends import cuda
from chainer.utils import type_check

from umem.errors import UnsupportedError

_ALL = 1 << 32
Slices = Sequence[slice]


class PartLinear(chainer.FunctionNode):
    """Function: x_p W_p' for each part p of a rank; W is given once for each part.

    Args:
        rows: the rows of each part.
        features: the x of each part, instead of a variable; they have no gradient, and are not
            moved, for example from a file.
    """

    def __init__(self, rows: Slices, features: Sequence[Any] | None = None) -> None:
        self._rows, self.features = rows, features

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any]:
        self.retain_inputs(tuple(range(len(inputs))))
        *x, weights = inputs
        xp = cuda.get_array_module(weights)
        y = xp.empty((self._rows[-1].stop, weights.shape[1]), weights.dtype)
        for rows, x_p, w_p in zip(self._rows, self._parts(x), weights, strict=True):
            y[rows] = _product(xp, x_p, w_p.T)
        return (y,)

    def _parts(self, x: Sequence[Any]) -> Sequence[Any]:
        return [x[0][rows] for rows in self._rows] if self.features is None else self.features

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        *x, weights = self.get_retained_inputs()
        wants_x = len(x) > 0 and 0 in indexes
        gradient = PartLinearGrad(self._rows, self.features, wants_x=wants_x)
        found = gradient.apply((*x, weights, grad_outputs[0]))
        by_index = {len(x): found[-1], **({0: found[0]} if wants_x else {})}
        return tuple(by_index[index] for index in indexes)


class DifferentiatedOnce(chainer.FunctionNode):
    """Base of functions that compute a gradient, and have none."""

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        raise UnsupportedError("a graph in parts can be differentiated only once")


class PartLinearGrad(DifferentiatedOnce):
    """Function: gradients of `PartLinear`, of x if needed and of W for each part."""

    def __init__(self, rows: Slices, features: Sequence[Any] | None, *, wants_x: bool) -> None:
        self._rows, self.features, self._wants_x = rows, features, wants_x

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Compute gradients of x (rows, in), if needed, and of W (parts, out, in)."""
        *x, weights, gy = inputs
        xp = cuda.get_array_module(gy)
        parts = [x[0][rows] for rows in self._rows] if self.features is None else self.features
        found = xp.empty(weights.shape, weights.dtype)
        for rows, x_p, g_p in zip(self._rows, parts, found, strict=True):
            g_p[...] = _product(xp, gy[rows].T, x_p)
        if not self._wants_x:
            return (found,)
        gx = xp.empty(x[0].shape, x[0].dtype)
        for rows, w_p in zip(self._rows, weights, strict=True):
            gx[rows] = _product(xp, gy[rows], w_p)
        return gx, found


def _product(xp: Any, a: Any, b: Any) -> Any:
    """Multiply two matrices; float16 in float32."""
    a, b = (xp.asarray(m, np.float32) if m.dtype == np.float16 else xp.asarray(m) for m in (a, b))
    return a @ b


class PartBias(chainer.FunctionNode):
    """Function: x_p + b_p for each part p of a rank."""

    def __init__(self, rows: Slices) -> None:
        self._rows = rows

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any]:
        x, biases = inputs
        y = cuda.get_array_module(x).empty(x.shape, x.dtype)
        for rows, b_p in zip(self._rows, biases, strict=True):
            y[rows] = x[rows] + b_p
        return (y,)

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        (gy,) = grad_outputs
        found = {0: gy} if 0 in indexes else {}
        if 1 in indexes:
            (found[1],) = PartRowSums(self._rows).apply((gy,))
        return tuple(found[index] for index in indexes)


class PartRowSums(DifferentiatedOnce):
    """Function: row sums of each part, (rows, F) to (parts, F)."""

    def __init__(self, rows: Slices) -> None:
        self._rows = rows

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any]:
        (x,) = inputs
        xp = cuda.get_array_module(x)
        wide = np.promote_types(x.dtype, np.float32)
        sums = [x[rows].sum(axis=0, dtype=wide) for rows in self._rows]
        return (xp.stack(sums).astype(x.dtype, copy=False),)


class PartCrossEntropy(chainer.FunctionNode):
    """Function: summed loss of each part's labelled nodes, (rows, classes) to (parts,).

    Args:
        rows: the rows of each part.
        labels: int (rows,); a node with a label below 0 does not count.
    """

    def __init__(self, rows: Slices, labels: Any) -> None:
        self._rows, self.labels = rows, labels

    def check_type_forward(self, in_types: Any) -> None:
        # As in Chainer's own functions, whose errors name inputs by it.
        type_check._argname(in_types, ("scores",))
        (scores,) = in_types
        type_check.expect(
            scores.dtype.kind == "f", scores.ndim == 2, scores.shape[0] == len(self.labels)
        )

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any]:
        self.retain_inputs((0,))
        (scores,) = inputs
        xp = cuda.get_array_module(scores)
        sums = [-self._picked(xp, scores, rows).sum() for rows in self._rows]
        return (xp.stack(sums).astype(scores.dtype, copy=False),)

    def _picked(self, xp: Any, scores: Any, rows: slice) -> Any:
        """Return the log probability of each label of a part."""
        labels, nodes, shifted = _labelled(xp, scores, self.labels, rows)
        return shifted[nodes, labels] - xp.log(xp.exp(shifted).sum(axis=1))

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        gradient = PartCrossEntropyGrad(self._rows, self.labels)
        found: tuple[Any, ...] = gradient.apply((*self.get_retained_inputs(), *grad_outputs))
        return found


def _labelled(xp: Any, scores: Any, labels: Any, rows: slice) -> tuple[Any, Any, Any]:
    """Return a part's labels, the row of each labelled node, and its scores less the row's
    maximum.
    """
    which = xp.flatnonzero(labels[rows] >= 0)
    wide = scores[rows][which].astype(np.promote_types(scores.dtype, np.float32), copy=False)
    return labels[rows][which], xp.arange(len(which)), wide - wide.max(axis=1, keepdims=True)


class PartCrossEntropyGrad(DifferentiatedOnce):
    """Function: gradient of `PartCrossEntropy`, softmax minus the one-hot label."""

    def __init__(self, rows: Slices, labels: Any) -> None:
        self._rows, self.labels = rows, labels

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any]:
        """Compute the gradient of the scores (rows, classes); 0 for nodes without a label."""
        scores, gy = inputs
        xp = cuda.get_array_module(scores)
        gradient = xp.zeros(scores.shape, scores.dtype)
        for rows, g_p in zip(self._rows, gy, strict=True):
            labels, nodes, shifted = _labelled(xp, scores, self.labels, rows)
            shares = xp.exp(shifted)
            shares /= shares.sum(axis=1, keepdims=True)
            shares[nodes, labels] -= 1
            shares *= g_p
            gradient[rows][self.labels[rows] >= 0] = shares
        return (gradient,)


class PartDropout(chainer.FunctionNode):
    """Function: dropout whose mask is drawn again in backward instead of kept.

    Its generator counts (Philox), so that a part's mask depends only on the key and the part.

    Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.

    Args:
        rows: the rows of each part.
        first: the number of the first part.
        ratio: share that is dropped, 0 to below 1.
        key: two numbers from 0, which differ from call to call.
    """

    def __init__(self, rows: Slices, first: int, ratio: float, key: tuple[int, int]) -> None:
        self._rows, self._first, self._ratio, self._key = rows, first, ratio, key

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any]:
        (x,) = inputs
        xp = cuda.get_array_module(x)
        scale = x.dtype.type(1 / (1 - self._ratio))
        y = xp.empty(x.shape, x.dtype)
        for part, rows in enumerate(self._rows, self._first):
            kept = self._kept(part, x[rows].shape)
            y[rows] = x[rows] * (xp.asarray(kept) * scale)
        return (y,)

    def _kept(self, part: int, shape: tuple[int, ...]) -> Any:
        bits = np.random.Philox(key=self._key, counter=[0, 0, part, 0])
        size = int(np.prod(shape))
        drawn: Any = bits.random_raw((size + 1) // 2)
        draws = drawn.astype("<u8", copy=False).view("<u4")[:size]
        return (draws >= round(self._ratio * _ALL)).reshape(shape)

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        again = PartDropout(self._rows, self._first, self._ratio, self._key)
        gradient: tuple[Any, ...] = again.apply(grad_outputs)
        return gradient
