"""The folder that ``umem run`` puts on the path of the processes that a script starts.

Python itself imports the file there, as it starts.

    sitecustomize.py  waits for ``import chainer`` there, and mends it then; it lends names to old
                      packages
"""
