"""What bench/onnx_graphs.py exports."""

import umem.chainer  # noqa: F401  (before chainer, which the parts import)
