"""Imported by a fork server before Chainer, so that its workers run mended."""

from umem.compat.finder import install

install()
