"""Optimizers whose states take a byte a value instead of four."""

from umem.chainer.optimizers.converting import dequantize_states, quantize_states
from umem.chainer.optimizers.eight_bit import Adam8bit, AdamW8bit, MomentumSGD8bit

__all__ = ["Adam8bit", "AdamW8bit", "MomentumSGD8bit", "dequantize_states", "quantize_states"]
