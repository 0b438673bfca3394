"""Half precision: float16 where it saves memory, float32 where float16 would cost accuracy.

`half_precision` and `saved_in` are for users.

    half_precision.py  is `half_precision`
    terms.py           chooses the parameters to round, and casts the inputs of functions
    half_functions.py  lists which functions compute in float16, and which in float32
    halves.py          computes functions of NumPy's float16 arrays in float32
    floats.py          rounds arrays to float16
    masters.py         keeps float32 parameters, which the optimizer updates
    judged_updates.py  updates the masters, or skips the step if gradients are not finite
    loss_scale.py      is the dynamic loss scale, which can be saved
    saved_in.py        is `saved_in`: saved tensors in bfloat16, and nothing else
    words.py           encodes float32 as words of bfloat16, and decodes them

The tap reports computing functions as ``evaluate`` and ``compute``; for NumPy's
float16 `halves` computes instead.
"""
