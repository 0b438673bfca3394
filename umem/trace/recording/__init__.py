"""Recording: the instrumented sources, measured time and memory, and the store of events."""
