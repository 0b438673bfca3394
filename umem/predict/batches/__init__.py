"""The largest batch that fits, that of least time a sample, and the cost of scaled sizes."""
