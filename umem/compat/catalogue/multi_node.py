"""Mends for ChainerMN, and for worker processes under MPI."""

from umem.compat.shim import Replacement, Shim

_MPI_LIMIT = "https://mpi4py.readthedocs.io/en/stable/tutorial.html"
_NUMPY_2_4_NOTES = "https://numpy.org/doc/stable/release/2.4.0-notes.html"
_NUMPY_MEAN = "https://numpy.org/doc/stable/reference/generated/numpy.mean.html"
_NO_CHAINERX = "https://docs.chainer.org/en/stable/chainerx/install/index.html"
_COMMUNICATORS = "https://docs.chainer.org/en/stable/chainermn/reference/index.html"
_WORKERS = "https://docs.chainer.org/en/stable/chainermn/tutorial/tips_faqs.html"
_SUPPORT = "from umem.compat import support as _umem"

SHIMS = (
    Shim(
        name="iterator-size",
        module="chainermn.iterators.multi_node_iterator",
        symptom="multi-node iterator: a TypeError on one rank, others wait",
        link=_NUMPY_2_4_NOTES,
        replacements=(Replacement("int(_size)", "int(_size[0])"),),
    ),
    Shim(
        name="aggregator-native",
        module="chainermn.extensions.observation_aggregator",
        symptom="ObservationAggregator of Variables wants ChainerX",
        link=_NO_CHAINERX,
        replacements=(
            Replacement(
                'value.to_device("native")',
                'value.to_device("native" if chx.is_available() else "@numpy")',
            ),
        ),
    ),
    Shim(
        name="half-variance",
        module="chainermn.functions.batch_normalization",
        symptom="float16 MultiNodeBatchNormalization on NumPy: poor variances",
        link=_NUMPY_MEAN,
        replacements=(
            # The mean of squares minus the square of the mean cancels. With dtype= NumPy sums
            # float16 in float16, where CuPy sums it in float32.
            Replacement(
                "        tmp = xp.empty(gamma.size * 2, dtype=gamma.dtype)\n"
                "        x.mean(axis=axis, out=tmp[:gamma.size], dtype=gamma.dtype)\n"
                "        xp.square(x).mean(axis=axis, out=tmp[gamma.size:], dtype=gamma.dtype)\n",
                "        wide = xp.promote_types(gamma.dtype, 'f'); "
                "tmp = xp.empty(gamma.size * 2, dtype=wide)\n"
                "        x.mean(axis=axis, out=tmp[:gamma.size], dtype=wide)\n"
                "        xp.square(x, dtype=wide)"
                ".mean(axis=axis, out=tmp[gamma.size:], dtype=wide)\n",
            ),
            Replacement(
                "        mean = tmp[:gamma.size]\n"
                "        sqmean = tmp[gamma.size:]\n"
                "        var = sqmean - xp.square(mean)\n"
                "        return mean, var\n",
                "        mean = tmp[:gamma.size]\n"
                "        sqmean = tmp[gamma.size:]\n"
                "        var = sqmean - xp.square(mean)\n"
                "        return mean.astype(gamma.dtype, copy=False), "
                "var.astype(gamma.dtype, copy=False)\n",
            ),
        ),
    ),
    Shim(
        name="communicator-choice",
        module="chainermn.communicators",
        symptom="a communicator that cannot work here fails late, or unexplained",
        link=_COMMUNICATORS,
        replacements=(
            Replacement(
                "from chainer.utils import argument\n",
                f"from chainer.utils import argument; {_SUPPORT}\n",
            ),
            Replacement("    comm = None\n", "    _umem.require_communicator(communicator_name)\n"),
        ),
    ),
    Shim(
        name="nccl-types",
        module="chainermn.nccl",
        symptom="flat communicator without NCCL: no attribute NCCL_FLOAT32",
        link="https://docs.cupy.dev/en/stable/install.html",
        replacements=(
            # ChainerMN's own kernels use these names of types, with NCCL's numbers.
            Replacement(
                "    _available = False\n",
                "    _available = False; NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64 = 6, 7, 8\n",
            ),
        ),
    ),
    Shim(
        name="unpack-copy",
        module="chainermn.communicators._memory_utility",
        symptom="float16 gradients on GPUs: unable to avoid copy (CuPy 14)",
        link="https://docs.cupy.dev/en/latest/upgrade.html",
        replacements=(
            Replacement(
                "xp.array(v, copy=False, dtype=transfer_dtype)",
                "xp.asarray(v, dtype=transfer_dtype)",
            ),
        ),
    ),
    Shim(
        name="message-size",
        module="chainermn.communicators._memory_utility",
        symptom="a message over 2^31 elements: MPI.Exception(13)",
        link=_MPI_LIMIT,
        replacements=(
            Replacement("import mpi4py.MPI\n", f"import mpi4py.MPI; {_SUPPORT}\n"),
            Replacement(
                "    array = xp.ascontiguousarray(array)\n",
                "    array = xp.ascontiguousarray(_umem.one_message(array))\n",
            ),
        ),
    ),
    Shim(
        name="message-size-sent",
        module="chainermn.communicators.mpi_communicator_base",
        symptom="a message over 2^31 elements: MPI.Exception(13)",
        link=_MPI_LIMIT,
        replacements=(
            Replacement("import chainer.utils\n", f"import chainer.utils; {_SUPPORT}\n"),
            Replacement(
                "                array = numpy.ascontiguousarray(array)\n",
                "                array = numpy.ascontiguousarray(_umem.one_message(array))\n",
            ),
        ),
    ),
    Shim(
        name="fork-server",
        module="chainer.iterators.multiprocess_iterator",
        symptom="MultiprocessIterator under forkserver waits for ever",
        link=_WORKERS,
        replacements=(
            Replacement(
                "from multiprocessing import sharedctypes  # type: ignore\n",
                f"from multiprocessing import sharedctypes; {_SUPPORT}\n",
            ),
            Replacement(
                "_response_time = 0.1\n", "_response_time = 0.1; _umem.mend_fork_server()\n"
            ),
        ),
    ),
    Shim(
        name="fork-after-mpi",
        module="chainer.iterators.multiprocess_iterator",
        symptom="MultiprocessIterator forks a rank that is in MPI, unsaid",
        link=_WORKERS,
        replacements=(
            Replacement(
                "        self._pool = multiprocessing.Pool(\n",
                "        _umem.warn_of_fork(); self._pool = multiprocessing.Pool(\n",
            ),
        ),
    ),
)
