"""Mends that importing Chainer or its testing package needs."""

from umem.compat.shim import Replacement, Shim

_PKG_RESOURCES = "https://setuptools.pypa.io/en/stable/history.html#v82-0-0"
_NUMPY_2 = "https://numpy.org/doc/stable/numpy_2_0_migration_guide.html"

SHIMS = (
    Shim(
        name="sctypes",
        module="chainer.functions.array.as_strided",
        versions="numpy>=2.0",
        symptom="no import: np.sctypes is gone",
        link=_NUMPY_2,
        replacements=(
            Replacement(
                "for t in np.sctypes['int']}", "for t in (np.int8, np.int16, np.int32, np.int64)}"
            ),
            Replacement("gy.dtype not in np.sctypes['float']", "gy.dtype.kind != 'f'"),
        ),
    ),
    Shim(
        name="environment-check",
        module="chainer._environment_check",
        symptom="no import: numpy.distutils, pkg_resources are gone",
        link="https://numpy.org/doc/stable/reference/distutils_status_migration.html",
        replacements=(
            Replacement("import numpy.distutils.system_info\nimport pkg_resources\n", "\n\n"),
            # They check NumPy's BLAS on macOS, and that CuPy 7 or iDeep 2 fit Chainer.
            Replacement(
                "    _check_osx_numpy_backend()\n    _check_optional_dependencies()\n", "\n\n"
            ),
        ),
    ),
    Shim(
        name="testing-requirements",
        module="chainer.testing.helper",
        symptom="chainer.testing: pkg_resources is gone",
        link=_PKG_RESOURCES,
        replacements=(
            Replacement("import pkg_resources\n", "from umem.compat import support as _umem\n"),
            Replacement(
                "    ws = pkg_resources.WorkingSet()\n"
                "    try:\n"
                "        ws.require(*requirements)\n"
                "        skip = False\n"
                "    except pkg_resources.ResolutionError:\n"
                "        skip = True\n",
                "    skip = not _umem.requirements_met(requirements)\n\n\n\n\n\n",
            ),
            Replacement(
                "    ws = pkg_resources.WorkingSet()\n"
                "    try:\n"
                "        ws.require(*requirements)\n"
                "        skip = True\n"
                "    except pkg_resources.ResolutionError:\n"
                "        skip = False\n",
                "    skip = _umem.requirements_met(requirements)\n\n\n\n\n\n",
            ),
        ),
    ),
    Shim(
        name="doctest-requirements",
        module="chainer.testing.doctest_helper",
        symptom="chainer.testing: pkg_resources is gone",
        link=_PKG_RESOURCES,
        replacements=(
            Replacement("import pkg_resources\n", "from umem.compat import support as _umem\n"),
            Replacement(
                "    ws = pkg_resources.WorkingSet()\n"
                "    try:\n"
                "        ws.require(*requirements)\n"
                "    except pkg_resources.ResolutionError:\n"
                "        return False\n",
                "    if not _umem.requirements_met(requirements):\n        return False\n\n\n\n",
            ),
        ),
    ),
)
