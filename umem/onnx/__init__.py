"""Models exported to ONNX from any framework: their steps as traces, and ways to fit a GPU.

Only ``umem choose MODEL.onnx`` uses this package. It runs no model and does not need Chainer. The
package onnx is imported when a file is read.

    exported/  makes the trace of a step from a file
    fitting/   tries ways to make that step fit a GPU
"""

from typing import TYPE_CHECKING

from umem.onnx.exported.exported_step import ExportedStep, graph_of, onnx_step

__all__ = ["ExportedStep", "graph_of", "onnx_step"]

if TYPE_CHECKING:
    from umem.onnx.exported.onnx_inference import inferred
    from umem.onnx.exported.onnx_reading import dims_of, is_fixed, read_onnx
    from umem.onnx.exported.operators import OPERATORS
    from umem.onnx.exported.strides import packed, reshaped
    from umem.onnx.exported.tape_backward import OPTIMIZERS
    from umem.onnx.fitting.applying import apply
    from umem.onnx.fitting.model_choice import ModelChoice, ModelOption, choose_for_model
    from umem.onnx.fitting.offloading import all_offloaded, link_of, op_seconds
    from umem.onnx.fitting.steady_step import STEPS, repeated
    from umem.onnx.fitting.step_problem import problem_of
else:
    from umem._common.faces import face

    _, __getattr__ = face(
        __name__,
        exported__onnx_inference="inferred",
        exported__onnx_reading="dims_of is_fixed read_onnx",
        exported__operators="OPERATORS",
        exported__strides="packed reshaped",
        exported__tape_backward="OPTIMIZERS",
        fitting__applying="apply",
        fitting__model_choice="ModelChoice ModelOption choose_for_model",
        fitting__offloading="all_offloaded link_of op_seconds",
        fitting__steady_step="STEPS repeated",
        fitting__step_problem="problem_of",
    )
