"""For tools that still ask for a setup.py; pyproject.toml says what umem is and needs."""

from setuptools import setup

setup()
