"""Distillation: a small network learns from what a large one gives."""
