"""NVIDIA's libraries with NumPy and SciPy, under the names that CuPy calls."""
