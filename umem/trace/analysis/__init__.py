"""The figures of a trace: its peak, what is alive then, its operations, what outlives its step."""

from umem.trace.analysis.analysis import analyse

__all__ = ["analyse"]
