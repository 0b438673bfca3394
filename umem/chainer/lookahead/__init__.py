"""Prefetch on Chainer's tape."""
