"""Simulated time of Chainer's own Python, on a software GPU.

The software GPU sees the calls of CuPy, and counts a launch for each kernel. This reports to its
model, function by function, Chainer's work on the host around them, with the virtual GPU's times
(`umem._common.specs.Costs.python_forward` and its kin).
"""

from __future__ import annotations

from typing import Any

from umem.chainer.source import MarksBackward
from umem.chainer.tap import Proceed, subscribe
from umem.devices import cuda_model
from umem.trace.recording import thread_state


class PythonTime(MarksBackward):
    """Reports each function and update that Chainer ran to the current CUDA device's model."""

    place = 2

    def apply(self, proceed: Proceed, func: Any, inputs: Any) -> Any:
        """Count a call of a function, in forward or in backward."""
        outputs = proceed(func, inputs)
        _tell("backward" if thread_state().backward_depth else "forward")
        return outputs

    def update(self, proceed: Proceed, rule: Any, parameter: Any) -> None:
        """Count the update of a parameter."""
        proceed(rule, parameter)
        _tell("update")


def follow_python() -> None:
    """Count Chainer's Python from now on, if the process has a software GPU with a model."""
    model = cuda_model(0)
    if model is not None and model.resident_bytes is not None:
        subscribe(PythonTime())


def _tell(phase: str) -> None:
    model = cuda_model()
    if model is not None:
        model.host_worked(phase)
