"""Recomputation by hand."""
