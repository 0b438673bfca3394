"""What bench/accumulation.py trains."""

import umem.chainer  # noqa: F401  (before chainer, which the parts import)
