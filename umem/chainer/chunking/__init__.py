"""Convolutions and poolings under a cap on their workspace."""
