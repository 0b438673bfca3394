"""Saved tensors: the slots of Chainer's tape that hold them, their memory, and where they go."""
