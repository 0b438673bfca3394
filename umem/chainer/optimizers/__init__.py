"""Optimizers whose states take a byte a value instead of four.

`Adam8bit`, `AdamW8bit` and `MomentumSGD8bit` are for users.

    eight_bit.py        has the three optimizers
    rules.py            has Chainer's update rules with another state
    state_policy.py     chooses the states that have 8 bits, and their memory
    quantized_state.py  is a state in blocks: a byte for each value, a float32 for the block
    dynamic_map.py      has the 256 values of a byte
    steps.py            has the constants of one update, in float32
    paths/              has the three ways to update: NumPy, Numba and CuPy
    converting.py       converts an optimizer that is set up, to 8 bits and back
    saving.py           saves and loads such states by Chainer's serializers

All three paths give the same bits.
"""

from umem.chainer.optimizers.converting import dequantize_states, quantize_states
from umem.chainer.optimizers.eight_bit import Adam8bit, AdamW8bit, MomentumSGD8bit

__all__ = ["Adam8bit", "AdamW8bit", "MomentumSGD8bit", "dequantize_states", "quantize_states"]
