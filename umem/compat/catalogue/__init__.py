"""Every mend of Chainer, as data; the order within a module is the order of application."""

from umem.compat.catalogue import cupy14, importing, libraries, multi_node, numpy2, promotion
from umem.compat.shim import Shim

SHIMS: tuple[Shim, ...] = (
    *importing.SHIMS,
    *numpy2.SHIMS,
    *promotion.SHIMS,
    *libraries.SHIMS,
    *cupy14.SHIMS,
    *multi_node.SHIMS,
)
