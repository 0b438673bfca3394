"""A masked language model in plain Chainer, and the text that it is trained on."""
