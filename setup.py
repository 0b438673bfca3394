"""What umem is called, what it needs, and what it installs."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
README = HERE / "README.md"


def version() -> str:
    """The version in umem/__init__.py, read as text: importing umem needs NumPy."""
    source = (HERE / "umem" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if found is None:
        raise RuntimeError('umem/__init__.py has no line __version__ = "..."')
    return found[1]


setup(
    name="umem",
    version=version(),
    description="CuPy and Chainer programs that use more memory than the GPU has",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    author="umem maintainers",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["umem", "umem.*"]),
    # Said, so that an editable install is a path and no finder of imports: a finder comes
    # after the path, where a script beside a clone called umem finds that folder instead.
    package_dir={"": "."},
    package_data={"umem": ["py.typed", "**/*.csv", "**/*.json", "reports/page/page_parts/*"]},
    install_requires=["numpy>=1.24", "click>=8.1", "rich>=13.0"],
    extras_require={
        "plot": ["matplotlib>=3.7"],
        # The Makefile reads the line of chainer, to build its wheel.
        "chainer": [
            "chainer>=7.8.1,<7.9",
            "scipy>=1.10",
            "packaging>=22.0",  # in place of pkg_resources, which setuptools 82 dropped
        ],
        # ManagedBuffer came with cuda-core 1.1.
        "cuda12": ["cupy-cuda12x[ctk]>=14.0", "cuda-core[cu12]>=1.1"],
        "cuda13": ["cupy-cuda13x[ctk]>=14.0", "cuda-core[cu13]>=1.1"],
        "test": [
            "pytest>=9.0",
            "pytest-xdist>=3.6",
            "hypothesis>=6.160",
            "pytest-benchmark>=5.0",
            "h5py>=3.8",  # Chainer's HDF5 serializer
            "onnx>=1.16",  # onnx_chainer
        ],
        "dev": ["ruff>=0.9", "mypy>=1.15"],
    },
    entry_points={"console_scripts": ["umem = umem.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Hardware",
        "Typing :: Typed",
    ],
    zip_safe=False,
)
