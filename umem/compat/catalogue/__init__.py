"""Every mend of Chainer, as data; the order within a module is the order of application.

`umem.compat.finder` applies the mends as modules are imported.

    importing.py   has those without which Chainer, or its testing package, does not import
    numpy2.py      has those for names and signatures that NumPy removed or changed
    promotion.py   has those for NEP 50, the types of NumPy 2
    libraries.py   has those for SciPy, h5py, protobuf, ONNX and Python
    cupy14.py      has those for CuPy without a device or cuDNN, and with today's headers
    multi_node.py  has those for ChainerMN, and for worker processes beside MPI
"""

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
