"""What bench/dynamic.py trains: programs whose graph is another one at each step."""

from umem.compat import install

install()  # before programs.py imports Chainer
