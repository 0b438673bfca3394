"""The common ground of all rooms: files, locks, scopes of a thread, printing, the table of GPUs.

Its modules are imported as such. They import one another, `umem.errors` and `umem.units`.
"""
