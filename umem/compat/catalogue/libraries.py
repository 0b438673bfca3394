"""Mends for SciPy, h5py, protobuf, ONNX and Python itself."""

from umem.compat.shim import Replacement, Shim

_ONNX_SYMPTOM = "onnx_chainer: 'ONNX is not installed' (onnx.mapping is gone)"
_ONNX_LINK = "https://github.com/onnx/onnx/pull/6914"
_ONNX_TYPES = Replacement(
    "from onnx.mapping import NP_TYPE_TO_TENSOR_TYPE\n",
    "from umem.compat import support; NP_TYPE_TO_TENSOR_TYPE = support.onnx_types()\n",
)

SHIMS = (
    Shim(
        name="sparse-float16",
        module="chainer.functions.math.sparse_matmul",
        symptom="sparse_matmul in float16: SciPy refuses",
        link="https://github.com/scipy/scipy/issues/20207",
        replacements=(
            Replacement(
                "    _m, _k = A_shape\n    _n = B.shape[-1]\n    if B.ndim == 2:\n        sp_A",
                "    _m, _k = A_shape; A_data, B = (\n"
                "        a.astype(numpy.promote_types(a.dtype, 'f4'), copy=False)"
                " for a in (A_data, B)); _n = B.shape[-1]\n"
                "    if B.ndim == 2:\n        sp_A",
            ),
        ),
    ),
    Shim(
        name="hdf5-text",
        module="chainer.serializers.hdf5",
        versions="h5py>=3.0",
        symptom="text read from HDF5 snapshots comes back as \"b'...'\"",
        link="https://docs.h5py.org/en/stable/whatsnew/3.0.html",
        replacements=(
            Replacement("import six\n", "import six; from umem.compat import support as _umem\n"),
            Replacement(
                "        if value is None:\n            return numpy.asarray(dataset)\n",
                "        if value is None:\n            return _umem.h5_value(dataset)\n",
            ),
            Replacement(
                "value = type(value)(numpy.asarray(dataset))",
                "value = type(value)(_umem.h5_value(dataset))",
            ),
        ),
    ),
    Shim(
        name="caffe-descriptors",
        module="chainer.links.caffe.protobuf3.caffe_pb2",
        versions="protobuf>=4.0",
        symptom="CaffeFunction: descriptors cannot be created directly",
        link="https://protobuf.dev/news/2022-05-06/",
        replacements=(
            Replacement(
                "from google.protobuf.internal import enum_type_wrapper\n"
                "from google.protobuf import descriptor as _descriptor\n"
                "from google.protobuf import message as _message\n"
                "from google.protobuf import reflection as _reflection\n"
                "from google.protobuf import symbol_database as _symbol_database\n"
                "from google.protobuf import descriptor_pb2\n"
                "# @@protoc_insertion_point(imports)\n"
                "\n"
                "_sym_db = _symbol_database.Default()\n",
                "from google.protobuf.internal import builder as _builder\n"
                "from google.protobuf import descriptor_pool as _descriptor_pool\n\n\n\n\n\n\n\n",
            ),
            Replacement(
                "DESCRIPTOR = _descriptor.FileDescriptor(\n"
                "  name='caffe.proto',\n"
                "  package='caffe',\n"
                "  syntax='proto2',\n"
                "  serialized_pb=_b(",
                "DESCRIPTOR = _descriptor_pool.DescriptorPool().AddSerializedFile(\n\n\n\n  _b(",
            ),
            # A separate pool does not conflict with another caffe.proto in the process. The
            # generated classes in between become an unused string.
            Replacement(
                "_sym_db.RegisterFileDescriptor(DESCRIPTOR)\n",
                "_builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals()); "
                "_builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, 'caffe_pb2', globals()); "
                "r'''\n",
            ),
            Replacement("# @@protoc_insertion_point(module_scope)", "'''"),
        ),
    ),
    Shim(
        name="set-daemon",
        module="chainer.iterators.multiprocess_iterator",
        symptom="warns from Python 3.10: setDaemon",
        link="https://docs.python.org/3/whatsnew/3.10.html#deprecated",
        replacements=(Replacement("thread.setDaemon(True)", "thread.daemon = True"),),
    ),
    Shim(
        name="onnx-export",
        module="onnx_chainer.export",
        versions="onnx>=1.13",
        symptom=_ONNX_SYMPTOM,
        link=_ONNX_LINK,
        replacements=(
            Replacement(
                "    from onnx.mapping import NP_TYPE_TO_TENSOR_TYPE\n",
                "    from umem.compat import support; "
                "NP_TYPE_TO_TENSOR_TYPE = support.onnx_types()\n",
            ),
        ),
    ),
    Shim(
        name="onnx-advice",
        module="onnx_chainer.export",
        symptom="without ONNX: advice to install onnx<1.7",
        link=_ONNX_LINK,
        replacements=(Replacement("pip install \\'onnx<1.7.0\\'", "pip install onnx"),),
    ),
    Shim(
        name="onnx-constants",
        module="onnx_chainer.context",
        versions="onnx>=1.13",
        symptom=_ONNX_SYMPTOM,
        link=_ONNX_LINK,
        replacements=(
            # Constants keep ONNX's raw bytes, which mean the same.
            Replacement(
                "    field_name = onnx.mapping.STORAGE_TENSOR_TYPE_TO_FIELD.get(\n"
                "        tensor.data_type, None)\n",
                "    field_name = None\n\n",
            ),
        ),
    ),
    Shim(
        name="onnx-arrays",
        module="onnx_chainer.functions.array",
        versions="onnx>=1.13",
        symptom=_ONNX_SYMPTOM,
        link=_ONNX_LINK,
        replacements=(_ONNX_TYPES,),
    ),
    Shim(
        name="onnx-math",
        module="onnx_chainer.functions.math",
        versions="onnx>=1.13",
        symptom=_ONNX_SYMPTOM,
        link=_ONNX_LINK,
        replacements=(_ONNX_TYPES,),
    ),
)
