"""How to call each function that ``chainer.functions`` exports: data for the tests of functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.compat.test_shims import chainer

F: Any = chainer.functions
DTYPES = ("float16", "float32", "float64", "mixed16")


@dataclass(frozen=True)
class Case:
    """How to call one function.

    Attributes:
        run: the call; takes the variables, returns variables in any nesting.
        shapes: shapes of the float inputs.
        low, high: their range.
        parameters: inputs that stay float32 in mixed16.
        only: the dtypes that the function takes; the others must be refused.
        gradient: False where the function has no gradient.
        tolerance: factor on the tolerance in float16 and mixed16.
    """

    run: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]] = ((3, 4),)
    low: float = -0.9
    high: float = 0.9
    parameters: tuple[int, ...] = ()
    only: tuple[str, ...] = DTYPES
    gradient: bool = True
    tolerance: float = 1.0


def ints(*values: Any) -> np.ndarray:
    return np.array(values, "i")


def unary(name: str, low: float = -0.9, high: float = 0.9, **options: Any) -> Case:
    return Case(getattr(F, name), ((3, 4),), low, high, **options)


TIED = np.array([[2, 0], [1, 2], [0, 1], [2, 1]], "i")
UNSTABLE = 4.0  # functions that subtract nearly equal numbers
SINGLE = ("float32",)
UP_TO_32 = ("float32", "float64")


def sparse(x: Any, y: Any) -> Any:
    coo = chainer.utils.CooMatrix(x.array, ints(0, 0, 1, 2, 2), ints(0, 2, 1, 0, 3), (3, 4))
    coo.data = x  # the constructor cuts the graph
    return F.sparse_matmul(coo, y)


def judged(y: Any) -> tuple[Any, np.ndarray]:
    """Return scores of four classes, each found once and one mistaken, and the labels."""
    classes = np.eye(4, dtype=y.dtype) * 4
    more = chainer.Variable(classes[[3, 3]])
    return F.concat((y + classes[:3], more), axis=0), ints(0, 1, 2, 3, 0)


def definite(x: Any) -> Any:
    return F.matmul(x, x, transb=True) + chainer.Variable(np.eye(3).astype(x.dtype))


def recurrent(function: str, gates: int, bidirectional: bool, cell: bool) -> Case:
    """Make the case of one of Chainer's recurrent functions: two sequences, one layer."""
    directions = 2 if bidirectional else 1
    per_layer = gates * directions

    def run(*variables: Any) -> Any:
        states, rest = list(variables[: 2 if cell else 1]), list(variables[2 if cell else 1 :])
        ws = rest[: 2 * per_layer]
        groups = [ws[i : i + 2 * gates] for i in range(0, len(ws), 2 * gates)]
        zeros = np.zeros(2, states[0].dtype)
        bs = [[chainer.Variable(zeros) for _ in range(2 * gates)] for _ in groups]
        with chainer.using_config("cudnn_deterministic", False):
            return getattr(F, function)(1, 0.0, *states, groups, bs, rest[2 * per_layer :])

    states = ((directions, 2, 2),) * (2 if cell else 1)
    weights = ((2, 2),) * (2 * per_layer)
    return Case(run, (*states, *weights, (2, 2), (1, 2)))


def boxes(x: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    # No halves: Chainer rounds them to even on the host, and away from zero on a GPU.
    rois = np.array([[0.75, 0.75, 5.25, 6.25], [1, 0, 6, 4]], x.dtype)
    return x, rois, ints(0, 1)


IMAGE = ((2, 3, 5, 5),)
VOLUME = ((1, 2, 4, 4, 4),)
NORMALISED = ((4, 3), (3,), (3,))
STATISTICS = ((4, 3), (3,), (3,), (3,), (3,))


def whitened(x: Any) -> Any:
    return F.decorrelated_batch_normalization(x, groups=1)


def whitened_fixed(x: Any) -> Any:
    # Constants: Chainer's gradient of the projection has the shape of something else.
    mean = np.array([[0.1, 0.2, 0.3]], x.dtype)
    projection = np.array([[[1, 0.5, 0], [0.5, 2, 0], [0, 0.25, 1]]], x.dtype)
    return F.fixed_decorrelated_batch_normalization(x, mean, projection, groups=1)


def renormalised(x: Any, gamma: Any, beta: Any) -> Any:
    """Apply batch renormalisation with bounds that leave it plain batch normalisation."""
    running = np.full(3, 0.1, gamma.dtype), np.full(3, 0.3, gamma.dtype)
    return F.batch_renormalization(
        x,
        gamma,
        beta,
        rmax=1,
        dmax=0,
        running_mean=running[0],
        running_var=running[1],
        update_statistics=True,
    )


CASES: dict[str, Case] = {
    name: unary(name)
    for name in (
        "absolute arctan arctanh arcsin arccos average batch_l2_norm_squared ceil cos cosh crelu "
        "cumprod cumsum digamma elu erf erfc erfcx exp expm1 fft_pair flatten fliplr flipud floor "
        "fix hard_sigmoid identity leaky_relu lgamma log_ndtr log_softmax logsumexp max min ndtr "
        "normalize prod relu relu6 rrelu selu sigmoid sign sin sinh softmax softplus square "
        "squeeze sum tan tanh transpose dropout diagonal hstack vstack dstack"
    ).split()
    if hasattr(F, name)
}
CASES |= {
    "mean": unary("mean"),
    "absolute_error": Case(F.absolute_error, ((3, 4), (3, 4))),
    "accuracy": Case(lambda y: F.accuracy(y, ints(0, 2, 1)), gradient=False),
    "add": Case(F.add, ((3, 4), (1, 4))),
    "arctan2": Case(F.arctan2, ((3, 4), (3, 4)), 0.1),
    "argmax": Case(F.argmax, gradient=False),
    "argmax_crf1d": Case(
        lambda c, x, y: F.argmax_crf1d(c, [x, y])[0], ((3, 3), (2, 3), (2, 3)), gradient=False
    ),
    "argmin": Case(F.argmin, gradient=False),
    "as_strided": Case(lambda x: F.as_strided(x, (3, 2), (4, 1), 1)),
    "average_pooling_1d": Case(lambda x: F.average_pooling_1d(x, 2), ((2, 3, 6),)),
    "average_pooling_2d": Case(lambda x: F.average_pooling_2d(x, 2), IMAGE),
    "average_pooling_3d": Case(lambda x: F.average_pooling_3d(x, 2), VOLUME),
    "average_pooling_nd": Case(lambda x: F.average_pooling_nd(x, 2), IMAGE),
    "batch_det": Case(lambda x: F.batch_det(x), ((2, 3, 3),), 0.1, 2, tolerance=UNSTABLE),
    "batch_inv": Case(lambda x: F.batch_inv(x + np.eye(3).astype(x.dtype) * 3), ((2, 3, 3),)),
    "batch_matmul": Case(F.batch_matmul, ((2, 3, 4), (2, 4, 2)), only=SINGLE),
    "batch_normalization": Case(
        F.batch_normalization, NORMALISED, parameters=(1, 2), tolerance=UNSTABLE
    ),
    "batch_renormalization": Case(renormalised, NORMALISED, parameters=(1, 2), tolerance=UNSTABLE),
    "bernoulli_nll": Case(F.bernoulli_nll, ((3, 4), (3, 4))),
    "bias": Case(lambda x, b: F.bias(x, b, axis=1), ((3, 4), (4,))),
    "bilinear": Case(F.bilinear, ((3, 2), (3, 4), (2, 4, 5), (2, 5), (4, 5), (5,)), only=SINGLE),
    "binary_accuracy": Case(
        lambda y: F.binary_accuracy(y, (ints(*range(12)) % 2).reshape(3, 4)), gradient=False
    ),
    "black_out": Case(lambda x, w: F.black_out(x, ints(0, 2, 1), w, TIED[:3]), ((3, 4), (3, 4))),
    "broadcast": Case(lambda x, y: F.broadcast(x, y), ((3, 1), (1, 4))),
    "broadcast_to": Case(lambda x: F.broadcast_to(x, (2, 3, 4))),
    "cast": Case(lambda x: F.cast(x, "float64")),
    "cholesky": Case(lambda x: F.cholesky(definite(x)), ((3, 3),), only=UP_TO_32),
    "classification_summary": Case(lambda y: F.classification_summary(*judged(y)), gradient=False),
    "clip": Case(lambda x: F.clip(x, -0.5, 0.5)),
    "clipped_relu": Case(lambda x: F.clipped_relu(x, 0.5)),
    "concat": Case(lambda x, y: F.concat((x, y)), ((3, 4), (3, 2))),
    "connectionist_temporal_classification": Case(
        lambda x, y, z: F.connectionist_temporal_classification(
            [x, y, z], np.array([[1], [2]], "i"), 0
        ),
        ((2, 3),) * 3,
    ),
    "contrastive": Case(lambda x, y: F.contrastive(x, y, ints(0, 1, 1)), ((3, 4), (3, 4))),
    "convolution_1d": Case(F.convolution_1d, ((2, 3, 6), (2, 3, 3), (2,))),
    "convolution_2d": Case(F.convolution_2d, (*IMAGE, (2, 3, 3, 3), (2,))),
    "convolution_3d": Case(F.convolution_3d, (*VOLUME, (2, 2, 3, 3, 3), (2,))),
    "convolution_nd": Case(F.convolution_nd, (*IMAGE, (2, 3, 3, 3), (2,))),
    "copy": Case(lambda x: F.copy(x, -1)),
    "crf1d": Case(
        lambda c, x, y: F.crf1d(c, [x, y], [ints(0, 1), ints(2, 0)]), ((3, 3), (2, 3), (2, 3))
    ),
    "cross_covariance": Case(F.cross_covariance, ((4, 2), (4, 3))),
    "deconvolution_1d": Case(F.deconvolution_1d, ((2, 3, 4), (3, 2, 3), (2,))),
    "deconvolution_2d": Case(F.deconvolution_2d, (*IMAGE, (3, 2, 3, 3), (2,))),
    "deconvolution_3d": Case(F.deconvolution_3d, (*VOLUME, (2, 2, 2, 2, 2), (2,))),
    "deconvolution_nd": Case(F.deconvolution_nd, (*IMAGE, (3, 2, 3, 3), (2,))),
    "decorrelated_batch_normalization": Case(whitened, ((8, 3),), only=UP_TO_32),
    "decov": Case(F.decov, ((4, 3),)),
    "deformable_convolution_2d_sampler": Case(
        F.deformable_convolution_2d_sampler, ((1, 2, 4, 4), (1, 18, 2, 2), (2, 2, 3, 3), (2,))
    ),
    "depth2space": Case(lambda x: F.depth2space(x, 2), ((1, 8, 2, 2),)),
    "depthwise_convolution_2d": Case(F.depthwise_convolution_2d, (*IMAGE, (2, 3, 3, 3), (6,))),
    "det": Case(F.det, ((3, 3),), 0.1, 2, tolerance=UNSTABLE),
    "dilated_convolution_2d": Case(
        lambda x, w, b: F.dilated_convolution_2d(x, w, b, dilate=2), (*IMAGE, (2, 3, 2, 2), (2,))
    ),
    "discriminative_margin_based_clustering_loss": Case(
        lambda x: F.discriminative_margin_based_clustering_loss(
            x, np.arange(48).reshape(3, 4, 4).astype("i") % 4, 0.1, 0.5, 3
        ),
        ((3, 3, 4, 4),),
    ),
    "dstack": Case(lambda x, y: F.dstack((x, y)), ((3, 4), (3, 4))),
    "einsum": Case(lambda x, y: F.einsum("ij,kj->ik", x, y), ((3, 4), (2, 4))),
    "embed_id": Case(lambda w: F.embed_id(ints(0, 2, 2), w)),
    "erfcinv": unary("erfcinv", 0.2, 1.8),
    "erfinv": unary("erfinv"),
    "expand_dims": Case(lambda x: F.expand_dims(x, 1)),
    "f1_score": Case(lambda y: F.f1_score(*judged(y))[0], gradient=False),
    "fft": Case(lambda x, y: F.fft((x, y)), ((3, 4), (3, 4))),
    "fixed_batch_normalization": Case(
        lambda x, g, b, m, v: F.fixed_batch_normalization(x, g, b, m, v),
        STATISTICS,
        0.2,
        0.9,
        parameters=(1, 2, 3, 4),
    ),
    "fixed_batch_renormalization": Case(
        lambda x, g, b, m, v: F.fixed_batch_renormalization(x, g, b, m, v),
        STATISTICS,
        0.2,
        0.9,
        parameters=(1, 2, 3, 4),
    ),
    "fixed_decorrelated_batch_normalization": Case(whitened_fixed, ((4, 3),)),
    "flip": Case(lambda x: F.flip(x, 1)),
    "fmod": Case(F.fmod, ((3, 4), (3, 4)), 0.1),
    "forget": Case(lambda x: F.forget(F.tanh, x)),
    "gaussian": Case(F.gaussian, ((3, 4), (3, 4))),
    "gaussian_kl_divergence": Case(F.gaussian_kl_divergence, ((3, 4), (3, 4))),
    "gaussian_nll": Case(F.gaussian_nll, ((3, 4), (3, 4), (3, 4))),
    "get_item": Case(lambda x: F.get_item(x, (slice(None), [0, 2, 2]))),
    "group_normalization": Case(
        lambda x, g, b: F.group_normalization(x, 2, g, b),
        ((2, 4, 3), (4,), (4,)),
        parameters=(1, 2),
        tolerance=UNSTABLE,
    ),
    "gumbel_softmax": Case(F.gumbel_softmax),
    "hinge": Case(lambda x: F.hinge(x, ints(0, 2, 1))),
    "hstack": Case(lambda x, y: F.hstack((x, y)), ((3, 4), (3, 2))),
    "huber_loss": Case(lambda x, y: F.huber_loss(x, y, 0.5), ((3, 4), (3, 4))),
    "ifft": Case(lambda x, y: F.ifft((x, y)), ((3, 4), (3, 4))),
    "im2col": Case(lambda x: F.im2col(x, 3), IMAGE),
    "inv": Case(lambda x: F.inv(x + np.eye(3).astype(x.dtype) * 3), ((3, 3),)),
    "layer_normalization": Case(F.layer_normalization, NORMALISED, tolerance=UNSTABLE),
    "linear": Case(F.linear, ((3, 4), (2, 4), (2,))),
    "linear_interpolate": Case(F.linear_interpolate, ((3, 4),) * 3),
    "local_convolution_2d": Case(
        F.local_convolution_2d, ((2, 2, 3, 3), (2, 2, 2, 2, 2, 2), (2, 2, 2))
    ),
    "local_response_normalization": Case(F.local_response_normalization, IMAGE),
    "log": unary("log", 0.1, 2),
    "log10": unary("log10", 0.1, 2),
    "log1p": unary("log1p", -0.5, 2),
    "log2": unary("log2", 0.1, 2),
    "lgamma": unary("lgamma", 0.5, 3),
    "digamma": unary("digamma", 0.5, 3),
    "lstm": Case(F.lstm, ((3, 2), (3, 8))),
    "matmul": Case(F.matmul, ((3, 4), (4, 2))),
    "max_pooling_1d": Case(lambda x: F.max_pooling_1d(x, 2), ((2, 3, 6),)),
    "max_pooling_2d": Case(lambda x: F.max_pooling_2d(x, 2), IMAGE),
    "max_pooling_3d": Case(lambda x: F.max_pooling_3d(x, 2), VOLUME),
    "max_pooling_nd": Case(lambda x: F.max_pooling_nd(x, 2), IMAGE),
    "maximum": Case(F.maximum, ((3, 4), (3, 4))),
    "maxout": Case(lambda x: F.maxout(x, 2)),
    "mean_absolute_error": Case(F.mean_absolute_error, ((3, 4), (3, 4))),
    "mean_squared_error": Case(F.mean_squared_error, ((3, 4), (3, 4))),
    "minimum": Case(F.minimum, ((3, 4), (3, 4))),
    "moveaxis": Case(lambda x: F.moveaxis(x, 0, 1)),
    "n_step_bigru": recurrent("n_step_bigru", 3, True, False),
    "n_step_bilstm": recurrent("n_step_bilstm", 4, True, True),
    "n_step_birnn": recurrent("n_step_birnn", 1, True, False),
    "n_step_gru": recurrent("n_step_gru", 3, False, False),
    "n_step_lstm": recurrent("n_step_lstm", 4, False, True),
    "n_step_rnn": recurrent("n_step_rnn", 1, False, False),
    "ndtri": unary("ndtri", 0.1),
    "negative_sampling": Case(
        lambda x, w: F.negative_sampling(x, ints(0, 1, 2, 1), w, lambda shape: TIED.copy(), 1),
        ((4, 3), (3, 3)),
    ),
    "normalize": Case(F.normalize, tolerance=UNSTABLE),
    "pad": Case(lambda x: F.pad(x, 1, "constant")),
    "pad_sequence": Case(lambda x, y: F.pad_sequence([x, y], padding=-1), ((3, 2), (2, 2))),
    "permutate": Case(lambda x: F.permutate(x, ints(2, 0, 1))),
    "polygamma": Case(lambda x: F.polygamma(ints(1), x), ((3, 4),), 0.5, 3),
    "precision": Case(lambda y: F.precision(*judged(y))[0], gradient=False),
    "prelu": Case(F.prelu, ((3, 4), (4,))),
    "r2_score": Case(lambda x, y: F.r2_score(x, y), ((4,), (4,)), gradient=False),
    "recall": Case(lambda y: F.recall(*judged(y))[0], gradient=False),
    "repeat": Case(lambda x: F.repeat(x, 2, 1)),
    "reshape": Case(lambda x: F.reshape(x, (2, 6))),
    "resize_images": Case(lambda x: F.resize_images(x, (7, 3)), IMAGE, only=SINGLE),
    "roi_average_align_2d": Case(
        lambda x: F.roi_average_align_2d(*boxes(x), 2, 1.0, 2), ((2, 1, 8, 8),), only=SINGLE
    ),
    "roi_average_pooling_2d": Case(
        lambda x: F.roi_average_pooling_2d(*boxes(x), 2, 1.0), ((2, 1, 8, 8),)
    ),
    "roi_max_align_2d": Case(
        lambda x: F.roi_max_align_2d(*boxes(x), 2, 1.0, 2), ((2, 1, 8, 8),), only=SINGLE
    ),
    "roi_max_pooling_2d": Case(lambda x: F.roi_max_pooling_2d(*boxes(x), 2, 1.0), ((2, 1, 8, 8),)),
    "roi_pooling_2d": Case(
        lambda x: F.roi_pooling_2d(
            x, np.array([[0, 0, 0, 5, 6], [1, 1, 0, 6, 4]], x.dtype), 2, 2, 1.0
        ),
        ((2, 1, 8, 8),),
    ),
    "rollaxis": Case(lambda x: F.rollaxis(x, 1)),
    "rsqrt": unary("rsqrt", 0.2, 2),
    "scale": Case(lambda x, y: F.scale(x, y, axis=1), ((3, 4), (4,))),
    "scatter_add": Case(
        lambda x, b: F.scatter_add(x, (slice(None), [0, 2, 2]), b), ((3, 4), (3, 3))
    ),
    "select_item": Case(lambda x: F.select_item(x, ints(0, 2, 1))),
    "separate": Case(lambda x: F.separate(x)),
    "shift": Case(lambda x: F.shift(x, ksize=3), ((2, 9, 3, 3),)),
    "sigmoid_cross_entropy": Case(
        lambda x: F.sigmoid_cross_entropy(x, (ints(*range(12)) % 2).reshape(3, 4))
    ),
    "simplified_dropconnect": Case(
        lambda x, w, b: F.simplified_dropconnect(x, w, b), ((3, 4), (2, 4), (2,))
    ),
    "slstm": Case(F.slstm, ((3, 2), (3, 2), (3, 8), (3, 8))),
    "softmax_cross_entropy": Case(lambda x: F.softmax_cross_entropy(x, ints(0, 2, 1))),
    "space2depth": Case(lambda x: F.space2depth(x, 2), ((1, 2, 4, 4),)),
    "sparse_matmul": Case(sparse, ((5,), (4, 2))),
    "spatial_pyramid_pooling_2d": Case(
        lambda x: F.spatial_pyramid_pooling_2d(x, 2, pooling="max"), IMAGE
    ),
    "spatial_transformer_grid": Case(lambda t: F.spatial_transformer_grid(t, (3, 4)), ((2, 2, 3),)),
    "spatial_transformer_sampler": Case(
        F.spatial_transformer_sampler, ((2, 1, 4, 4), (2, 2, 3, 3)), tolerance=UNSTABLE
    ),
    "split_axis": Case(lambda x: F.split_axis(x, 2, 1)),
    "sqrt": unary("sqrt", 0.2, 2),
    "squared_difference": Case(F.squared_difference, ((3, 4), (3, 4))),
    "squared_error": Case(F.squared_error, ((3, 4), (3, 4))),
    "squeeze": Case(F.squeeze, ((3, 1, 4),)),
    "stack": Case(lambda x, y: F.stack((x, y)), ((3, 4), (3, 4))),
    "sum_to": Case(lambda x: F.sum_to(x, (1, 4))),
    "swapaxes": Case(lambda x: F.swapaxes(x, 0, 1)),
    "swish": Case(F.swish, ((3, 4), (4,))),
    "tensordot": Case(lambda x, y: F.tensordot(x, y, 1), ((3, 4), (4, 2))),
    "tile": Case(lambda x: F.tile(x, (2, 1))),
    "transpose_sequence": Case(lambda x, y: F.transpose_sequence([x, y]), ((3, 2), (2, 2))),
    "tree_lstm": Case(lambda c, d, x: F.tree_lstm(c, d, x), ((3, 2), (3, 2), (3, 10))),
    "triplet": Case(lambda a, p, n: F.triplet(a, p, n, margin=3), ((3, 4),) * 3),
    "unpooling_1d": Case(lambda x: F.unpooling_1d(x, 2), ((2, 3, 4),)),
    "unpooling_2d": Case(lambda x: F.unpooling_2d(x, 2), IMAGE),
    "unpooling_3d": Case(lambda x: F.unpooling_3d(x, 2), VOLUME),
    "unpooling_nd": Case(lambda x: F.unpooling_nd(x, 2), IMAGE),
    "upsampling_2d": Case(
        lambda x: F.upsampling_2d(
            x, np.arange(8).reshape(1, 2, 2, 2).astype("i") % 4, 2, outsize=(4, 4)
        ),
        ((1, 2, 2, 2),),
    ),
    "vstack": Case(lambda x, y: F.vstack((x, y)), ((3, 4), (2, 4))),
    "where": Case(
        lambda x, y: F.where(np.arange(12).reshape(3, 4) % 2 == 0, x, y), ((3, 4), (3, 4))
    ),
    "zeta": Case(lambda q: F.zeta(np.full((3, 4), 2).astype(q.dtype), q), ((3, 4),), 0.5, 3),
    "zoneout": Case(F.zoneout, ((3, 4), (3, 4))),
}
