"""Every mend of Chainer, as data; the order within a module is the order of application.

`umem.compat.finder` applies the mends as modules are imported.

    importing.py   has mends that importing Chainer or its testing package needs
    numpy2.py      has mends for names and signatures that NumPy removed or changed
    promotion.py   has mends for NEP 50, the types of NumPy 2
    libraries.py   has mends for SciPy, h5py, protobuf, ONNX and Python
    cupy14.py      has mends for CuPy without a device or cuDNN, and with current headers
    multi_node.py  has mends for ChainerMN, and for worker processes under MPI
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
