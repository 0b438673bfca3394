"""NVIDIA's libraries by NumPy and SciPy, each by the names that CuPy calls it by."""
