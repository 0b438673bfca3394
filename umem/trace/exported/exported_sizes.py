"""Steps of an exported model at several sizes: what scales with the batch, and half of each axis.

Nothing is fitted that the model says: its shapes are inferred anew at each size.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike

from umem.errors import OnnxError, ScalingError
from umem.printable import quoted
from umem.trace.exported.exported_step import onnx_step
from umem.trace.exported.onnx_reading import dynamic_axes
from umem.trace.exported.updates import OptimizerName
from umem.trace.trace import Trace

Sizes = Mapping[str, int]
BATCH = "batch"
FIRST = 4
"""Batch of the step if none is given."""


def batch_axis(path: str | PathLike[str]) -> str | None:
    """Return the name of the batch axis: the first dynamic axis of the first input that has one.

    None where no first axis is dynamic.
    """
    axes = dynamic_axes(path)
    return next((name for name, places in axes.items() if places[0].endswith("[0]")), None)


def step_over_batch(
    path: str | PathLike[str], sizes: Sizes | None = None, optimizer: OptimizerName = "adam"
) -> Trace:
    """Make a model's training step at two batches, so that it can be scaled along ``"batch"``.

    Scaled steps are right near the batch that is given: workspace is capped, and grows with small
    batches only.

    Args:
        path: the model.
        sizes: of its dynamic axes; that of the batch may be missing, and is 4 then.
        optimizer: whose state is counted.

    Raises:
        OnnxError: see `onnx_step`; a model whose batch is fixed, or whose graph is only right for
            one batch. Names why.
    """
    name = batch_axis(path)
    if name is None:
        raise OnnxError(
            "the model has a fixed batch: no input has a dynamic first axis. Export it with one, "
            'such as torch.onnx.export(..., dynamic_axes={"x": {0: "batch"}})'
        )
    given = dict(sizes or {})
    most = max(2, given.get(name, FIRST))
    points = [{BATCH: size} for size in (-(-most // 2), most)]
    traces = [_at(path, {**given, name: point[BATCH]}, optimizer) for point in points]
    try:
        return Trace.join(traces, points)
    except ScalingError as error:
        raise OnnxError(
            f"the model does not do the same at two sizes of {quoted(name)}: {error}"
        ) from error


def halves_of(
    path: str | PathLike[str], sizes: Sizes, optimizer: OptimizerName = "adam"
) -> tuple[Trace, dict[str, Trace], dict[str, int]]:
    """Return a step, the step with each dynamic axis but the batch halved, and the axes' sizes.

    The batch is called so whatever the model calls it; along it all of them can be scaled.

    Raises:
        OnnxError: see `onnx_step`; nothing of the model is dynamic.
    """
    axes = dynamic_axes(path)
    name = batch_axis(path)
    if not axes:
        raise OnnxError(
            "no axis of the model's inputs is dynamic, so that there is nothing to halve: export "
            'it with dynamic axes, such as dynamic_axes={"x": {0: "batch", 1: "length"}}'
        )

    def step(given: Sizes) -> Trace:
        if name is None:
            return onnx_step(path, given, optimizer).trace
        return step_over_batch(path, given, optimizer)

    whole = step(sizes)
    others = [axis for axis in axes if axis in sizes and axis != name and sizes[axis] > 1]
    halves = {axis: step({**sizes, axis: -(-sizes[axis] // 2)}) for axis in others}
    now = {BATCH if axis == name else axis: size for axis, size in sizes.items()}
    return whole, halves, {axis: now[axis] for axis in now if axis == BATCH or axis in halves}


def _at(path: str | PathLike[str], sizes: Sizes, optimizer: OptimizerName) -> Trace:
    return onnx_step(path, sizes, optimizer).trace
