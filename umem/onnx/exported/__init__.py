"""Steps of models that were exported: what a file in ONNX says of a step, without a run.

`umem.onnx.onnx_step` and `umem.onnx.graph_of` come from here, and `umem.onnx.fitting` plans on the
result. A file is read, put into plain numbers, and turned into the events that a recorder would
have seen.

    exported_step.py     is `onnx_step`: it writes forward, and puts the trace together
    onnx_reading.py      reads and checks a file
    onnx_weights.py      collects initialisers and constants, and contents where they are small
    onnx_functions.py    puts a model's functions in the place of their calls
    onnx_inference.py    infers shapes node by node, by ONNX
    onnx_lowering.py     lowers branches that are decided, and sequences
    onnx_folding.py      computes the contents of small tensors, which shapes are made of
    onnx_graph.py        is the graph in plain numbers
    onnx_fusion.py       puts formulas that exporters write out back into one operator
    computed_weights.py  finds weights and statistics that nodes compute
    operators.py         has the one table of operators: saved tensors, workspace and work
    strides.py           says which reshapes are views, and which copy
    tape_backward.py     writes backward, in the order of a tape, and the optimizer's update

- A file may come from anywhere. Nothing in it is run, weights are never needed, and sizes that a
  small file could blow up are checked.
"""
