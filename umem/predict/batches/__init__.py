"""The batch that fits, the one of least time a sample, and what more of a size costs."""
