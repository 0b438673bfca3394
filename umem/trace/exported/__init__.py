"""Steps of models that were exported: what a file in ONNX says of a training step, without a run.

`onnx_step` is all of it; nothing else needs the package onnx, which is imported when it is called.
"""

from umem.trace.exported.exported_step import ExportedStep, onnx_step

__all__ = ["ExportedStep", "onnx_step"]
