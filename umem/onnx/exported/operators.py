"""Saved tensors and work of each ONNX operator: one table.

The saved tensors are those of Chainer's function of that meaning (``retain_inputs``,
``retain_outputs`` and arrays on the function itself), or, where Chainer has none, what the formula
of the derivative reads. Other frameworks keep the same tensors for most operators;
docs/reference/onnx.md says where PyTorch differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from umem._common.arithmetic import FLOAT16_PRODUCT, FLOAT32, FLOAT64, FLOAT64_PRODUCT
from umem.onnx.exported.onnx_graph import OnnxNode, TensorType
from umem.units import MIB

Types = Sequence[TensorType | None]
Work = Callable[[OnnxNode, Types, Types], int]
"""A function of a node and its inputs' and outputs' types that returns a count of operations or
bytes."""
CONVOLUTION_WORKSPACE_BYTES = 8 * MIB
"""cuDNN's workspace limit as Chainer sets it (``chainer.backends.cuda.set_max_workspace_size``)."""
Passes = Literal["new", "same", "none"]
"""The gradient of an input: a new array, the output's gradient, or none."""


@dataclass(frozen=True)
class Operator:
    """Saved tensors, workspace and operations of one ONNX operator.

    Attributes:
        source: the derivative, or the source of the rule.
        inputs: places of the inputs that backward reads.
        output: whether backward reads the first output.
        other: places of two inputs; each is kept only if the other has a gradient.
        stash: function state by name: bytes from the node and its types.
        flops: operations of forward, a multiply and an add being two; None: one an element.
        products: whether each gradient of an input costs as much as forward; otherwise all of
            backward does.
        workspace: bytes needed only while it runs, forward or backward.
        passes: the kind of its inputs' gradients; ``same``: the output's own array.
        view: whether the output is a view of the first input, if its shape allows it.
        elementwise: whether the output has the first input's memory layout.
        trained: the number of inputs that may have a gradient; None: all.
        statistics: places of inputs that are changed in place and not trained.
        gathers: whether it reads only as much of its first input as it writes.
    """

    source: str
    inputs: tuple[int, ...] = ()
    output: bool = False
    other: tuple[int, int] | None = None
    stash: Mapping[str, Work] = field(default_factory=dict)
    flops: Work | None = None
    products: bool = False
    workspace: Work | None = None
    passes: Passes = "new"
    view: bool = False
    elementwise: bool = False
    trained: int | None = None
    statistics: tuple[int, ...] = ()
    gathers: bool = False

    def kept_inputs(self, has_gradient: Sequence[bool]) -> tuple[int, ...]:
        """Return the places of inputs that backward reads, given which have a gradient."""
        found = [place for place in self.inputs if place < len(has_gradient)]
        if self.other is not None:
            first, second = self.other
            pairs = ((first, second), (second, first))
            found += [a for a, b in pairs if b < len(has_gradient) and has_gradient[b]]
        return tuple(sorted(set(found)))

    def arithmetic(self, made: TensorType) -> str:
        """Return the kind of its arithmetic, from the type of its output."""
        if not made.is_float:
            return FLOAT32
        if self.products:
            return {2: FLOAT16_PRODUCT, 8: FLOAT64_PRODUCT}.get(made.itemsize, FLOAT32)
        return FLOAT64 if made.itemsize == 8 else FLOAT32


# -- work ------------------------------------------------------------------------------------------


def _of(types: Types, place: int) -> TensorType:
    """Return a type, or an empty one for a missing input."""
    found = types[place] if place < len(types) else None
    return TensorType((0,), 0, False) if found is None else found


def _times(count: int) -> Work:
    return lambda node, ins, outs: count * _of(ins, 0).size


def _matmul(node: OnnxNode, ins: Types, outs: Types) -> int:
    return 2 * _of(outs, 0).size * (_of(ins, 0).shape[-1] if _of(ins, 0).shape else 1)


def _gemm(node: OnnxNode, ins: Types, outs: Types) -> int:
    axis = 0 if node.attributes.get("transA") else -1
    return 2 * _of(outs, 0).size * _of(ins, 0).shape[axis]


def _conv(node: OnnxNode, ins: Types, outs: Types) -> int:
    return 2 * _of(outs, 0).size * prod(_of(ins, 1).shape[1:])


def _conv_transpose(node: OnnxNode, ins: Types, outs: Types) -> int:
    return 2 * _of(ins, 0).size * prod(_of(ins, 1).shape[1:])


def _window(node: OnnxNode, ins: Types, outs: Types) -> int:
    return _of(outs, 0).size * int(prod(node.attributes.get("kernel_shape", (1,))))


def _columns(node: OnnxNode, ins: Types, outs: Types) -> int:
    """Return the bytes of a convolution's columns, at most cuDNN's limit."""
    x, weights = _of(ins, 0), _of(ins, 1)
    positions = prod(_of(outs, 0).shape[2:])
    columns = x.shape[0] * x.shape[1] * prod(weights.shape[2:]) * positions * x.itemsize
    return min(int(columns), CONVOLUTION_WORKSPACE_BYTES)


def _einsum(node: OnnxNode, ins: Types, outs: Types) -> int:
    """Return two operations for each combination of all terms' letters."""
    terms = str(node.attributes.get("equation", "")).replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, found in zip(terms, ins, strict=False):
        letters = [letter for letter in term if letter.isalpha()]
        if found is not None:
            sizes.update(zip(reversed(letters), reversed(found.shape), strict=False))
    total: int = prod(sizes.values())
    return 2 * total


def _recurrent(node: OnnxNode, ins: Types, outs: Types) -> int:
    """Return the operations of all gates' products with input and previous state, for all steps."""
    x, weights, states = _of(ins, 0), _of(ins, 1), _of(ins, 2)
    rows = prod(x.shape[:2]) * prod(weights.shape[:2])
    return 2 * rows * (weights.shape[2] + states.shape[2])


def _gates(count: int) -> Work:
    """Return the bytes of a number of values for each step, sample, direction and unit."""

    def kept(node: OnnxNode, ins: Types, outs: Types) -> int:
        x, states = _of(ins, 0), _of(ins, 2)
        rows = x.shape[0] * x.shape[1] * states.shape[0]
        return count * rows * states.shape[2] * x.itemsize

    return kept


# -- function state --------------------------------------------------------------------------------


def _like_input(node: OnnxNode, ins: Types, outs: Types) -> int:
    return _of(ins, 0).nbytes


def _channels(node: OnnxNode, ins: Types, outs: Types) -> int:
    """Return the bytes of one number a channel, in the parameters' type."""
    return _of(ins, 1).nbytes


def _indexes(node: OnnxNode, ins: Types, outs: Types) -> int:
    """Return the bytes of one int32 for each output element."""
    return 4 * _of(outs, 0).size


def _rows(node: OnnxNode, ins: Types, outs: Types) -> int:
    """Return the bytes of one number for each normalised run of axes, from ``axis`` on."""
    x = _of(ins, 0)
    axis = int(node.attributes.get("axis", -1))
    return prod(x.shape[:axis]) * x.itemsize


def _groups(node: OnnxNode, ins: Types, outs: Types) -> int:
    """Return the bytes of one number for each sample and group of channels."""
    x = _of(ins, 0)
    count = int(node.attributes.get("num_groups", x.shape[1]))
    return x.shape[0] * count * x.itemsize


# -- the table -------------------------------------------------------------------------------------


def _by_output(derivative: str, **more: Any) -> Operator:
    return Operator(derivative, output=True, elementwise=True, **more)


def _by_input(derivative: str, **more: Any) -> Operator:
    return Operator(derivative, inputs=(0,), elementwise=True, **more)


_VIEW = Operator("gx = gy in x's shape", passes="same", view=True, trained=1)
_NO_GRADIENT = Operator("the derivative is zero or there is none", passes="none")
_NORMALISED: dict[str, Work] = {"mean": _groups, "inv_std": _groups}

OPERATORS: dict[str, Operator] = {
    # By the output.
    "Relu": _by_output("gx = gy * (y > 0)"),
    "LeakyRelu": _by_output("gx = gy or alpha gy, by the sign of y"),
    "Elu": _by_output("gx = gy or (y + alpha) gy, by the sign of y"),
    "Selu": _by_output("gx = scale gy or (y + scale alpha) gy, by the sign of y"),
    "Sigmoid": _by_output("gx = gy y (1 - y)"),
    "Tanh": _by_output("gx = gy (1 - y^2)"),
    "Exp": _by_output("gx = gy y"),
    "Sqrt": _by_output("gx = gy / 2y"),
    "Softmax": _by_output("gx = y (gy - sum(gy y))", flops=_times(5)),
    "LogSoftmax": _by_output("gx = gy - exp(y) sum(gy)", flops=_times(5)),
    # By the input.
    **{
        name: _by_input(derivative)
        for name, derivative in {
            "Abs": "gx = gy sign(x)",
            "Acos": "gx = -gy / sqrt(1 - x^2)",
            "Acosh": "gx = gy / sqrt(x^2 - 1)",
            "Asin": "gx = gy / sqrt(1 - x^2)",
            "Asinh": "gx = gy / sqrt(x^2 + 1)",
            "Atan": "gx = gy / (1 + x^2)",
            "Atanh": "gx = gy / (1 - x^2)",
            "Celu": "gx = gy min(1, exp(x / alpha))",
            "Cos": "gx = -gy sin(x)",
            "Cosh": "gx = gy sinh(x)",
            "Erf": "gx = gy 2 exp(-x^2) / sqrt(pi)",
            "Gelu": "gx = gy (cdf(x) + x pdf(x)) of the normal distribution",
            "HardSigmoid": "gx = alpha gy where the line is not cut off",
            "HardSwish": "gx = gy (2x + 3) / 6 where the line is not cut off",
            "Log": "gx = gy / x",
            "Mish": "gx by tanh(softplus(x)), which is recomputed",
            "Reciprocal": "gx = -gy / x^2; Chainer, DivFromConstant: retain_inputs((0,))",
            "Shrink": "gx = gy where x is not cut off",
            "Sin": "gx = gy cos(x)",
            "Sinh": "gx = gy cosh(x)",
            "Softplus": "gx = gy sigmoid(x)",
            "Softsign": "gx = gy / (1 + |x|)^2",
            "Swish": "gx by sigmoid(x), which is recomputed",
            "Tan": "gx = gy / cos(x)^2",
            "ThresholdedRelu": "gx = gy (x > alpha)",
        }.items()
    },
    "Clip": _by_input("gx = gy where x is within", trained=1),
    "Pow": Operator("gx = gy p x^(p-1)", inputs=(0, 1), elementwise=True, trained=1),
    # Of several inputs.
    "Add": Operator("gx = gy, summed over what was broadcast", passes="same", elementwise=True),
    "Sub": Operator("ga = gy, gb = -gy", passes="same", elementwise=True),
    "Sum": Operator("gx = gy", passes="same", elementwise=True),
    "Mean": Operator("gx = gy / n", elementwise=True),
    "Mul": Operator("ga = gy b, gb = gy a", other=(0, 1), elementwise=True),
    "Div": Operator("ga = gy / b, gb = -gy a / b^2", inputs=(1,), other=(0, 1), elementwise=True),
    "Max": Operator("gx = gy where x is y", inputs=(0, 1), elementwise=True),
    "Min": Operator("gx = gy where x is y", inputs=(0, 1), elementwise=True),
    "PRelu": Operator("gx = gy or w gy, by the sign of x", inputs=(0, 1), elementwise=True),
    "Where": Operator("gx = gy where the condition says so", inputs=(0,), elementwise=True),
    "MatMul": Operator("ga = gy b', gb = a' gy", other=(0, 1), flops=_matmul, products=True),
    "Gemm": Operator("gx = gy W, gW = gy' x, gb = sum(gy)", other=(0, 1), flops=_gemm,
                     products=True),
    "Einsum": Operator("the same sum with gy in the place of the other term", inputs=(0, 1),
                       flops=_einsum, products=True),
    # Convolutions and pooling.
    "Conv": Operator("gx = gy * W transposed, gW = x * gy", other=(0, 1), flops=_conv,
                     products=True, workspace=_columns),
    "ConvTranspose": Operator("gx = gy * W, gW = gy * x", other=(0, 1), flops=_conv_transpose,
                              products=True, workspace=_columns),
    "MaxPool": Operator("gx by the places of the largest; Chainer, MaxPoolingND.indexes, int32 on "
                        "CuPy", stash={"indexes": _indexes}, flops=_window),
    "AveragePool": Operator("gx = gy / n, added up over windows", flops=_window),
    "LpPool": Operator("gx = gy (x / y)^(p-1)", inputs=(0,), output=True, flops=_window),
    "GlobalAveragePool": Operator("gx = gy / n", flops=_times(1)),
    "GlobalMaxPool": Operator("gx by the places of the largest", stash={"indexes": _indexes},
                              flops=_times(1)),
    # Normalisation.
    "BatchNormalization": Operator(
        "Ioffe and Szegedy, 2015; Chainer, BatchNormalization: retain_inputs((0, 1)), mean, var, "
        "inv_std", inputs=(0, 1), elementwise=True, flops=_times(8), trained=3, statistics=(3, 4),
        stash={"mean": _channels, "var": _channels, "inv_std": _channels}),
    "InstanceNormalization": Operator("as GroupNormalization, a channel a group", inputs=(0, 1),
                                      flops=_times(8), stash=_NORMALISED),
    "GroupNormalization": Operator("Wu and He, 2018; Chainer, GroupNormalization: mean, inv_std",
                                   inputs=(0, 1), flops=_times(8), stash=_NORMALISED),
    "LayerNormalization": Operator("Ba et al., 2016; x, gamma and two numbers a row",
                                   inputs=(0, 1), flops=_times(8),
                                   stash={"mean": _rows, "inv_std": _rows}),
    "RMSNormalization": Operator("Zhang and Sennrich, 2019; x, gamma and one number a row",
                                 inputs=(0, 1), flops=_times(6), stash={"inv_std": _rows}),
    "LRN": Operator("Chainer, LocalResponseNormalization on CuPy: x, y, scale", inputs=(0,),
                    output=True, flops=_times(8), stash={"scale": _like_input}),
    "LpNormalization": _by_input("Chainer, NormalizeL2: retain_inputs((0,))", flops=_times(4)),
    # Drawn, looked up, recurrent.
    "Dropout": Operator("gx = gy mask; Chainer, Dropout.mask, as large as x",
                        stash={"mask": _like_input}, trained=1, elementwise=True),
    "Gather": Operator("gW: gy added up at the indexes", inputs=(1,), gathers=True, trained=1),
    "GatherElements": Operator("gx: gy added up at the indexes", inputs=(1,), gathers=True,
                               trained=1),
    "GatherND": Operator("gx: gy added up at the indexes", inputs=(1,), gathers=True, trained=1),
    "LSTM": Operator("Hochreiter and Schmidhuber, 1997: four gates and the cell of each step",
                     inputs=(0, 1, 2), output=True, flops=_recurrent, products=True,
                     stash={"gates": _gates(5)}),
    "GRU": Operator("Cho et al., 2014: three gates and a product of each step", inputs=(0, 1, 2),
                    output=True, flops=_recurrent, products=True, stash={"gates": _gates(4)}),
    "RNN": Operator("Elman, 1990: the states are the output", inputs=(0, 1, 2), output=True,
                    flops=_recurrent, products=True),
    # Sums.
    "ReduceSum": Operator("gx = gy, broadcast", passes="same", trained=1, flops=_times(1)),
    "ReduceLogSum": Operator("gx = gy exp(-y)", output=True, trained=1, flops=_times(1)),
    "CumSum": Operator("gx = the sum of gy from the other end", trained=1, flops=_times(1)),
    "ReduceMean": Operator("gx = gy / n, broadcast", passes="same", trained=1, flops=_times(1)),
    **{
        name: Operator(derivative, inputs=(0,), output=keeps, trained=1, flops=_times(1))
        for name, derivative, keeps in (
            ("ReduceL1", "gx = gy sign(x)", False),
            ("ReduceL2", "gx = gy x / y", True),
            ("ReduceLogSumExp", "gx = gy exp(x - y)", True),
            ("ReduceMax", "gx = gy where x is y", True),
            ("ReduceMin", "gx = gy where x is y", True),
            ("ReduceProd", "gx by the products of all others", False),
            ("ReduceSumSquare", "gx = 2 gy x", False),
        )
    },
    # Losses.
    "SoftmaxCrossEntropyLoss": Operator("gx = (softmax(x) - t) gy; Chainer, SoftmaxCrossEntropy: "
                                        "x, t and softmax(x)", inputs=(0, 1), trained=1,
                                        stash={"y": _like_input}, flops=_times(6)),
    "NegativeLogLikelihoodLoss": Operator("gx = -gy at the labels", inputs=(1,), trained=1),
    # Where elements go.
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Identity"), _VIEW),
    "Cast": Operator("gx = gy in x's type", trained=1, elementwise=True),
    "Expand": Operator("gx = gy summed over what was broadcast", view=True, trained=1),
    "Slice": Operator("gx: zeros, and gy in its place", view=True, trained=1),
    "Split": Operator("gx: the gradients of all parts in one array", view=True, trained=1),
    "Concat": Operator("gx: parts of gy", passes="same"),
    "Neg": Operator("gx = -gy", elementwise=True),
    **{
        name: Operator("gx: elements of gy, moved or added up", trained=1)
        for name in (
            "DepthToSpace", "Pad", "Resize", "ReverseSequence", "SpaceToDepth", "Tile", "Trilu",
            "Upsample",
        )
    },
    "GridSample": Operator("gx: gy spread over the four nearest; ggrid by their differences",
                           inputs=(0, 1), gathers=True),
    "DFT": Operator("gx: the transform of gy, the other way round", trained=1),
    "ScatterElements": Operator("gx: gy and zeros at the indexes; gu: gy there", inputs=(1,)),
    "ScatterND": Operator("gx: gy and zeros at the indexes; gu: gy there", inputs=(1,)),
    "TopK": Operator("gx: gy at the indexes", stash={"indexes": _indexes}, trained=1),
    # Without a gradient.
    **dict.fromkeys(
        (
            "And", "ArgMax", "ArgMin", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr",
            "BitwiseXor", "Ceil", "Constant", "ConstantOfShape", "Equal",
            "EyeLike", "Floor", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less",
            "LessOrEqual", "Mod", "NonZero", "Not", "OneHot", "Or", "RandomNormal",
            "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Range", "Round", "Shape",
            "Sign", "Size", "Xor",
        ),
        _NO_GRADIENT,
    ),
}  # fmt: skip
"""The known operators of ONNX's own domain, by name."""
