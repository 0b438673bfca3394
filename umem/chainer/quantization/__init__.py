"""Models in 8 or 4 bits: conversion, training for it, and files.

`quantize`, `quantization_aware`, `save_quantized` and `load_quantized` are for users.

    quantizing.py           is `quantize`
    aware.py                is `quantization_aware`
    scheme.py               quantises numbers to codes
    integer_products.py     multiplies codes exactly, by float32
    quantized_weight.py     is a weight in few bits, which layers may share
    quantized_links.py      has the links for inference
    aware_links.py          has the links for training
    calibration.py          records input ranges on examples
    exchanging.py           copies a model with some links replaced
    quantized_file.py       saves and loads such a model, by safetensors
    quantization_report.py  reports bytes before and after, and the layers that stay in floats
"""
