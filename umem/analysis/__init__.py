"""What a trace says: its peak and what is alive then, its operations, what outlives its step."""

from umem.analysis.analysing import analyse

__all__ = ["analyse"]
