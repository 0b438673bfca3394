"""Batches in parts, with one update and the gradient of the whole batch."""
