"""Recording: whom to ask, what to measure, what to keep, where to write it."""
