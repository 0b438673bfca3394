"""Devices: a real GPU through CuPy, and the model of one."""
