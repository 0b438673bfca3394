"""Every link that Chainer exports, forward and backward, in every precision it takes.

As for the functions: in float64 against central differences over inputs and parameters together,
in float16, float32 and mixed16 (float16 with float32 statistics) against float64. All but a sample
is `slow`, as there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.compat.functions.test_functions import DTYPES, TOLERANCE, flatten, slow_but, weights_for
from tests.compat.test_shims import chainer

pytestmark = pytest.mark.thorough

SAMPLE = set(
    "BatchNormalization BinaryHierarchicalSoftmax Convolution2D EmbedID InceptionBN LSTM Linear "
    "Maxout".split()
)
F: Any = chainer.functions
L: Any = chainer.links


@dataclass(frozen=True)
class LinkCase:
    """How to make one link and call it.

    Attributes:
        make: returns the link, every size given.
        shapes: shapes of the float inputs.
        call: the call, with the link and the inputs.
        only: the dtypes that the link takes; the others must be refused.
        tolerance: factor on the tolerance in float16 and mixed16.
    """

    make: Callable[[], Any]
    shapes: Sequence[tuple[int, ...]] = ((3, 4),)
    call: Callable[..., Any] = lambda link, *xs: link(*xs)
    only: tuple[str, ...] = ("float16", "float32", "float64", "mixed16")
    tolerance: float = 1.0


def grid(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return values between -0.8 and 0.8 that are exact in float16."""
    values = np.random.RandomState(seed).uniform(-0.8, 0.8, shape)
    return np.asarray(values).astype("float16").astype(float)


def config(dtype: str) -> Any:
    kind = chainer.mixed16 if dtype == "mixed16" else np.dtype(dtype)
    return chainer.using_config("dtype", kind)


def made(case: LinkCase) -> tuple[Any, list[Any]]:
    """Return the link and its parameters in the order of their names."""
    np.random.seed(0)
    link = case.make()
    link.cleargrads()  # until then they are nan
    return link, [parameter for _, parameter in sorted(link.namedparams())]


def arrays_for(case: LinkCase) -> list[np.ndarray]:
    """Return float64 values for the inputs and the parameters."""
    with config("float64"):
        _, parameters = made(case)
    shapes = [*case.shapes, *(parameter.shape for parameter in parameters)]
    return [grid(shape, seed) for seed, shape in enumerate(shapes)]


def forward(case: LinkCase, arrays: Sequence[np.ndarray], dtype: str) -> tuple[Any, Any]:
    """Return inputs with parameters, and float outputs."""
    link, parameters = made(case)
    count = len(case.shapes)
    for parameter, array in zip(parameters, arrays[count:], strict=True):
        parameter.array[...] = array
    kind = "float16" if dtype == "mixed16" else dtype
    xs = [chainer.Variable(array.astype(kind)) for array in arrays[:count]]
    np.random.seed(0)
    return [*xs, *parameters], flatten(case.call(link, *xs))


def gradients(case: LinkCase, arrays: Sequence[np.ndarray], dtype: str) -> tuple[Any, Any]:
    """Return the outputs and the gradients of their weighted sum."""
    with config(dtype):
        variables, ys = forward(case, arrays, dtype)
        for y, weight in zip(ys, weights_for(ys), strict=True):
            y.grad = weight.astype(y.dtype)
        chainer.backward(ys)
    grads = [np.zeros(v.shape) if v.grad is None else v.grad for v in variables]
    return [y.array for y in ys], grads


def loss(case: LinkCase, arrays: Sequence[np.ndarray], dtype: str) -> float:
    with config(dtype):
        _, ys = forward(case, arrays, dtype)
    return float(sum((y.array * w).sum() for y, w in zip(ys, weights_for(ys), strict=True)))


def image(*shape: int) -> tuple[tuple[int, ...], ...]:
    return ((2, *shape),)


def sequence(link: Any, x: Any, y: Any) -> Any:
    return link(*[None] * (2 if "LSTM" in type(link).__name__ else 1), [x, y])


def steps(link: Any, x: Any, y: Any) -> Any:
    link.reset_state()
    return link(x), link(y)


def embed(link: Any) -> Any:
    return link(link.xp.array([0, 2, 2], "i"))


def tree(link: Any, *states: Any) -> Any:
    return link(*states)


LABELS = np.array([0, 2, 1], "i")
STEPS = ((3, 4), (3, 4))
SEQUENCE = ((3, 4), (2, 4))

CASES: dict[str, LinkCase] = {
    "BatchNormalization": LinkCase(lambda: L.BatchNormalization(4), tolerance=4),
    "BatchRenormalization": LinkCase(lambda: L.BatchRenormalization(4), tolerance=4),
    "Bias": LinkCase(lambda: L.Bias(1, (4,))),
    "Bilinear": LinkCase(lambda: L.Bilinear(4, 2, 3), ((3, 4), (3, 2)), only=("float32",)),
    "BinaryHierarchicalSoftmax": LinkCase(
        lambda: L.BinaryHierarchicalSoftmax(4, ((0, 1), 2)), call=lambda f, x: f(x, LABELS)),
    "BlackOut": LinkCase(lambda: L.BlackOut(4, [5, 3, 2], 2), call=lambda f, x: f(x, LABELS)),
    "CRF1d": LinkCase(lambda: L.CRF1d(3), ((2, 3), (2, 3)),
                      lambda f, x, y: f([x, y], [LABELS[:2], LABELS[1:]])),
    "ChildSumTreeLSTM": LinkCase(lambda: L.ChildSumTreeLSTM(4, 2),
                                 ((3, 2), (3, 2), (3, 2), (3, 2), (3, 4)), tree),
    "Classifier": LinkCase(lambda: L.Classifier(L.Linear(4, 3)), call=lambda f, x: f(x, LABELS)),
    "Convolution1D": LinkCase(lambda: L.Convolution1D(3, 2, 3), image(3, 6)),
    "Convolution2D": LinkCase(lambda: L.Convolution2D(3, 2, 3), image(3, 5, 5)),
    "Convolution3D": LinkCase(lambda: L.Convolution3D(2, 2, 3), image(2, 4, 4, 4)),
    "ConvolutionND": LinkCase(lambda: L.ConvolutionND(2, 3, 2, 3), image(3, 5, 5)),
    "Deconvolution1D": LinkCase(lambda: L.Deconvolution1D(3, 2, 3), image(3, 6)),
    "Deconvolution2D": LinkCase(lambda: L.Deconvolution2D(3, 2, 3), image(3, 5, 5)),
    "Deconvolution3D": LinkCase(lambda: L.Deconvolution3D(2, 2, 2), image(2, 3, 3, 3)),
    "DeconvolutionND": LinkCase(lambda: L.DeconvolutionND(2, 3, 2, 3), image(3, 5, 5)),
    "DecorrelatedBatchNormalization": LinkCase(
        lambda: L.DecorrelatedBatchNormalization(4, groups=2), ((8, 4),),
        only=("float32", "float64")),
    "DeformableConvolution2D": LinkCase(
        lambda: L.DeformableConvolution2D(2, 2, 3), image(2, 5, 5), tolerance=4),
    "DepthwiseConvolution2D": LinkCase(lambda: L.DepthwiseConvolution2D(3, 2, 3), image(3, 5, 5)),
    "DilatedConvolution2D": LinkCase(lambda: L.DilatedConvolution2D(3, 2, 2, dilate=2),
                                     image(3, 5, 5)),
    "EmbedID": LinkCase(lambda: L.EmbedID(3, 4), (), embed),
    "GRU": LinkCase(lambda: L.GRU(4, 4), STEPS, steps),
    "GroupNormalization": LinkCase(lambda: L.GroupNormalization(2, 4), image(4, 3), tolerance=4),
    "Highway": LinkCase(lambda: L.Highway(4)),
    "Inception": LinkCase(lambda: L.Inception(3, 2, 2, 2, 2, 2, 2), image(3, 4, 4)),
    "InceptionBN": LinkCase(lambda: L.InceptionBN(3, 2, 2, 2, 2, 2, "max", 2), image(3, 4, 4),
                            tolerance=8),
    "LSTM": LinkCase(lambda: L.LSTM(4, 2), STEPS, steps),
    "LayerNormalization": LinkCase(lambda: L.LayerNormalization(4), tolerance=4),
    "Linear": LinkCase(lambda: L.Linear(4, 2)),
    "LocalConvolution2D": LinkCase(lambda: L.LocalConvolution2D(2, 2, 3, 3, 2), image(2, 3, 3)),
    "MLPConvolution2D": LinkCase(lambda: L.MLPConvolution2D(3, (2, 2), 3), image(3, 5, 5)),
    "Maxout": LinkCase(lambda: L.Maxout(4, 2, 3)),
    "NStepBiGRU": LinkCase(lambda: L.NStepBiGRU(1, 4, 2, 0), SEQUENCE, sequence),
    "NStepBiLSTM": LinkCase(lambda: L.NStepBiLSTM(1, 4, 2, 0), SEQUENCE, sequence),
    "NStepBiRNNReLU": LinkCase(lambda: L.NStepBiRNNReLU(1, 4, 2, 0), SEQUENCE, sequence),
    "NStepBiRNNTanh": LinkCase(lambda: L.NStepBiRNNTanh(1, 4, 2, 0), SEQUENCE, sequence),
    "NStepGRU": LinkCase(lambda: L.NStepGRU(1, 4, 2, 0), SEQUENCE, sequence),
    "NStepLSTM": LinkCase(lambda: L.NStepLSTM(1, 4, 2, 0), SEQUENCE, sequence),
    "NStepRNNReLU": LinkCase(lambda: L.NStepRNNReLU(1, 4, 2, 0), SEQUENCE, sequence),
    "NStepRNNTanh": LinkCase(lambda: L.NStepRNNTanh(1, 4, 2, 0), SEQUENCE, sequence),
    "NaryTreeLSTM": LinkCase(lambda: L.NaryTreeLSTM(4, 2, 2),
                             ((3, 2), (3, 2), (3, 2), (3, 2), (3, 4)), tree),
    "NegativeSampling": LinkCase(lambda: L.NegativeSampling(4, [5, 3, 2], 2),
                                 call=lambda f, x: f(x, LABELS)),
    "PReLU": LinkCase(lambda: L.PReLU((4,))),
    "Parameter": LinkCase(lambda: L.Parameter(np.zeros(4, chainer.get_dtype())), (),
                          lambda f: f()),
    "Scale": LinkCase(lambda: L.Scale(1, (4,), True)),
    "SimplifiedDropconnect": LinkCase(lambda: L.SimplifiedDropconnect(4, 2)),
    "StatefulGRU": LinkCase(lambda: L.StatefulGRU(4, 2), STEPS, steps),
    "StatefulMGU": LinkCase(lambda: L.StatefulMGU(4, 2), STEPS, steps),
    "StatefulPeepholeLSTM": LinkCase(lambda: L.StatefulPeepholeLSTM(4, 2), STEPS, steps),
    "StatefulZoneoutLSTM": LinkCase(lambda: L.StatefulZoneoutLSTM(4, 2), STEPS, steps),
    "StatelessGRU": LinkCase(lambda: L.StatelessGRU(4, 2), ((3, 2), (3, 4))),
    "StatelessLSTM": LinkCase(lambda: L.StatelessLSTM(4, 2), ((3, 2), (3, 2), (3, 4))),
    "StatelessMGU": LinkCase(lambda: L.StatelessMGU(4, 2), ((3, 2), (3, 4))),
    "Swish": LinkCase(lambda: L.Swish((4,))),
}  # fmt: skip
EXCEPTIONS = {
    "GoogLeNet": "made of links above; takes images of 224 pixels",
    "ResNet101Layers": "made of links above; takes images of 224 pixels",
    "ResNet152Layers": "made of links above; takes images of 224 pixels",
    "ResNet50Layers": "made of links above; takes images of 224 pixels",
    "VGG16Layers": "made of links above; takes images of 224 pixels",
    "VGG19Layers": "made of links above; takes images of 224 pixels",
    "TheanoFunction": "needs Theano",
}


def test_every_link_has_a_case_or_a_reason():
    exported = {name for name, value in vars(L).items() if inspect.isclass(value)}
    assert sorted(exported - set(CASES) - set(EXCEPTIONS)) == []
    assert sorted((set(CASES) | set(EXCEPTIONS)) - exported) == []


@pytest.mark.parametrize("name", slow_but(SAMPLE, CASES))
def test_gradient_agrees_with_central_differences(name):
    case = CASES[name]
    dtype = "float64" if "float64" in case.only else "float32"
    step, tolerance = (1e-6, 1e-5) if dtype == "float64" else (2.0**-8, 1e-2)
    arrays = arrays_for(case)
    _, grads = gradients(case, arrays, dtype)
    rng = np.random.RandomState(3)
    direction = [rng.uniform(-1, 1, array.shape) for array in arrays]
    ahead = [a + step * d for a, d in zip(arrays, direction, strict=True)]
    behind = [a - step * d for a, d in zip(arrays, direction, strict=True)]
    expected = (loss(case, ahead, dtype) - loss(case, behind, dtype)) / (2 * step)
    got = sum(float((g * d).sum()) for g, d in zip(grads, direction, strict=True))
    scale = sum(float(abs(g * d).sum()) for g, d in zip(grads, direction, strict=True))
    assert scale > 0
    assert abs(got - expected) <= tolerance * scale + 1e-7, (got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", slow_but(SAMPLE, CASES))
def test_narrow_dtypes_agree_with_float64(name, dtype):
    case = CASES[name]
    arrays = arrays_for(case)
    if dtype not in case.only:
        with pytest.raises((chainer.utils.type_check.InvalidType, TypeError)), config(dtype):
            forward(case, arrays, dtype)
        return
    if "float64" not in case.only:
        return  # held against central differences, and there is no wider dtype to compare with
    expected, got = gradients(case, arrays, "float64"), gradients(case, arrays, dtype)
    tolerance = TOLERANCE[dtype] * (1 if dtype == "float32" else case.tolerance)
    for a, b in zip([*got[0], *got[1]], [*expected[0], *expected[1]], strict=True):
        bound = tolerance * max(float(abs(b).max(initial=0)), 1e-2)
        assert float(abs(a.astype(float) - b).max(initial=0)) <= bound
