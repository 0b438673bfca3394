"""Steps of exported models, derived from an ONNX file without a run.

`umem.onnx.onnx_step` and `umem.onnx.graph_of` are defined here, and `umem.onnx.fitting` plans on
the result. A file is read, converted to plain numbers, and turned into the events that a recorder
would have seen.

    exported_step.py     is `onnx_step`: it writes forward, and assembles the trace
    onnx_reading.py      reads and checks a file
    onnx_weights.py      collects initialisers and constants, with the contents of small ones
    onnx_functions.py    inlines a model's functions
    onnx_inference.py    infers shapes node by node, with ONNX
    onnx_lowering.py     lowers branches whose condition is known, and sequences
    onnx_folding.py      computes the contents of small tensors, from which shapes are made
    onnx_graph.py        is the graph in plain numbers
    onnx_fusion.py       fuses formulas that exporters write out into one operator
    computed_weights.py  finds weights and statistics that nodes compute
    operators.py         has the one table of operators: saved tensors, workspace and work
    strides.py           says which reshapes are views, and which copy
    tape_backward.py     writes backward, in the order of a tape, and the optimizer's update

- Files are untrusted. Nothing in them is run, weights are never needed, and sizes that a small file
  could make huge are checked.
"""
