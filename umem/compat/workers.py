"""What a fork server imports before Chainer, so that the workers it forks run mended."""

from umem.compat.finder import install

install()
