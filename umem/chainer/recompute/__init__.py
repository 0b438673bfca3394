"""Recomputation planned for a budget, on Chainer's own tape."""
