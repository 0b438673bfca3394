"""Steps of models that were exported: what a file in ONNX says of a step, without a run."""
