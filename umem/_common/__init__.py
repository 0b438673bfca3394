"""The common ground of all rooms: files, locks, the host, the table of GPUs.

Its modules are imported as such. They import one another, `umem.errors` and `umem.units`.
"""
