"""Serves the process in the memory mode that UMEM_MODE names, from its import on."""

import umem

umem.enable()
