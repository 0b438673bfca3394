"""Runs Chainer 7.8 on current NumPy, Python and CuPy, and old packages on current NumPy.

Importing `umem.chainer` installs the layer, ``umem run`` installs it for scripts, and ``umem
compat`` reports on it. Importing this package does not import Chainer, so a start-up hook can use
it.

    finder.py             has the import hook that mends modules of Chainer as they are imported
    shim.py               describes one mend: a module, its versions, and texts to replace
    catalogue/            has every mend, as data
    support.py            has the functions that mended modules call
    installation.py       finds the Chainer that Python would import, and its release
    chainer_installer.py  installs Chainer; the only module that knows how
    requirement.py        checks a requirement against the installed packages
    shim_report.py        reports on every mend in this environment
    pth.py                puts the layer into every Python process of an environment
    workers.py            is imported by a fork server before Chainer
    cuda_devices.py       counts CUDA devices without making a fork unusable
    lending.py            has `lend_removed_names`: one package sees names that NumPy has removed
    numpy_stand_in.py     is the NumPy that such a package sees
    removed_names.py      has the table of these names and their values
    pkg_resources.py      replaces pkg_resources, which setuptools 82 removed

- A mend names its versions. If its text does not match, the import fails with an error.
- NumPy itself never changes.
"""

from typing import TYPE_CHECKING

from umem.compat.finder import install, is_installed
from umem.compat.lending import lend_removed_names

__all__ = ["install", "is_installed", "lend_removed_names"]

if TYPE_CHECKING:
    from umem.compat.chainer_installer import get_chainer
    from umem.compat.finder import arm
    from umem.compat.installation import find_package, package_version
    from umem.compat.lending import LentNames, lent_script, package_in_need
    from umem.compat.pth import install_pth, installed_pth, remove_pth
    from umem.compat.shim_report import Row, check, import_mended
else:
    from umem._common.faces import face

    _, __getattr__ = face(
        __name__,
        chainer_installer="get_chainer",
        finder="arm",
        installation="find_package package_version",
        lending="LentNames lent_script package_in_need",
        pth="install_pth installed_pth remove_pth",
        shim_report="Row check import_mended",
    )
