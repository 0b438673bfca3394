"""What a trace says: its peak and what is alive then, its operations, what outlives its step."""

from umem.trace.analysis.analysis import analyse

__all__ = ["analyse"]
