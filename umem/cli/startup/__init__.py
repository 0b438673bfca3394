"""The folder that ``umem run`` puts on the path of the processes that a script starts."""
