"""Steps of models that were exported: what a file in ONNX says of a training step, without a run.

`onnx_step` is a step at one size, `step_over_batch` one that can be scaled along its batch, and
`halves_of` one with half of each of its dynamic axes; nothing else needs the package onnx, which is
imported when they are called.
"""

from umem.trace.exported.exported_sizes import halves_of, step_over_batch
from umem.trace.exported.exported_step import ExportedStep, onnx_step

__all__ = ["ExportedStep", "halves_of", "onnx_step", "step_over_batch"]
