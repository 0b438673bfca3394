"""Models of any framework, exported to ONNX: their steps as traces, and what makes them fit a GPU.

Nothing is run, and Chainer is not needed. The package onnx is imported when a file is read.
"""

from umem.onnx.exported.exported_step import ExportedStep, graph_of, onnx_step

__all__ = ["ExportedStep", "graph_of", "onnx_step"]
